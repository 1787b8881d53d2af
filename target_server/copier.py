"""From the forward to a readable host slot: which stream may touch which buffer, and when.

    compute stream   wait(buffer's last copy)  forward + packing into the buffer   record E1
    copy stream                                           wait(E1)  buffer -> host slot   record E2
    copier thread                                                               wait(E2): slot readable

The forerunner lost its loss to packing into memory that a copy was still reading. Here a device buffer remembers the
event of the last copy out of it, and no write to it is issued before the compute stream waits for that event; a host
slot is only filled while `buffers.SlotPool` says FILLING and only read after E2. Buffers are allocated once. This
module must not look at a batch's content, and the copier thread must not issue device work.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from target_server.streams import Event, Streams

__all__ = ["Copier", "CopyPipeline", "Issued"]

_log = logging.getLogger(__name__)
_Job = TypeVar("_Job")


@dataclass
class _DeviceBuffer:
    """A packed buffer on the device and the event of the last copy out of it."""

    memory: torch.Tensor
    copied: Event | None = None


@dataclass(frozen=True)
class Issued:
    """The points in time of one batch on the device.

    Attributes:
        begun: its forward begins.
        filled: its packed buffer is full.
        copied: its host slot holds it.
    """

    begun: Event
    filled: Event
    copied: Event


class CopyPipeline:
    """The device buffers of one replica and the order of work on them. Used by the replica's thread alone."""

    def __init__(self, streams: Streams, *, buffer_bytes: int, buffer_count: int, overlap: bool) -> None:
        self._streams = streams
        self._copy = streams.copy if overlap else streams.compute
        count = 0 if streams.shares_memory else buffer_count
        self._buffers = [_DeviceBuffer(streams.allocate_device(buffer_bytes)) for _ in range(count)]
        self._next = 0

    def run(self, fill: Callable[[torch.Tensor], None], slot_memory: torch.Tensor) -> Issued:
        """Issues one batch.

        Args:
            fill: issues the work that writes every byte of the tensor it is given, on the current stream.
            slot_memory: the part of a host slot that the batch fills, flat uint8; the caller owns it.

        Returns:
            Its events; `slot_memory` holds the batch after `copied`. Whatever `fill` raises is passed on, and then
            nothing will write to `slot_memory`.
        """
        compute = self._streams.compute
        if self._streams.shares_memory:
            begun = compute.record_event()
            compute.enqueue(lambda: fill(slot_memory))
            filled = compute.record_event()
            return Issued(begun, filled, filled)
        buffer = self._buffers[self._next]
        packed = buffer.memory[: slot_memory.numel()]
        if buffer.copied is not None:
            compute.wait_event(buffer.copied)
        begun = compute.record_event()
        compute.enqueue(lambda: fill(packed))
        filled = compute.record_event()
        self._copy.wait_event(filled)
        self._copy.enqueue(lambda: _copy_out(packed, slot_memory))
        copied = self._copy.record_event()
        buffer.copied = copied
        self._next = (self._next + 1) % len(self._buffers)
        return Issued(begun, filled, copied)


def _copy_out(packed: torch.Tensor, slot_memory: torch.Tensor) -> None:
    slot_memory.copy_(packed, non_blocking=True)


class Copier(Generic[_Job]):
    """Waits for copies in the order in which they were issued and passes each job on, on a thread of its own."""

    def __init__(
        self, on_copied: Callable[[_Job], None], on_fatal: Callable[[Exception], None], *, timeout_s: float
    ) -> None:
        self._on_copied = on_copied
        self._on_fatal = on_fatal
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[tuple[_Job, Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="copier", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, job: _Job, copied: Event) -> None:
        """Passes the job on once its event is done; called by the replica's thread."""
        self._queue.put((job, copied))

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after what was put; returns whether it ended in time."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def finish(self, job: _Job, copied: Event) -> None:
        """Waits for one copy and passes its job on; what the thread does for each."""
        copied.wait(self._timeout_s)
        self._on_copied(job)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self.finish(*item)
            except Exception as error:
                _log.exception("the replica can't go on")
                self._on_fatal(error)
                return
