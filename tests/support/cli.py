"""Running the trainer's command line inside the test's process, which saves seconds of imports a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from drafter_trainer.__main__ import main


@contextmanager
def logging_restored() -> Iterator[None]:
    """`main` sets up logging for a process of its own: puts back what pytest has installed."""
    root, ours = logging.getLogger(), logging.getLogger("drafter_trainer")
    before = root.handlers[:], root.level, ours.level
    try:
        yield
    finally:
        root.handlers, root.level = before[0], before[1]
        ours.setLevel(before[2])


def run_cli(*argv: object) -> int:
    """Exit code of `drafter-trainer` with these arguments."""
    with logging_restored():
        return main([str(argument) for argument in argv])
