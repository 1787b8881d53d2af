"""The client when the target changes: what is fetched early, asked for again, and refused."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from typing import Any

import numpy as np
import pytest
from target_wire.spec import DType
from target_wire.v1 import target_pb2 as pb

from drafter_trainer.client.delivery import Delivery
from drafter_trainer.client.shape import shape_of
from drafter_trainer.client.terms import Patience, StreamTerms
from drafter_trainer.errors import TargetChangedError, UserError
from drafter_trainer.types import Version
from tests.support.fake_target import DIGEST, HIDDEN_SIZE, Asked, FakeTarget, expected_rows

TAPS = (2, 0)
PATIENCE = Patience(
    max_attempts=4, backoff_initial_s=0.01, backoff_max_s=0.05, stall_timeout_s=5.0, absence_timeout_s=20.0,
    rediscover_s=0.1,
)  # fmt: skip
TERMS = StreamTerms(taps=TAPS, hidden_size=HIDDEN_SIZE, dtype=DType.FLOAT32, max_batch_tokens=64, slot_count=3)
OLD, NEW = Version(1, DIGEST), Version(2, "f" * 32)
BATCHES = [tuple((17 * b + i) % 320 for i in range(5 + 7 * b)) for b in range(6)]


class Keeper:
    """Stands in for the shelf of heads: some versions' heads are gone."""

    def __init__(self, *gone: Version) -> None:
        self.gone = set(gone)
        self.expected: list[Version] = []

    def expect(self, version: Version) -> None:
        self.expected.append(version)

    def wait(self, version: Version, *, timeout_s: float) -> bool:
        if version in self.gone:
            raise TargetChangedError(f"nobody has {version.number}")
        return True


def made_by(version: Version, messages: list[bytes]) -> list[bytes]:
    """The same answer, of another version of the target."""
    response = pb.StreamHiddenStatesResponse.FromString(messages[0])
    response.batch_header.version.number, response.batch_header.version.digest = version
    return [response.SerializeToString(), *messages[1:]]


def received(delivery: Delivery) -> list[tuple[int, int]]:
    """Position and version of each batch; asserts order and content."""
    facts, submitted = [], 0
    for position, tokens in enumerate(BATCHES):
        while submitted < len(BATCHES) and delivery.free_slots:
            ids = np.asarray(BATCHES[submitted], dtype="<i4")
            delivery.submit(position=submitted, lengths=(len(ids),), token_ids=ids.tobytes())
            submitted += 1
        slot = delivery.take()
        rows = np.frombuffer(slot.payload, dtype=np.float32).reshape(-1, len(TAPS) * HIDDEN_SIZE)
        np.testing.assert_array_equal(rows, expected_rows(tokens, TAPS))
        facts.append((slot.position, slot.version_number))
        assert slot.position == position
        delivery.release(slot)
    return facts


def test_batches_whose_head_is_gone_are_asked_for_again_in_their_place_and_counted() -> None:  # I1, I3, case 107
    def fault(asked: Asked, messages: list[bytes]) -> list[bytes]:
        old = asked.attempt == 1 and BATCHES.index(tuple(asked.request.token_ids)) in (1, 2, 4)
        return messages if old else made_by(NEW, messages)

    keeper = Keeper(OLD)
    with (
        FakeTarget(replicas=2, fault=fault) as target,
        Delivery([target.address], terms=TERMS, patience=PATIENCE, heads=keeper) as delivery,
    ):
        assert received(delivery) == [(position, 2) for position in range(len(BATCHES))]
        assert delivery.take_asked_again() == 3
        assert delivery.take_asked_again() == 0
        assert target.errors == []
    assert {OLD, NEW} <= set(keeper.expected)


def test_a_target_whose_heads_are_always_gone_ends_the_run_and_says_so() -> None:  # I7
    with (
        FakeTarget() as target,
        Delivery([target.address], terms=TERMS, patience=PATIENCE, heads=Keeper(OLD)) as delivery,
        pytest.raises(TargetChangedError, match="plan position 0 was asked for 8 times"),
    ):
        received(delivery)


def test_a_head_is_expected_while_its_first_batch_is_still_arriving() -> None:
    may_end = threading.Event()

    def fault(asked: Asked, messages: list[bytes]) -> Any:
        async def slowly() -> Any:
            yield messages[0]
            await asyncio.to_thread(may_end.wait, 30)
            for message in messages[1:]:
                yield message

        return slowly()

    keeper = Keeper()
    with (
        FakeTarget(fault=fault) as target,
        Delivery([target.address], terms=TERMS, patience=PATIENCE, heads=keeper) as delivery,
    ):
        ids = np.asarray(BATCHES[0], dtype="<i4")
        delivery.submit(position=0, lengths=(len(ids),), token_ids=ids.tobytes())
        deadline_s = time.monotonic() + 20
        while OLD not in keeper.expected:
            delivery.served_version()  # listens, as a submission does
            assert time.monotonic() < deadline_s, "the version was not told before its batch was whole"
            time.sleep(0.01)
        may_end.set()
        assert delivery.take().version_digest == DIGEST


class Changing(FakeTarget):
    """A front that describes another target from some moment on."""

    change: pb.DescribeTargetResponse | None = None

    def description(self) -> pb.DescribeTargetResponse:
        description = super().description()
        if self.change is not None:
            description.MergeFrom(self.change)
        return description


def wait_until_served(delivery: Delivery, version: Version) -> None:
    deadline_s = time.monotonic() + 20
    while delivery.served_version() != version:
        assert time.monotonic() < deadline_s, f"{version} is never told"
        time.sleep(0.02)


def test_another_version_is_noticed_without_asking_for_a_batch() -> None:  # case 106
    with Changing() as target, Delivery([target.address], terms=TERMS, patience=PATIENCE) as delivery:
        wait_until_served(delivery, OLD)
        target.change = pb.DescribeTargetResponse(version=pb.TargetVersion(number=2, digest=NEW.digest))
        wait_until_served(delivery, NEW)


def test_another_target_is_refused_field_by_field() -> None:  # case 103
    with Changing() as target:
        shape = shape_of(target.description(), max_batch_tokens=64, max_sequence_tokens=64)
        with Delivery([target.address], terms=TERMS, patience=PATIENCE, shape=shape) as delivery:
            wait_until_served(delivery, OLD)
            target.change = pb.DescribeTargetResponse(model=pb.TargetModel(layer_count=5, vocab_size=321))
            with pytest.raises(UserError) as caught:
                wait_until_served(delivery, NEW)
    message = str(caught.value)
    assert message.startswith(f"target.addresses: {target.address}: another target is served there now: ")
    assert "layer_count was 4, is 5; vocab_size was 320, is 321" in message


def test_a_server_that_is_away_while_nothing_is_asked_for_ends_nothing() -> None:
    patience = dataclasses.replace(PATIENCE, absence_timeout_s=0.5)
    with Delivery(["127.0.0.1:1"], terms=TERMS, patience=patience) as delivery:
        deadline_s = time.monotonic() + 3.0
        while time.monotonic() < deadline_s:
            assert delivery.served_version() is None
            time.sleep(0.1)
