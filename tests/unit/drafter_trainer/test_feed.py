"""Order, ownership and accounting of the feed, against a source that checks its own rules."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from target_wire.spec import DType

from drafter_trainer.features import FeatureLayout
from drafter_trainer.feed import Feed, FeedSettings
from drafter_trainer.types import MicroBatch

WIDTH = 6


class Plan:
    """Micro-batch p has p % 4 + 1 tokens of value p."""

    def micro_batch(self, position: int) -> MicroBatch:
        count = position % 4 + 1
        ids = torch.full((count,), position)
        return MicroBatch(position, 0, (position,), (count,), ids, torch.ones(count, dtype=torch.bool))


@dataclasses.dataclass
class Slot:
    position: int
    payload: memoryview
    version_number: int = 1
    version_digest: str = "d"
    replica_index: int = 0
    finite: bool = True


class Source:
    """Slots that are overwritten as soon as they are released; refuses to be misused."""

    def __init__(self, slots: int) -> None:
        self.buffers = [bytearray(4 * WIDTH * 4) for _ in range(slots)]
        self.asked: collections.deque[tuple[int, int, int]] = collections.deque()
        self.submitted = self.taken = self.released = 0

    @property
    def free_slots(self) -> int:
        return len(self.buffers) - (self.submitted - self.released)

    def submit(self, *, position: int, lengths: Sequence[int], token_ids: bytes) -> None:
        assert self.free_slots > 0
        assert np.frombuffer(token_ids, dtype="<i4").tolist() == [position] * sum(lengths)
        self.asked.append((position, sum(lengths), self.submitted % len(self.buffers)))
        self.submitted += 1

    def take(self) -> Slot:
        position, tokens, index = self.asked.popleft()
        self.taken += 1
        rows = np.full((tokens, WIDTH), position, dtype=np.float32)
        self.buffers[index][: rows.nbytes] = rows.tobytes()
        return Slot(position, memoryview(self.buffers[index])[: rows.nbytes])

    def take_asked_again(self) -> int:
        return 0

    def release(self, slot: Slot) -> None:
        assert self.released < self.taken
        slot.payload[:] = b"\xff" * len(slot.payload)
        self.released += 1


def feed_of(source: Source, *, start: int = 0, stop: int = 20, rank: int = 0, num_ranks: int = 1) -> Feed:
    settings = FeedSettings(
        start=start,
        stop=stop,
        rank=rank,
        num_ranks=num_ranks,
        wire_dtype=DType.FLOAT32,
        layout=FeatureLayout((1,), WIDTH),
        device=torch.device("cpu"),
    )
    return Feed(Plan(), source, settings)


def drain(feed: Feed) -> list[int]:
    positions = []
    while micros := feed.upcoming(1):
        with feed.next_batch() as fed:
            assert fed.batch.micro is micros[0]
            assert torch.equal(fed.batch.features_TC, torch.full_like(fed.batch.features_TC, micros[0].position))
            positions.append(fed.batch.micro.position)
    return positions


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 9), st.integers(0, 15))
def test_ranks_together_train_every_position_once_each_in_order(
    slots: int, num_ranks: int, start: int, length: int
) -> None:  # I1
    start *= num_ranks
    stop = start + length
    drained = [
        drain(feed_of(Source(slots), start=start, stop=stop, rank=rank, num_ranks=num_ranks))
        for rank in range(num_ranks)
    ]
    assert sorted(p for positions in drained for p in positions) == list(range(start, stop))
    for rank, positions in enumerate(drained):
        assert positions == sorted(positions)
        assert all(p % num_ranks == rank for p in positions)


def test_as_much_is_requested_ahead_as_there_are_slots() -> None:
    source = Source(3)
    feed = feed_of(source)
    feed.fill()
    assert source.submitted == 3
    with feed.next_batch():
        assert source.submitted == 3  # the slot in use isn't free yet
    assert source.submitted == 4


def test_looking_ahead_further_than_the_window_requests_no_more_than_the_window() -> None:
    source = Source(2)
    feed = feed_of(source)
    assert [m.position for m in feed.upcoming(6)] == list(range(6))
    feed.fill()
    assert source.submitted == 2
    assert drain(feed) == list(range(20))


def test_a_batch_out_of_order_is_noticed() -> None:
    source = Source(2)
    feed = feed_of(source)
    feed.fill()
    source.asked.rotate(1)
    with pytest.raises(AssertionError, match="batch 1 where 0 is due"), feed.next_batch():
        pass


def test_waiting_time_is_handed_out_once() -> None:
    feed = feed_of(Source(2))
    with feed.next_batch():
        pass
    assert feed.take_wait_s() >= 0
    assert feed.take_wait_s() == 0


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6))
def test_going_back_takes_the_same_batches_again_and_counts_what_was_thrown_away(
    slots: int, num_ranks: int, taken: int
) -> None:  # I1
    for rank in range(num_ranks):
        source = Source(slots)
        feed = feed_of(source, stop=20 * num_ranks, rank=rank, num_ranks=num_ranks)
        for _ in range(taken):
            with feed.next_batch():
                pass
        thrown_away = source.submitted
        feed.go_back(rank)
        assert feed.take_asked_again() == thrown_away
        assert drain(feed) == list(range(rank, 20 * num_ranks, num_ranks))
        assert source.released == source.submitted == thrown_away + 20


def test_going_back_at_the_end_of_the_plan() -> None:  # I1
    source = Source(3)
    feed = feed_of(source, stop=5)
    drain(feed)
    feed.go_back(3)
    assert feed.take_asked_again() == 2
    assert drain(feed) == [3, 4]
