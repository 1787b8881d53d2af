"""The client against a server that lies, stalls, breaks off and dies: real gRPC, real receiver process."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from target_wire.framing import encode_batch_frame
from target_wire.spec import DType
from target_wire.v1 import target_pb2 as pb

from drafter_trainer.client.delivery import Delivery
from drafter_trainer.client.terms import Patience, StreamTerms
from drafter_trainer.errors import BatchFailedError, TargetUnavailableError
from tests.support.fake_target import HIDDEN_SIZE, Abort, Asked, FakeTarget, expected_rows, failed_message
from tests.support.shared_memory import shared_memory_of

TAPS = (2, 0)
PATIENCE = Patience(
    max_attempts=4,
    backoff_initial_s=0.01,
    backoff_max_s=0.05,
    connect_timeout_s=5.0,
    stall_timeout_s=1.5,
    absence_timeout_s=3.0,
    rediscover_s=0.2,
)
TERMS = StreamTerms(
    taps=TAPS, hidden_size=HIDDEN_SIZE, dtype=DType.FLOAT32, max_batch_tokens=64, slot_count=3, client_name="test"
)
BATCHES = [tuple((17 * b + i) % 320 for i in range(5 + 7 * b % 60)) for b in range(12)]


@pytest.fixture(autouse=True, params=[False, True], ids=["stream", "shared-memory"])
def shared_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whatever a server does wrong, it does either way; and no memory is left of it."""
    monkeypatch.setattr(FakeTarget, "shared_memory_by_default", request.param)
    yield request.param
    assert shared_memory_of("self") == []


def receive(target: FakeTarget, batches: Sequence[Sequence[int]] = BATCHES) -> list[Any]:
    """Fetches the batches through a Delivery and checks order and content of each; returns the slots' facts."""
    slots = []
    with Delivery([target.address], terms=TERMS, patience=PATIENCE) as delivery:
        for slot, rows in deliver(delivery, batches):
            np.testing.assert_array_equal(rows, expected_rows(batches[slot.position], TAPS))
            slots.append(dataclasses.replace(slot, payload=memoryview(b"")))
    assert target.errors == []
    assert [slot.position for slot in slots] == list(range(len(batches)))  # I1
    return slots


def deliver(delivery: Delivery, batches: Sequence[Sequence[int]]) -> Iterator[tuple[Any, Any]]:
    """Submits ahead as slots allow; yields each slot with its rows."""
    submitted = 0
    for _ in batches:
        while submitted < len(batches) and delivery.free_slots:
            ids = np.asarray(batches[submitted], dtype="<i4")
            delivery.submit(position=submitted, lengths=(len(ids),), token_ids=ids.tobytes())
            submitted += 1
        slot = delivery.take()
        yield slot, np.frombuffer(slot.payload, dtype=np.float32).reshape(-1, len(TAPS) * HIDDEN_SIZE)
        delivery.release(slot)


def first_attempt(fault: Any, *, of: int = 4) -> Any:
    """Applies a fault to the first attempt at every `of`-th batch."""

    def apply(asked: Asked, messages: list[bytes]) -> Any:
        hit = asked.attempt == 1 and BATCHES.index(tuple(asked.request.token_ids)) % of == 1
        return fault(asked, messages) if hit else messages

    return apply


def test_batches_come_in_plan_order_and_credit_is_never_exceeded_with_three_replicas(shared_memory: bool) -> None:
    with FakeTarget(replicas=3) as target:
        slots = receive(target)
    assert (target.shared_frames == 3 * len(BATCHES)) == shared_memory
    assert {slot.replica_index for slot in slots} == {0, 1, 2}


def flip_a_byte(asked: Asked, messages: list[bytes]) -> list[bytes]:
    return [messages[0], messages[1][:-1] + bytes([messages[1][-1] ^ 1]), *messages[2:]]


def cut_short(asked: Asked, messages: list[bytes]) -> list[bytes]:
    # The next header comes where a frame is due.
    return [*messages[:-1], messages[0]]


def doubled_frame(asked: Asked, messages: list[bytes]) -> list[bytes]:
    return [messages[0], messages[1], *messages[1:]]


def swapped_frames(asked: Asked, messages: list[bytes]) -> list[bytes]:
    return [messages[0], messages[2], messages[1], *messages[3:]]


def frame_without_header(asked: Asked, messages: list[bytes]) -> list[bytes]:
    return messages[1:]


def foreign_frame(asked: Asked, messages: list[bytes]) -> list[bytes]:
    foreign = encode_batch_frame(asked.request.request_id + 1, 0, 0, memoryview(bytes(128)))
    return [messages[0], foreign, *messages[1:]]


def frame_too_long(asked: Asked, messages: list[bytes]) -> list[bytes]:
    size = len(asked.request.token_ids) + 1
    body = bytes(size * len(TAPS) * HIDDEN_SIZE * 4)
    return [messages[0], encode_batch_frame(asked.request.request_id, 0, 0, memoryview(body))]


def garbage(asked: Asked, messages: list[bytes]) -> list[bytes]:
    return [b"\xff\xff this is no message \x00"]


def header_with(**changes: Any) -> Any:
    """A fault that answers with an otherwise right header."""

    def fault(asked: Asked, messages: list[bytes]) -> list[bytes]:
        message = pb.StreamHiddenStatesResponse.FromString(messages[0])
        for name, value in changes.items():
            owner, _, field = name.rpartition("__")
            part = getattr(message.batch_header, owner) if owner else message.batch_header
            if field == "shape":
                del part.shape[:]
                part.shape.extend(value)
            else:
                setattr(part, field, value)
        return [message.SerializeToString(), *messages[1:]]

    return fault


def rows_off_by(count: int) -> Any:
    """A fault that answers with a row more or less than was asked for, everything else in keeping."""

    def fault(asked: Asked, messages: list[bytes]) -> list[bytes]:
        message = pb.StreamHiddenStatesResponse.FromString(messages[0])
        header = message.batch_header
        header.tensor.shape[0] += count
        header.payload_bytes += count * len(TAPS) * HIDDEN_SIZE * 4
        return [message.SerializeToString(), *messages[1:]]

    return fault


def unexpected_opened(asked: Asked, messages: list[bytes]) -> list[bytes]:
    return [pb.StreamHiddenStatesResponse(opened=pb.Opened(replica_index=0)).SerializeToString()]


def abort(asked: Asked, messages: list[bytes]) -> AsyncIterator[bytes]:
    async def broken() -> AsyncIterator[bytes]:
        yield messages[0]
        yield messages[1]
        raise Abort

    return broken()


def silence(asked: Asked, messages: list[bytes]) -> AsyncIterator[bytes]:
    async def stalled() -> AsyncIterator[bytes]:
        yield messages[0]
        await asyncio.sleep(30)

    return stalled()


def overloaded(asked: Asked, messages: list[bytes]) -> list[bytes]:
    return [failed_message(asked, "OVERLOADED", 8)]


FAULTS = {
    "flipped byte": flip_a_byte,  # case 53
    "cut short": cut_short,  # case 53
    "doubled frame": doubled_frame,
    "swapped frames": swapped_frames,
    "frame without header": frame_without_header,
    "foreign frame": foreign_frame,  # case 42
    "frame too long": frame_too_long,
    "garbage": garbage,
    "foreign request": header_with(request_id=4711),
    "another tap count": header_with(tensor__shape=[5, 3, HIDDEN_SIZE]),  # cases 51, 52
    "a row too many": rows_off_by(1),  # case 56: a hidden row for the token after the last
    "a row too few": rows_off_by(-1),  # case 56
    "another dtype": header_with(tensor__dtype=pb.DTYPE_BFLOAT16),
    "another tensor": header_with(tensor__name="embeddings"),
    "another size": header_with(payload_bytes=64),
    "no frames": header_with(frame_count=0),
    "no version": header_with(version__number=0),
    "another replica's": header_with(replica_index=7),
    "opened again": unexpected_opened,
    "stream aborted in mid-batch": abort,
    "stream silent": silence,
    "batch_failed": overloaded,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_faulty_answer_is_rejected_and_the_batch_asked_for_again(fault: Any) -> None:
    with FakeTarget(fault=first_attempt(fault, of=6)) as target:
        slots = receive(target)
    assert max(slot.attempts for slot in slots) >= 2


@pytest.mark.parametrize("fault", [flip_a_byte, abort, overloaded])
def test_a_failed_batch_is_asked_for_at_another_replica(fault: Any) -> None:
    with FakeTarget(replicas=2, fault=first_attempt(fault, of=6)) as target:
        receive(target)
    tried: dict[tuple[int, ...], list[int]] = {}
    for asked in target.asked:
        tried.setdefault(tuple(asked.request.token_ids), []).append(asked.replica)
    assert set(tried[BATCHES[1]]) == {0, 1}


def test_a_batch_that_always_fails_ends_with_its_position_and_every_reason() -> None:
    def always(asked: Asked, messages: list[bytes]) -> list[bytes]:
        return flip_a_byte(asked, messages) if tuple(asked.request.token_ids) == BATCHES[3] else messages

    with (
        FakeTarget(fault=always) as target,
        pytest.raises(BatchFailedError, match=r"position 3: 4 attempts.*4\. .*chec"),
    ):
        receive(target)


def test_a_refused_request_is_not_tried_again() -> None:
    def refuse(asked: Asked, messages: list[bytes]) -> list[bytes]:
        return [failed_message(asked, "TOKEN_OUT_OF_RANGE", 3)]

    with FakeTarget(fault=refuse) as target, pytest.raises(BatchFailedError, match="TOKEN_OUT_OF_RANGE"):
        receive(target)
    assert all(asked.attempt == 1 for asked in target.asked)


def test_a_batch_that_stays_not_finite_is_handed_over_marked() -> None:  # I4, case 12
    def nonfinite(asked: Asked, messages: list[bytes]) -> list[bytes]:
        return header_with(finite=False)(asked, messages) if tuple(asked.request.token_ids) == BATCHES[2] else messages

    with FakeTarget(fault=nonfinite) as target:
        slots = receive(target)
    assert [slot.finite for slot in slots] == [index != 2 for index in range(len(BATCHES))]
    assert slots[2].attempts == 2


def test_refused_terms_end_the_run_at_once() -> None:
    def refuse(asked: Asked, messages: list[bytes]) -> list[bytes]:
        raise AssertionError("no request may come")

    with FakeTarget(fault=refuse) as target:
        terms = dataclasses.replace(TERMS, hidden_size=HIDDEN_SIZE * 2)
        started_s = time.monotonic()
        with Delivery([target.address], terms=terms, patience=PATIENCE) as delivery:
            delivery.submit(position=0, lengths=(1,), token_ids=b"\0\0\0\0")
            with pytest.raises(TargetUnavailableError, match="another shape"):
                delivery.take()
        assert time.monotonic() - started_s < 5


def test_a_server_that_is_away_too_long_ends_the_run_with_the_reason() -> None:
    with Delivery(["127.0.0.1:1"], terms=TERMS, patience=PATIENCE) as delivery:
        delivery.submit(position=0, lengths=(1,), token_ids=b"\0\0\0\0")
        with pytest.raises(TargetUnavailableError, match=r"no replica for \d+ s \(127\.0\.0\.1:1: UNAVAILABLE"):
            delivery.take()


def test_a_dead_proxy_in_the_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with FakeTarget() as target:
        receive(target, BATCHES[:4])


def test_a_replica_without_a_host_is_reached_under_the_fronts() -> None:  # case 84
    with FakeTarget(advertise=":{}".format) as target:
        receive(target, BATCHES[:4])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_receiver_that_dies_is_replaced_and_no_batch_is_lost_or_doubled(number: signal.Signals) -> None:
    pids = []
    with FakeTarget(replicas=2) as target, Delivery([target.address], terms=TERMS, patience=PATIENCE) as delivery:
        for slot, rows in deliver(delivery, BATCHES):
            np.testing.assert_array_equal(rows, expected_rows(BATCHES[slot.position], TAPS))
            if slot.position in (1, 6):
                assert delivery.receiver_pid is not None
                os.kill(delivery.receiver_pid, number)
            pids.append(delivery.receiver_pid)
        assert slot.position == len(BATCHES) - 1
    assert len(set(pids)) >= 3


def test_nothing_stays_in_shared_memory_and_no_process_stays_behind() -> None:
    before = set(Path("/dev/shm").iterdir())
    with FakeTarget() as target, Delivery([target.address], terms=TERMS, patience=PATIENCE) as delivery:
        assert set(Path("/dev/shm").iterdir()) == before
        pid = delivery.receiver_pid
        list(deliver(delivery, BATCHES[:3]))
    assert not Path(f"/proc/{pid}").exists()


def test_no_more_is_asked_for_than_the_window_holds_when_the_trainer_stalls() -> None:  # I2, cases 74, 83
    with FakeTarget(replicas=2) as target, Delivery([target.address], terms=TERMS, patience=PATIENCE) as delivery:
        for slot, rows in deliver(delivery, BATCHES):
            time.sleep(0.3 if slot.position < 2 else 0.0)
            assert len(target.asked) <= slot.position + TERMS.slot_count
            # What lies in this slot must not change while the trainer holds it.
            np.testing.assert_array_equal(rows, expected_rows(BATCHES[slot.position], TAPS))
    assert {opening.window_bytes for opening in target.opens} == {TERMS.window_bytes}


def test_a_fault_free_run_asks_for_every_batch_once() -> None:
    with FakeTarget(replicas=2) as target:
        slots = receive(target)
    assert [slot.attempts for slot in slots] == [1] * len(BATCHES)
    assert len(target.asked) == len(BATCHES)
