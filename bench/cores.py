"""Which core a process runs on, and the CPU time that it used."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil

__all__ = ["cpu_seconds", "pinned", "two_sides"]


def two_sides() -> tuple[set[int], set[int]]:
    """Returns the cores of the sending and of the receiving side: one each where there are two."""
    usable = sorted(os.sched_getaffinity(0))
    return {usable[0]}, {usable[1 % len(usable)]}


@contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """Keeps the calling thread, and every process and thread that it starts, on these cores for the time of a block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_seconds(pids: Sequence[int]) -> float:
    """Returns the CPU time that processes have used so far, in user and in system mode, over all their threads."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(float(t.user + t.system) for t in times)
