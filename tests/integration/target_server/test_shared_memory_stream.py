"""Bodies through shared memory, over real gRPC: the same bytes, the same rules, the stream where it can't be had."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator

import grpc
import pytest
import torch
from target_wire.framing import BatchFrameView
from target_wire.v1 import target_pb2 as pb

from target_server.config import ModelConfig
from target_server.loading import LoadedTarget, load_target
from tests.support.replica_thread import RunningReplica, running_replica
from tests.support.served_targets import some_ids, write_target
from tests.support.shared_memory import shared_memory_of
from tests.support.stream_client import ReceivedBatch, StreamClient, reason_of

TAPS = [2, 0]
ROW_BYTES = 2 * 64 * 4
LIMITS = {"max_batch_token_count": 256, "max_tap_count": 2, "max_session_count": 3}
# Small, so that a few batches go round it several times.
BUFFERS = {"host_slot_count": 5, "shared_memory_bytes": 1 << 16, "frame_bytes": 8192}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    return load_target(ModelConfig(path=write_target(tmp_path_factory.mktemp("llama"), "llama")), ["cpu"])


@pytest.fixture(scope="module")
def replica(target: LoadedTarget) -> Iterator[RunningReplica]:
    with running_replica(target, limits=LIMITS, buffers=BUFFERS) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(replica: RunningReplica) -> Iterator[None]:
    yield
    replica.wait_for(sessions=0, in_flight=0, slots_free=5)
    assert shared_memory_of("self") == []


def batches_of(client: StreamClient, lengths: list[list[int]]) -> list[ReceivedBatch]:
    client.grant(sum(map(sum, lengths)) * ROW_BYTES)
    for request_id, lengths_of_one in enumerate(lengths):
        client.request(request_id, [some_ids(n, seed=17 * request_id + n) for n in lengths_of_one])
    batches = [client.receive_batch() for _ in lengths]
    return sorted(batches, key=lambda batch: batch.header.request_id)


def test_both_ways_deliver_the_same_bytes(replica: RunningReplica) -> None:
    lengths = [[200, 30], [1], [7, 7, 7], [256], [3], [99, 100], [16] * 16, [255]]
    received = []
    for shared_memory in (False, True):
        with StreamClient(replica.address) as client:
            client.open(TAPS, max_batch_token_count=256, shared_memory=shared_memory)
            assert (client.buffer is not None) == shared_memory
            received.append(batches_of(client, lengths))
    for by_stream, by_memory in zip(*received, strict=True):
        assert by_stream.header == by_memory.header
        assert torch.equal(by_stream.rows_TLD.view(torch.int32), by_memory.rows_TLD.view(torch.int32))


def test_a_client_that_does_not_take_the_offer_up_gets_its_bodies_on_the_stream(replica: RunningReplica) -> None:
    with StreamClient(replica.address) as client:
        client.send(
            open=pb.Open(
                protocol_version=1, taps=TAPS, max_batch_token_count=64, window_bytes=1 << 20, shared_memory=True
            )
        )
        opened = client.read()
        assert isinstance(opened, pb.StreamHiddenStatesResponse)
        assert opened.opened.HasField("shared_buffer")
        (batch,) = batches_of(client, [[20]])
        assert batch.rows_TLD.shape == (20, 2, 64)
        assert shared_memory_of("self") == []  # and costs no memory


def test_a_stalled_client_holds_its_buffer_and_one_slot_and_nobody_up(replica: RunningReplica) -> None:  # cases 74, 76
    with StreamClient(replica.address) as stalled, StreamClient(replica.address) as other:
        stalled.open(TAPS, max_batch_token_count=256, shared_memory=True)
        stalled.grant(1 << 24)
        for request_id in range(10):  # 128 KiB each, twice the buffer
            stalled.request(request_id, [some_ids(256)])
        replica.wait_for(in_flight=0)
        other.open(TAPS, max_batch_token_count=256, shared_memory=True)
        assert len(batches_of(other, [[9]] * 20)) == 20
        snapshot = replica.on_loop(replica.scheduler.snapshot)
        assert snapshot["slots_free"] >= 2, snapshot  # one for each other session
        whole = [stalled.receive_batch() for _ in range(10)]
        assert [batch.header.request_id for batch in whole] == list(range(10))
        assert all(torch.equal(batch.rows_TLD, whole[0].rows_TLD) for batch in whole)


ATTACHED = {"shared_buffer_attached": pb.SharedBufferAttached()}


def released(count: int) -> dict[str, pb.SharedBufferReleased]:
    return {"shared_buffer_released": pb.SharedBufferReleased(released_bytes=count)}


@pytest.mark.parametrize(
    "messages",
    [[ATTACHED], [released(-1)], [released(2 * ROW_BYTES + 1)], [released(ROW_BYTES), released(ROW_BYTES - 1)]],
    ids=["attached-twice", "negative", "ahead", "back"],
)
def test_a_client_that_breaks_the_rules_ends_alone(messages: list[dict[str, object]], replica: RunningReplica) -> None:
    with StreamClient(replica.address) as client, StreamClient(replica.address) as other:
        other.open(TAPS, shared_memory=True)
        client.open(TAPS, shared_memory=True)
        assert len(batches_of(client, [[2]])) == 1  # two rows were written, and none is released yet
        for message in messages:
            client.send(**message)
        with pytest.raises(grpc.RpcError) as refused:
            list(client.call)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(refused.value) == "SHARED_BUFFER_INVALID"
        assert len(batches_of(other, [[5]])) == 1


def test_a_session_without_an_offer_may_not_speak_of_a_buffer(replica: RunningReplica) -> None:
    with StreamClient(replica.address) as client:
        client.open(TAPS)
        client.send(shared_buffer_attached=pb.SharedBufferAttached())
        with pytest.raises(grpc.RpcError) as refused:
            client.read()
        assert reason_of(refused.value) == "SHARED_BUFFER_INVALID"


def test_a_client_that_never_makes_room_is_closed_in_the_end(target: LoadedTarget, replica: RunningReplica) -> None:
    with (
        running_replica(target, limits=LIMITS, buffers=BUFFERS, deadlines={"write_timeout_s": 0.5}) as patient,
        StreamClient(patient.address) as client,
    ):
        client.open(TAPS, max_batch_token_count=256, shared_memory=True)
        client.grant(1 << 20)
        client.request(1, [some_ids(256)])
        patient.wait_for(sessions=0, slots_free=5)
        with pytest.raises(grpc.RpcError) as refused:
            list(client.call)
        assert reason_of(refused.value) == "STALLED"


@pytest.mark.parametrize("cause", ["memory", "setting"])
def test_where_there_is_no_memory_bodies_come_on_the_stream(
    cause: str, target: LoadedTarget, replica: RunningReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is full, and a server told not to: the session works, and the status says why."""
    if cause == "memory":

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
    buffers = BUFFERS if cause == "memory" else {**BUFFERS, "shared_memory_bytes": 0}
    with running_replica(target, limits=LIMITS, buffers=buffers) as poor, StreamClient(poor.address) as client:
        if cause == "memory":
            with pytest.raises(Exception, match="no 65536 bytes of shared memory: No space left on device"):
                client.open(TAPS, shared_memory=True)
        else:
            assert not client.open(TAPS, shared_memory=True).HasField("shared_buffer")
        client.grant(1 << 16)
        client.request(1, [some_ids(9)])
        assert isinstance(client.read(), pb.StreamHiddenStatesResponse)
        assert isinstance(client.read(), BatchFrameView)
        problem = "no 65536 bytes of shared memory: No space left on device" if cause == "memory" else ""
        assert _stats(poor)["sharedMemoryProblem"] == problem if problem else "sharedMemoryProblem" not in _stats(poor)


def _stats(replica: RunningReplica) -> dict[str, object]:
    """The next report of a replica that has a session."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        event = replica.pipe.events.get(timeout=20)
        if event.kind == "stats" and event.stats and event.stats.get("sessionCount"):
            return event.stats
    raise AssertionError("no report with a session")


def test_reports_count_the_sessions_that_use_it(replica: RunningReplica) -> None:
    with StreamClient(replica.address) as client, StreamClient(replica.address) as other:
        client.open(TAPS, shared_memory=True)
        other.open(TAPS)
        batches_of(client, [[2]])
        deadline_s = time.monotonic() + 20
        while _stats(replica).get("sharedMemorySessionCount") != 1:
            assert time.monotonic() < deadline_s


def test_memory_of_a_session_is_the_window_at_most(replica: RunningReplica) -> None:
    with StreamClient(replica.address) as client:
        opened = client.open(TAPS, max_batch_token_count=8, window_bytes=8 * ROW_BYTES, shared_memory=True)
        assert opened.shared_buffer.size_bytes == 8 * ROW_BYTES
        for request_id in range(20):  # eight rows, in frames of two
            client.grant(8 * ROW_BYTES)
            client.request(request_id, [some_ids(8)])
            assert client.receive_batch().header.frame_count == 4
