"""I2: a client that stops reading bounds the server's memory; nothing is lost when it reads on (cases 74, 76)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import grpc
import psutil
import pytest
import torch

from tests.support.served_targets import some_ids, write_target
from tests.support.server_process import ServerProcess, is_alive, running_server, wait_until
from tests.support.shared_memory import shared_memory_of
from tests.support.soak import soak_only
from tests.support.stream_client import StreamClient

# Memory stops growing within the first second; STALL_S=60 for the long run.
STALL_S = float(os.environ.get("STALL_S", "8"))
ROW_BYTES = 2 * 64 * 4
TOKENS = 8192
BATCH_BYTES = TOKENS * ROW_BYTES  # 4 MB
CREDIT_BATCHES = 5
BATCHES = 15
SLOTS = 4
# What the transport takes over before it holds the server back (wire.md: lookahead and frames of one stream).
TRANSPORT_BYTES = 25_000_000

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "shared_memory", [pytest.param(False, marks=soak_only, id="stream"), pytest.param(True, id="shared-memory")]
)
def test_stalled_client_stops_forwards_and_bounds_memory(shared_memory: bool, tmp_path: Path) -> None:
    checkpoint = write_target(tmp_path / "checkpoint", "llama")
    flags = ["--limits.max_batch_token_count", str(TOKENS), "--limits.max_tap_count", "2"]
    flags += ["--limits.max_session_count", "2", "--buffers.host_slot_count", str(SLOTS)]
    with running_server(checkpoint, tmp_path, *flags) as server:
        address = server.replica_address()
        process = psutil.Process(server.replica_pids()[0])
        sequences = [some_ids(64, seed=n) for n in range(TOKENS // 64)]
        with StreamClient(address, deadline_s=540) as client:
            window_bytes = CREDIT_BATCHES * BATCH_BYTES
            client.open([0, 3], max_batch_token_count=TOKENS, window_bytes=window_bytes, shared_memory=shared_memory)
            client.grant(BATCH_BYTES)
            client.request(0, sequences)
            expected = client.receive_batch().rows_TLD
            assert (client.buffer is not None) == shared_memory
            warm_bytes = process.memory_info().rss
            client.grant(CREDIT_BATCHES * BATCH_BYTES)
            for request_id in range(1, BATCHES):
                client.request(request_id, sequences)
            peak_bytes = _watch(process, STALL_S)
            assert peak_bytes - warm_bytes <= CREDIT_BATCHES * BATCH_BYTES + SLOTS * BATCH_BYTES + TRANSPORT_BYTES
            stats = server.describe().replicas[0].stats
            # Credit for five batches was granted, so no more than five forwards have run.
            assert stats.queued_count >= BATCHES - 1 - CREDIT_BATCHES
            assert stats.running_count == 0
            assert stats.shared_memory_session_count == shared_memory
            _others_go_on(address)
            for request_id in range(1, BATCHES):
                batch = client.receive_batch()
                assert batch.header.request_id == request_id
                assert torch.equal(batch.rows_TLD, expected)
                client.grant(BATCH_BYTES)
        wait_until(lambda: server.describe().replicas[0].stats.free_slot_count == SLOTS)
        if shared_memory:
            _killed_replica_leaves_no_memory(server, sequences)


def _killed_replica_leaves_no_memory(server: ServerProcess, sequences: list[list[int]]) -> None:
    """kill -9 of a replica in the middle of a batch through shared memory."""
    (replica,) = server.replica_pids()
    assert shared_memory_of(replica) == []  # that of the client before has gone with it
    with StreamClient(server.replica_address()) as client:
        client.open([0, 3], max_batch_token_count=TOKENS, window_bytes=BATCH_BYTES, shared_memory=True)
        client.grant(BATCH_BYTES)
        client.request(1, sequences)
        client.read()
        assert shared_memory_of(replica)
        os.kill(replica, signal.SIGKILL)
        with pytest.raises(grpc.RpcError):
            list(client.call)
        wait_until(lambda: not is_alive(replica))
        assert shared_memory_of("self")  # what was mapped can be read on, and goes with the client
    assert shared_memory_of("self") == []
    assert not any("target-server" in path.name for path in Path("/dev/shm").iterdir())


def _watch(process: psutil.Process, seconds: float) -> int:
    """Returns the largest resident size within this time."""
    end = time.monotonic() + seconds
    peak_bytes = 0
    while time.monotonic() < end:
        peak_bytes = max(peak_bytes, process.memory_info().rss)
        time.sleep(0.05)
    return peak_bytes


def _others_go_on(address: str) -> None:
    with StreamClient(address) as other:
        other.open([1])
        other.grant(1 << 16)
        other.request(1, [some_ids(5)])
        other.receive_batch()
