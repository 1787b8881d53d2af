"""From plan positions to batches on the device, in order, ahead of the trainer as far as the window allows.

Owns which positions this rank takes (r, r + R, ...), the requests ahead, and the copy to the device. On the CPU a
batch's features ARE the received bytes, in the ring's slot; on CUDA they are copied on a side stream while the batch
before trains, and the slot is free when that copy has ended. Must never change the order or train a position twice.

Used by one thread. Shapes: T packed tokens, W elements of a received row.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from target_wire.codec import tensor_from_buffer
from target_wire.spec import DType
from torch import Tensor

from drafter_trainer.features import FeatureLayout
from drafter_trainer.stopwatch import OFF, Stopwatch
from drafter_trainer.types import MicroBatch, TrainBatch, Version

__all__ = ["BatchSource", "FedBatch", "Feed", "FeedSettings"]


class ReceivedSlot(Protocol):
    """A batch as a source hands it over."""

    position: int
    payload: memoryview
    version_number: int
    version_digest: str
    replica_index: int
    finite: bool


class BatchSource(Protocol):
    """Where batches come from, in the order in which they were asked for; ``client.delivery.Delivery`` is one."""

    @property
    def free_slots(self) -> int:
        """Requests that may be submitted now."""

    def submit(self, *, position: int, lengths: Sequence[int], token_ids: bytes) -> None:
        """Asks for the next batch; doesn't wait."""

    def take(self) -> Any:
        """The next batch, a ``ReceivedSlot``; waits for it."""

    def release(self, slot: Any) -> None:
        """The slot may be filled again; in the order of taking."""

    def take_asked_again(self) -> int:
        """Batches that were asked for again since the last call: nobody has the head of their version any more."""


class MicroBatches(Protocol):
    """What a feed needs of a plan."""

    def micro_batch(self, position: int) -> MicroBatch:
        """The micro-batch at a position."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedSettings:
    """What of the plan a rank reads, and how it arrives."""

    start: int
    """First plan position of the run, over all ranks."""
    stop: int
    """The position after the last."""
    rank: int
    num_ranks: int
    wire_dtype: DType
    layout: FeatureLayout
    """What a received row holds."""
    device: torch.device


@dataclasses.dataclass(frozen=True)
class FedBatch:
    """A batch ready to train, valid within ``Feed.next_batch``."""

    batch: TrainBatch
    finite: bool
    """False when the target marked it: then it must not be trained."""


class Feed:
    """Batches of one rank.

    Args:
        plan: Positions to micro-batches.
        source: Where features come from.
        settings: Which positions, which shape, which device.
        stopwatch: Times waiting and copying.
    """

    def __init__(
        self, plan: MicroBatches, source: BatchSource, settings: FeedSettings, *, stopwatch: Stopwatch = OFF
    ) -> None:
        self._stopwatch = stopwatch
        self._plan = plan
        self._source = source
        self._settings = settings
        first = settings.start + (settings.rank - settings.start) % settings.num_ranks
        self._positions = self._positions_from(first)
        self._planned: collections.deque[MicroBatch] = collections.deque()
        self._submitted = 0  # of those planned
        self._copier = _DeviceCopier(settings.device) if settings.device.type == "cuda" else None
        self.wait_s = 0.0
        self._thrown_away = 0

    def upcoming(self, count: int) -> list[MicroBatch]:
        """The next micro-batches in order, at most ``count``, without waiting; fewer only at the end."""
        while len(self._planned) < count and self._plan_one():
            pass
        return list(self._planned)[:count]

    def fill(self) -> None:
        """Requests as much as there are free slots."""
        while self._source.free_slots > 0 and (self._submitted < len(self._planned) or self._plan_one()):
            micro = self._planned[self._submitted]
            self._source.submit(
                position=micro.position,
                lengths=micro.lengths,
                token_ids=micro.input_ids_T.to(torch.int32).numpy().tobytes(),
            )
            self._submitted += 1

    @contextlib.contextmanager
    def next_batch(self) -> Iterator[FedBatch]:
        """The next batch; nothing may read its features after the block."""
        self.fill()
        started_s = time.monotonic()
        slot = self._source.take()
        self.wait_s += time.monotonic() - started_s
        micro = self._planned.popleft()
        self._submitted -= 1
        assert slot.position == micro.position, f"batch {slot.position} where {micro.position} is due"
        features_TW = self._features(slot, micro)
        if self._copier is not None:
            features_TW = self._copier.copy(features_TW, self._stopwatch)
            self._source.release(slot)
            self.fill()
        version = Version(slot.version_number, slot.version_digest)
        context_TC, last_TD = self._settings.layout.split(features_TW)
        yield FedBatch(TrainBatch(micro, context_TC, version, slot.replica_index, last_TD), slot.finite)
        if self._copier is None:
            del features_TW, context_TC, last_TD
            self._source.release(slot)
            self.fill()

    def take_wait_s(self) -> float:
        """Seconds waited for batches since the last call."""
        waited_s, self.wait_s = self.wait_s, 0.0
        return waited_s

    def take_asked_again(self) -> int:
        """Batches that were asked for again since the last call."""
        thrown_away, self._thrown_away = self._thrown_away, 0
        return thrown_away + self._source.take_asked_again()

    def go_back(self, position: int) -> None:
        """Goes back to one of this rank's positions: what is on the way is thrown away and asked for again.

        Waits for what is on the way, since a slot can't be given up while it's being filled.
        """
        upcoming = self._planned[0].position if self._planned else next(self._positions, self._settings.stop)
        self._thrown_away += -((position - upcoming) // self._settings.num_ranks) + self._submitted
        for _ in range(self._submitted):
            self._source.release(self._source.take())
        self._submitted = 0
        self._planned.clear()
        self._positions = self._positions_from(position)
        self.fill()

    def _positions_from(self, first: int) -> Iterator[int]:
        return iter(range(first, self._settings.stop, self._settings.num_ranks))

    def _plan_one(self) -> bool:
        position = next(self._positions, None)
        if position is not None:
            self._planned.append(self._plan.micro_batch(position))
        return position is not None

    def _features(self, slot: ReceivedSlot, micro: MicroBatch) -> Tensor:
        shape = (sum(micro.lengths), self._settings.layout.width)
        return tensor_from_buffer(slot.payload, self._settings.wire_dtype, shape)


class _DeviceCopier:
    """Copies received features to the device on a stream of its own; the training stream waits for the copy only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, features_TW: Tensor, stopwatch: Stopwatch) -> Tensor:
        """The features on the device; the host bytes may be overwritten on return."""
        with torch.cuda.stream(self._stream):
            with stopwatch.part("h2d"):
                on_device_TW = features_TW.to(self._device, non_blocking=True)
            copied = self._stream.record_event()
        training = torch.cuda.current_stream(self._device)
        training.wait_event(copied)
        on_device_TW.record_stream(training)
        copied.synchronize()  # the trainer still has the step before queued; only the host waits
        return on_device_TW
