from __future__ import annotations

import collections
from dataclasses import dataclass

import numpy as np
import pytest

from drafter_trainer.feature_cache import CachedSource, KeptSlot
from drafter_trainer.types import Version

ROW_BYTES = 8


@dataclass
class _Slot:
    position: int
    payload: memoryview
    version_number: int
    version_digest: str
    replica_index: int
    finite: bool


class _Target:
    """A source whose features are a function of version and token, as a target's are of its weights and the prefix."""

    def __init__(self) -> None:
        self.version, self.finite = 1, True
        self.requests: list[int] = []
        self.queue: collections.deque[_Slot] = collections.deque()
        self.released: list[int] = []

    def served_version(self) -> Version:
        return Version(self.version, f"d{self.version}")

    def take_asked_again(self) -> int:
        return 0

    @property
    def free_slots(self) -> int:
        return 4 - len(self.queue)

    def submit(self, *, position: int, lengths, token_ids: bytes) -> None:
        self.requests.append(position)
        payload = memoryview(bytearray(_features(token_ids, self.version)))
        self.queue.append(_Slot(position, payload, self.version, f"d{self.version}", 0, self.finite))

    def take(self) -> _Slot:
        return self.queue.popleft()

    def release(self, slot: _Slot) -> None:
        slot.payload[:] = bytes(len(slot.payload))  # a freed slot is overwritten: nothing kept may point into it
        self.released.append(slot.position)


def _features(token_ids: bytes, version: int) -> bytes:
    tokens = np.frombuffer(token_ids, np.int32).astype(np.int64)
    return (tokens * 1000 + version).tobytes()


def _tokens(*sequences: list[int]) -> tuple[list[int], bytes]:
    return [len(s) for s in sequences], np.concatenate([np.array(s, np.int32) for s in sequences]).tobytes()


def _source(target: _Target, max_bytes: int = 1 << 20) -> CachedSource:
    return CachedSource(
        target, row_bytes=ROW_BYTES, max_bytes=max_bytes, max_outstanding=4, served_version=target.served_version
    )


def _train(source: CachedSource, position: int, *sequences: list[int]):
    lengths, token_ids = _tokens(*sequences)
    source.submit(position=position, lengths=lengths, token_ids=token_ids)
    slot = source.take()
    copied = bytes(slot.payload)
    source.release(slot)
    return slot, copied


def test_second_epoch_is_not_requested_and_equal_whatever_its_batches() -> None:
    target = _Target()
    source = _source(target)
    _train(source, 0, [1, 2, 3], [4, 5])
    _train(source, 1, [6, 7])
    slot, payload = _train(source, 2, [6, 7], [1, 2, 3])
    assert target.requests == [0, 1]
    assert isinstance(slot, KeptSlot)
    assert (slot.position, slot.version_number, slot.version_digest) == (2, 1, "d1")
    assert payload == _features(_tokens([6, 7], [1, 2, 3])[1], 1)


def test_batch_with_one_unknown_sequence_is_requested_whole() -> None:
    target = _Target()
    source = _source(target)
    _train(source, 0, [1, 2])
    _train(source, 1, [1, 2], [9])
    assert target.requests == [0, 1]


def test_what_was_kept_of_another_version_is_asked_for_again() -> None:  # I3
    target = _Target()
    source = _source(target)
    _train(source, 0, [1, 2])
    _train(source, 1, [3])
    target.version = 2  # nothing new is needed: without looking, it would never be noticed
    slot, payload = _train(source, 2, [1, 2], [3])
    assert target.requests == [0, 1, 2]
    assert slot.version_number == 2
    assert payload == _features(_tokens([1, 2], [3])[1], 2)
    slot, payload = _train(source, 3, [3], [1, 2])
    assert isinstance(slot, KeptSlot)
    assert slot.version_number == 2
    assert payload == _features(_tokens([3], [1, 2])[1], 2)


def test_a_late_batch_of_an_earlier_version_is_handed_over_and_not_kept() -> None:  # I3
    target = _Target()
    source = _source(target)
    _train(source, 0, [1])
    lengths, token_ids = _tokens([2])
    source.submit(position=1, lengths=lengths, token_ids=token_ids)  # made by version 1, taken once 2 is served
    target.version = 2
    slot = source.take()
    assert (slot.version_number, bytes(slot.payload)) == (1, _features(token_ids, 1))
    source.release(slot)
    slot, payload = _train(source, 2, [2])
    assert target.requests == [0, 1, 2]
    assert payload == _features(token_ids, 2)


def test_the_same_weights_under_another_number_are_kept() -> None:
    target = _Target()
    source = _source(target)
    _train(source, 0, [1])
    target.served_version = lambda: Version(7, "d1")
    source._served_version = target.served_version
    slot, _ = _train(source, 1, [1])
    assert isinstance(slot, KeptSlot)
    assert (slot.version_number, slot.version_digest) == (7, "d1")


def test_keeps_nothing_that_is_not_finite() -> None:  # I4
    target = _Target()
    source = _source(target)
    target.finite = False
    _train(source, 0, [1, 2])
    target.finite = True
    _train(source, 1, [1, 2])
    assert target.requests == [0, 1]


@pytest.mark.parametrize("max_bytes", [0, 2 * ROW_BYTES, 3 * ROW_BYTES])
def test_stays_within_its_bytes_and_still_answers(max_bytes: int) -> None:  # I2
    target = _Target()
    source = _source(target, max_bytes)
    for position in range(20):
        sequence = [position % 5] * (1 + position % 3)
        _, payload = _train(source, position, sequence)
        assert payload == _features(_tokens(sequence)[1], 1)
        assert source.kept_bytes <= max_bytes


def test_order_holds_when_kept_and_requested_batches_alternate() -> None:  # I1
    target = _Target()
    source = _source(target)
    _train(source, 0, [1])
    order = [[1], [2], [1], [3]]
    for position, sequence in enumerate(order, start=1):
        lengths, token_ids = _tokens(sequence)
        source.submit(position=position, lengths=lengths, token_ids=token_ids)
    assert source.free_slots == 0
    for position, sequence in enumerate(order, start=1):
        slot = source.take()
        assert slot.position == position
        assert bytes(slot.payload) == _features(_tokens(sequence)[1], 1)
        source.release(slot)
    assert source.free_slots == 4
    assert target.released == [0, 2, 4]
