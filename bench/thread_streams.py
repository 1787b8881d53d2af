"""A device made of two host threads: one computes, one copies. It stands in for CUDA where there is none.

Each stream is a thread that runs its work in order; events cross between them. Forwards, packing and copies are real
and run at the same time on two cores, so the copy pipeline overlaps or does not, just as on a device. A copy engine
moves its bytes without a core: `copy_s` is how long each copy takes besides its memcpy.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from target_server.errors import DeadlineError
from target_server.streams import Event, Stream

__all__ = ["ThreadStreams"]


class _Event:
    def __init__(self) -> None:
        self._reached = threading.Event()
        self._time_s = 0.0

    def reach(self) -> None:
        self._time_s = time.monotonic()
        self._reached.set()

    def done(self) -> bool:
        return self._reached.is_set()

    def wait(self, timeout_s: float) -> None:
        if not self._reached.wait(timeout_s):
            raise DeadlineError(f"the simulated device did not get there within {timeout_s:.0f} s")

    def seconds_since(self, earlier: Any) -> float:
        assert isinstance(earlier, _Event)
        return self._time_s - earlier._time_s


class _Stream:
    """A thread that runs work in order. A work that raises ends the process: no measure is worth that."""

    def __init__(self, extra_s: Callable[[], float] = lambda: 0.0) -> None:
        self._extra_s = extra_s
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def enqueue(self, work: Callable[[], None]) -> None:
        def run() -> None:
            work()
            time.sleep(self._extra_s())

        self._queue.put(run)

    def wait_event(self, event: Event) -> None:
        self._queue.put(lambda: event.wait(600.0))

    def record_event(self) -> _Event:
        event = _Event()
        self._queue.put(event.reach)
        return event

    def _run(self) -> None:
        while True:
            self._queue.get()()


class ThreadStreams:
    """Streams of a device that shares no memory with the host (`target_server.streams.Streams`).

    Attributes:
        copy_s: seconds that each copy takes besides its memcpy.
    """

    shares_memory = False

    def __init__(self) -> None:
        self.copy_s = 0.0
        self.compute: Stream = _Stream()
        self.copy: Stream = _Stream(lambda: self.copy_s)

    def allocate_device(self, size_bytes: int) -> torch.Tensor:
        """Returns memory of the device, which is the host's here."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Returns a slot."""
        return torch.empty(size_bytes, dtype=torch.uint8)
