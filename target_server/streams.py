"""Queues of device work and the events between them: the one seam below the copy pipeline.

The pipeline (copier.py) is written against these interfaces. `CudaStreams` runs it on CUDA, `HostStreams` on the CPU,
where all work is done by the time it is enqueued, and tests run it on a model that executes queued work in every order
that the recorded events allow. Nothing here knows what is computed or copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from target_server.errors import DeadlineError

__all__ = ["CudaStreams", "Event", "HostStreams", "Stream", "Streams", "build_streams"]

# A copy takes milliseconds and a forward hundreds; torch's own synchronize has no deadline.
_POLL_S = 0.0005


class Event(Protocol):
    """A point in one stream's order."""

    def done(self) -> bool:
        """Whether all work before the point has ended."""

    def wait(self, timeout_s: float) -> None:
        """Blocks the calling thread until `done`; DeadlineError after the timeout."""

    def seconds_since(self, earlier: Any) -> float:
        """Returns the time between two events that are done, on the device's clock."""


class Stream(Protocol):
    """Work that runs in the order in which it is enqueued."""

    def enqueue(self, work: Callable[[], None]) -> None:
        """Issues work onto the stream. The call may return before the work has run, never before it was issued."""

    def wait_event(self, event: Event) -> None:
        """Holds back all later work of this stream until the event is done."""

    def record_event(self) -> Event:
        """Returns the point after all work enqueued so far."""


class Streams(Protocol):
    """What one replica's device offers.

    Attributes:
        compute: where forwards and packing run.
        copy: where device-to-host copies run.
        shares_memory: whether device work can write host slots itself, so that no copy is needed.
    """

    compute: Stream
    copy: Stream
    shares_memory: bool

    def allocate_device(self, size_bytes: int) -> torch.Tensor:
        """Returns a flat uint8 tensor on the device; called at start only."""

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Returns a flat uint8 tensor on the host that the device can copy to asynchronously; at start only."""


class _DoneEvent:
    """The event of a stream that runs its work at once."""

    def __init__(self) -> None:
        self._time_s = time.monotonic()

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        """Returns at once."""

    def seconds_since(self, earlier: Any) -> float:
        assert isinstance(earlier, _DoneEvent)
        return self._time_s - earlier._time_s


class _HostStream:
    """Runs work when it is enqueued."""

    def enqueue(self, work: Callable[[], None]) -> None:
        work()

    def wait_event(self, event: Event) -> None:
        """Does nothing: host events are done when they exist."""

    def record_event(self) -> Event:
        return _DoneEvent()


class HostStreams:
    """A CPU: one order, no copies."""

    shares_memory = True

    def __init__(self) -> None:
        self.compute: Stream = _HostStream()
        self.copy: Stream = self.compute

    def allocate_device(self, size_bytes: int) -> torch.Tensor:
        """Returns host memory: the host is the device."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Returns pageable memory; its pages are touched when first used."""
        return torch.empty(size_bytes, dtype=torch.uint8)


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() > deadline:
                raise DeadlineError(f"the device did not finish a copy within {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def seconds_since(self, earlier: Any) -> float:
        assert isinstance(earlier, _CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enqueue(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)

    def record_event(self) -> Event:
        return _CudaEvent(self._stream)


class CudaStreams:
    """A CUDA device: copies run beside forwards."""

    shares_memory = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The weights were written on the default stream, which these streams don't wait for.
        torch.cuda.synchronize(device)
        self.compute: Stream = _CudaStream(device)
        self.copy: Stream = _CudaStream(device)

    def allocate_device(self, size_bytes: int) -> torch.Tensor:
        """Returns device memory that is never given back, so no stream can meet it under another owner."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Returns pinned memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


def build_streams(device: torch.device) -> Streams:
    """Returns the streams of a replica's device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
