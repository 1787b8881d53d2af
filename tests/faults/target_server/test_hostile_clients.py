"""Clients that are killed, silent or talk nonsense end alone; nothing of theirs is kept, others are served (I2, I7).

After each, the replica's pools, credits and jobs are checked for leaks (`Scheduler.check_integrity`). Broken messages
of a well-formed stream are in tests/integration/target_server/test_replica_stream.py.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from target_server.config import ModelConfig
from target_server.loading import LoadedTarget, load_target
from tests.support.replica_thread import RunningReplica, running_replica
from tests.support.served_targets import some_ids, write_target
from tests.support.shared_memory import shared_memory_of
from tests.support.stream_client import StreamClient, reason_of

REPOSITORY = Path(__file__).parents[3]
TOKENS = 16384
BATCH = [some_ids(256)] * (TOKENS // 256)
ROW_BYTES = 2 * 64 * 4
WINDOW_BYTES = 8 * TOKENS * ROW_BYTES  # 8 MB a batch: eight are more than the transport's windows take
SESSIONS, SLOTS = 3, 5

# Reads a header and one frame of the first of many batches, says so, and waits to be killed.
KILLED_CLIENT = f"""
import sys, time
from tests.support.stream_client import StreamClient
client = StreamClient(sys.argv[1])
shared_memory = sys.argv[2] == "shared-memory"
client.open([0, 3], max_batch_token_count={TOKENS}, window_bytes={WINDOW_BYTES}, shared_memory=shared_memory)
client.grant({WINDOW_BYTES})
for request_id in range(12):
    client.request(request_id, [[1] * 256] * {TOKENS // 256})
assert client.read().WhichOneof("message") == "batch_header"
assert len(client.receive_frame(0, 0)) > 1000
print("in mid-batch", flush=True)
time.sleep(100)
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    return load_target(ModelConfig(path=write_target(tmp_path_factory.mktemp("llama"), "llama")), ["cpu"])


@pytest.fixture(scope="module")
def replica(target: LoadedTarget) -> Iterator[RunningReplica]:
    limits = {"max_batch_token_count": TOKENS, "max_tap_count": 2, "max_session_count": SESSIONS}
    limits["max_sequence_token_count"] = 512
    with running_replica(target, limits=limits, buffers={"host_slot_count": SLOTS}) as running:
        yield running


def _assert_nothing_leaked(replica: RunningReplica) -> None:
    """No session, job, slot, credit or shared memory is left, and all sessions that the limits allow work at once."""
    replica.wait_for(sessions=0, in_flight=0, slots_free=SLOTS)
    assert shared_memory_of("self") == []
    with ExitStack() as stack:
        clients = [stack.enter_context(StreamClient(replica.address)) for _ in range(SESSIONS)]
        for client in clients:
            client.open([1])
            client.grant(1 << 16)
            client.request(1, [some_ids(5)])
        for client in clients:
            assert client.receive_batch().rows_TLD.shape == (5, 1, 64)
    replica.wait_for(sessions=0, in_flight=0, slots_free=SLOTS)


@pytest.mark.parametrize("way", ["stream", "shared-memory"])
def test_client_killed_in_mid_frame_leaves_nothing_behind(way: str, replica: RunningReplica) -> None:
    command = [sys.executable, "-c", KILLED_CLIENT, replica.address, way]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "in mid-batch\n"
            # The transport takes no more: the server waits in the middle of a batch when the client dies.
            replica.wait_for(sessions=1, in_flight=0)
            assert replica.on_loop(replica.scheduler.snapshot)["slots_sending"] > 0
            assert bool(shared_memory_of("self")) == (way == "shared-memory")
        finally:
            client.kill()
    _assert_nothing_leaked(replica)


def test_client_that_opens_and_never_asks_costs_nothing(replica: RunningReplica) -> None:
    with StreamClient(replica.address) as silent:
        silent.open([1])
        silent.grant(1 << 16)
        with StreamClient(replica.address) as other:
            other.open([1])
            other.grant(1 << 16)
            for request_id in range(20):
                other.request(request_id, [some_ids(9)])
            assert [other.receive_batch().header.request_id for _ in range(20)] == list(range(20))
        replica.wait_for(sessions=1, in_flight=0, slots_free=SLOTS)
    _assert_nothing_leaked(replica)


def test_one_session_too_many_is_refused_and_a_freed_place_is_given_again(replica: RunningReplica) -> None:
    with ExitStack() as stack:
        for _ in range(SESSIONS):
            stack.enter_context(StreamClient(replica.address)).open([1])
        with StreamClient(replica.address) as late, pytest.raises(grpc.RpcError) as refused:
            late.open([1])
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(refused.value) == "OVERLOADED"
    _assert_nothing_leaked(replica)


@pytest.mark.parametrize(
    "noise",
    [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096],
    ids=["nothing", "http1", "bytes", "http2-then-noise"],
)
def test_connection_that_is_no_grpc_disturbs_nobody(noise: bytes, replica: RunningReplica) -> None:
    host, _, port = replica.address.rpartition(":")
    with StreamClient(replica.address) as client, socket.create_connection((host, int(port)), timeout=10) as raw:
        client.open([1])
        raw.sendall(noise)
        client.grant(1 << 16)
        client.request(1, [some_ids(5)])
        assert client.receive_batch().header.request_id == 1
    _assert_nothing_leaked(replica)


def test_request_that_is_too_large_fails_alone_and_keeps_its_credit(replica: RunningReplica) -> None:
    with StreamClient(replica.address) as client:
        client.open([1], max_batch_token_count=8, window_bytes=8 * 256)
        client.grant(8 * 256)
        client.request(1, [some_ids(9)])
        client.request(2, [some_ids(8)])
        failed = client.receive()
        assert (failed.request_id, failed.reason) == (1, "BATCH_TOO_LARGE")
        assert client.receive_batch().header.request_id == 2  # all of the window was still there
    _assert_nothing_leaked(replica)
