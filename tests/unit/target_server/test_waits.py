"""I7: a peer that takes nothing, or a machine that has nothing to give, is given up in time and costs nobody else."""

from __future__ import annotations

import asyncio
import errno
import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from target_wire.errors import Reason, WireError
from target_wire.spec import PROTOCOL_VERSION
from target_wire.v1 import target_pb2 as pb

from target_server import replica_pipe
from target_server.config import ServerConfig
from target_server.errors import ReplicaStartError
from target_server.handover import Handover
from target_server.metrics import ReplicaMetrics
from target_server.servicer import ReplicaServicer
from target_server.supervisor import Supervisor
from tests.unit.target_server.test_session_and_scheduler import ROW_BYTES, SERVED, Bench

CONFIG = ServerConfig(
    model={"path": Path("target")},  # type: ignore[arg-type]
    deadlines={"write_timeout_s": 0.05, "restart_delay_s": 0.01, "max_start_failure_count": 3},  # type: ignore[arg-type]
)


class DeafContext:
    """A call whose peer has asked and then reads nothing: no write to it ever ends."""

    async def read(self) -> pb.StreamHiddenStatesRequest:
        opening = pb.Open(
            protocol_version=PROTOCOL_VERSION, taps=[0], max_batch_token_count=8, window_bytes=8 * ROW_BYTES
        )
        return pb.StreamHiddenStatesRequest(open=opening)

    async def write(self, _message: object) -> None:
        await asyncio.Event().wait()


def servicer(bench: Bench) -> ReplicaServicer:
    head = SimpleNamespace(describe=pb.HeadDescription)
    return ReplicaServicer(
        handover=Handover(0),
        served=SERVED,
        scheduler=bench.scheduler,
        heads=SimpleNamespace(open=lambda _version: head),  # type: ignore[arg-type]
        config=CONFIG,
        metrics=ReplicaMetrics(),
        replica_index=0,
    )


async def test_a_client_that_does_not_take_opened_loses_its_session() -> None:
    bench = Bench()
    with pytest.raises(WireError) as stalled:
        await asyncio.wait_for(servicer(bench)._open(DeafContext()), 5)  # type: ignore[arg-type]
    assert stalled.value.reason is Reason.STALLED
    assert bench.scheduler.snapshot()["sessions"] == 0


async def test_a_client_that_does_not_take_the_head_is_given_up() -> None:
    ended: list[Any] = []

    class Context(DeafContext):
        async def abort_with_status(self, status: Any) -> None:
            ended.append(status)
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(servicer(Bench()).fetch_head(pb.FetchHeadRequest(), Context()), 5)
    assert "waited 0 s for the client to take a part of the head" in ended[0].details


async def test_a_replica_whose_process_can_not_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment without a process to spare ends no other replica; and when all are given up, that's no success."""
    attempts = 0

    async def no_process(*_arguments: object, **_settings: object) -> None:
        nonlocal attempts
        attempts += 1
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
    supervisor = Supervisor(CONFIG, SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ReplicaStartError):
        await asyncio.wait_for(supervisor.run(), 5)
    assert attempts == 3
    assert supervisor.replicas[0].detail == "its process can't be started (resource temporarily unavailable)"


async def _python(code: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)


async def test_a_front_that_stood_still_takes_no_healthy_replica_for_hung() -> None:
    process = await _python("import time; print('alive', flush=True); time.sleep(60)")
    assert process.stdout is not None
    reading = asyncio.create_task(replica_pipe.read_line(process.stdout, 0.5))
    await asyncio.sleep(0)
    time.sleep(1.5)  # noqa: ASYNC251 - the whole process stands still, as under SIGSTOP
    try:
        assert await asyncio.wait_for(reading, 5) == b"alive\n"
        with pytest.raises(TimeoutError):
            await replica_pipe.read_line(process.stdout, 0.05)
    finally:
        process.kill()
        await process.wait()


async def test_a_process_that_does_not_end_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica_pipe, "_END_LINE_EVERY_S", 0.1)
    process = await _python("import time; time.sleep(0.6)")
    with caplog.at_level(logging.WARNING):
        assert await asyncio.wait_for(replica_pipe.await_end(process, "replica 3"), 20) == 0
    assert f"replica 3, process {process.pid}, has not ended after" in caplog.text
