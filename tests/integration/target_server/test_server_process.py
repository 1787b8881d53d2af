"""The server as processes: start, restart of what dies, no orphans, drain, mistakes of the user."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from target_wire.framing import BatchFrameView
from target_wire.v1 import target_pb2 as pb

from drafter_trainer.client.discovery import serving_addresses
from tests.support.served_targets import some_ids, write_target
from tests.support.server_process import (
    START_TIMEOUT_S,
    ServerProcess,
    is_alive,
    running_server,
    status_json,
    wait_until,
)
from tests.support.stream_client import StreamClient, capture

# Each start of a replica imports torch and transformers; see START_TIMEOUT_S.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("checkpoint"), "llama")


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(checkpoint, tmp_path_factory.mktemp("server"), "--devices", "cpu,cpu") as running:
        wait_until(lambda: _serving(running) == 2, START_TIMEOUT_S)
        yield running


def _serving(server: ServerProcess) -> int:
    return sum(replica.state == pb.REPLICA_STATE_SERVING for replica in server.describe().replicas)


def test_every_replica_answers_any_request_alike(server: ServerProcess) -> None:
    answers = [capture(server.replica_address(index), [0, 5], [some_ids(9)]) for index in (0, 1)]
    assert answers[0].body == answers[1].body
    assert [answer.header.replica_index for answer in answers] == [0, 1]
    assert answers[0].header.version == server.describe().version


def test_status_prints_what_is_served(server: ServerProcess) -> None:
    status = status_json(server.address)
    assert status["model"]["layer_count"] == 6
    assert status["version"]["number"] == 1
    assert len(status["version"]["digest"]) == 32
    assert [replica["state"] for replica in status["replicas"]] == ["serving", "serving"]
    log = server.log()
    name = status["model"]["name"]
    assert re.search(rf"target-server: loading \S*{name} on cpu, cpu\n", log)
    limits = f"at most {status['max_batch_token_count']} tokens a batch and {status['max_sequence_token_count']} a"
    assert re.search(rf"target-server: serving on 127.0.0.1:\d+: {name}, \d of 2 replicas, {limits} sequence\n", log)
    assert "target-server: all 2 replicas serve\n" in log


def test_status_says_where_replicas_are_reached(server: ServerProcess) -> None:  # case 84
    addresses = [replica["address"] for replica in status_json(server.address)["replicas"]]
    assert addresses == [server.replica_address(0), server.replica_address(1)]
    (_, port) = server.address.split(":")
    assert status_json(f"localhost:{port}")["replicas"][0]["address"].startswith("localhost:")


def test_watching_through_a_pipe_prints_lines_and_ends_quietly(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "target_server", "status", server.address, "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        lines = [watching.stdout.readline() for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=20)
    assert (watching.returncode, errors) == (0, "")
    assert [line.split(" ", 1)[1].split(", ")[:3] for line in lines[:2]] == [
        [f"replica {index}", "state serving", "devices cpu"] for index in (0, 1)
    ]
    assert "free slots " in lines[2]


def test_what_a_replica_has_done_is_reported(server: ServerProcess) -> None:
    before = server.describe().replicas[1].stats.batch_count
    capture(server.replica_address(1), [0], [some_ids(9)])
    wait_until(lambda: server.describe().replicas[1].stats.batch_count == before + 1)
    replica = status_json(server.address)["replicas"][1]
    assert replica["token_count"] >= 9
    assert replica["free_slot_count"] == replica["slot_count"]
    assert set(replica["profile_stats"]) == {"credit_s", "queue_s", "forward_s", "pack_s", "copy_s", "send_s"}
    assert replica["profile_stats"]["forward_s"] > replica["profile_stats"]["pack_s"] > 0


def test_health_and_reflection_are_answered_by_front_and_replica(server: ServerProcess) -> None:
    services = {server.address: "TargetFrontService", server.replica_address(): "TargetReplicaService"}
    for address, service in services.items():
        with grpc.insecure_channel(address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert check.status == health_pb2.HealthCheckResponse.SERVING
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=5)
        names = {item.name for item in answer.list_services_response.service}
        assert f"target_wire.v1.{service}" in names


def _read_into_a_batch(client: StreamClient) -> None:
    """Asks for more than the transport holds (12 MB a batch) and reads up to the first one's first frame."""
    client.open(range(6), max_batch_token_count=8192, window_bytes=1 << 27)
    client.grant(1 << 27)
    for request_id in range(8):
        client.request(request_id, [some_ids(256)] * 32)
    header = client.read()
    assert isinstance(header, pb.StreamHiddenStatesResponse)
    assert header.batch_header.frame_count > 2
    assert isinstance(client.read(), BatchFrameView)


def _is_idle(stats: pb.ReplicaStats) -> bool:
    return stats.session_count == 0 and stats.free_slot_count == stats.slot_count > 0


def _lost(client: StreamClient) -> grpc.StatusCode:
    """Reads on until the stream breaks; returns its status."""
    with pytest.raises(grpc.RpcError) as lost:
        list(client.call)
    return lost.value.code()


def test_killed_replica_is_restarted_while_the_other_serves(server: ServerProcess) -> None:
    before = capture(server.replica_address(0), [2], [some_ids(9)]).body
    with StreamClient(server.replica_address(0)) as client:
        _read_into_a_batch(client)
        killed = server.replica_pids()[0]
        os.kill(killed, signal.SIGKILL)
        assert _lost(client) is grpc.StatusCode.UNAVAILABLE
    wait_until(lambda: _serving(server) == 1)
    alive = next(replica for replica in server.describe().replicas if replica.state == pb.REPLICA_STATE_SERVING)
    assert capture(f"127.0.0.1:{alive.port}", [2], [some_ids(9)]).body == before
    wait_until(lambda: _serving(server) == 2, START_TIMEOUT_S)
    assert sorted(replica.restart_count for replica in server.describe().replicas) == [0, 1]
    for index in (0, 1):
        assert capture(server.replica_address(index), [2], [some_ids(9)]).body == before
    # A replica that has just started reports within a second; then no session and no slot is left.
    wait_until(lambda: all(_is_idle(replica.stats) for replica in server.describe().replicas))


def test_killed_front_leaves_no_replica_behind(checkpoint: Path, tmp_path: Path) -> None:
    with running_server(checkpoint, tmp_path) as server, StreamClient(server.replica_address()) as client:
        (replica,) = server.replica_pids()
        _read_into_a_batch(client)
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(replica), 10)
        assert _lost(client) is grpc.StatusCode.UNAVAILABLE


def test_replica_on_a_unix_socket_serves_and_comes_back_after_a_kill(checkpoint: Path, tmp_path: Path) -> None:
    with running_server(checkpoint, tmp_path, "--replica.socket_dir", str(tmp_path)) as server:
        (described,) = server.describe().replicas
        assert (described.address, described.port) == (f"unix:{tmp_path}/replica-0.sock", 0)
        assert serving_addresses(server.address, server.describe()) == [described.address]
        before = capture(described.address, [2], [some_ids(9)]).body
        with StreamClient(described.address) as client:
            _read_into_a_batch(client)
            os.kill(server.replica_pids()[0], signal.SIGKILL)  # its socket's file stays behind
            assert _lost(client) is grpc.StatusCode.UNAVAILABLE
        wait_until(lambda: server.describe().replicas[0].restart_count == 1 and _serving(server) == 1, START_TIMEOUT_S)
        assert capture(described.address, [2], [some_ids(9)]).body == before


def test_sigterm_drains_and_exits_0(checkpoint: Path, tmp_path: Path) -> None:
    with running_server(checkpoint, tmp_path) as server, StreamClient(server.replica_address()) as client:
        (replica,) = server.replica_pids()
        client.open([1])
        client.grant(1 << 14)
        client.request(1, [some_ids(5)])
        client.receive_batch()
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as ended:
            client.read()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(20) == 0
        assert not is_alive(replica)


def test_second_sigterm_does_not_wait(checkpoint: Path, tmp_path: Path) -> None:
    with running_server(checkpoint, tmp_path) as server:
        (replica,) = server.replica_pids()
        os.kill(replica, signal.SIGSTOP)  # it will not drain
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 1
        wait_until(lambda: not is_alive(replica), 10)


def _fails(*flags: str) -> str:
    """Runs `serve`, which must end with exit code 2 and one line on stderr; returns that line."""
    command = [sys.executable, "-m", "target_server", "serve", "--listen", "127.0.0.1:0", *flags]
    ended = subprocess.run(command, timeout=START_TIMEOUT_S, check=False, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("target-server: ")]
    assert len(lines) == 1, ended.stderr
    return lines[0]


def test_port_in_use_is_refused_before_the_model_is_loaded(checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = _fails("--model.path", str(checkpoint), "--listen", f"127.0.0.1:{port}")
        assert message.startswith(f"target-server: listen: 127.0.0.1:{port}: address already in use")
        data = _fails("--model.path", str(checkpoint), "--replica.port_base", str(port))
        assert data.startswith("target-server: replica.port_base: ")


def test_mistake_that_only_a_replica_sees_is_reported_by_the_front(checkpoint: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    assert _fails("--model.path", str(checkpoint), "--devices", "cuda:0").startswith("target-server: devices: cuda:0: ")
