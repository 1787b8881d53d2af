"""The replica processes as the front sees them: started, watched, restarted with back-off, drained. No torch.

One task per replica owns its process from start to end. A replica that dies while it serves is started again after a
delay that doubles with each failure in a row; one that fails to start `max_start_failure_count` times in a row is
given up. A failure that is the user's mistake is not retried when no replica has served yet. Replicas run in sessions
of their own: a Ctrl-C in the terminal reaches the front alone, which drains them; and they die with its pipe.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf import json_format
from target_wire.v1 import target_pb2

from target_server.config import ServerConfig
from target_server.control import DRAIN, MAX_LINE_BYTES, Event, Start, decode_event, encode_line
from target_server.errors import ReplicaStartError, UserError

__all__ = ["ReplicaStatus", "Supervisor", "thread_count"]

_log = logging.getLogger(__name__)

# A replica that served this long before it died starts anew without a penalty for earlier failures.
_STABLE_S = 60.0
_KILL_WAIT_S = 10.0
_FIRST_VERSION = 1


@dataclass
class ReplicaStatus:
    """What is known of one replica.

    Attributes:
        index: 0-based.
        devices: its devices.
        state: a ReplicaState number of the contract.
        port: of its data endpoint while it serves, else 0.
        restart_count: starts after the first one.
        detail: why it last failed; empty while nothing has.
        stats: what it last reported while it serves.
        process: its process, while there is one.
    """

    index: int
    devices: list[str]
    state: target_pb2.ReplicaState.ValueType = target_pb2.REPLICA_STATE_LOADING
    port: int = 0
    restart_count: int = 0
    detail: str = ""
    stats: target_pb2.ReplicaStats | None = None
    process: Process | None = field(default=None, repr=False)


class Supervisor:
    """All replicas of one front."""

    def __init__(self, config: ServerConfig, on_change: Callable[[], None]) -> None:
        """Plans the replicas; `run` starts them.

        Args:
            config: the server's settings.
            on_change: called when a replica's state has changed.
        """
        self._config = config
        self._on_change = on_change
        self._stopping = False
        self.replicas = [ReplicaStatus(i, devices) for i, devices in enumerate(config.replica_devices)]
        self.description: target_pb2.DescribeTargetResponse | None = None

    @property
    def serving_count(self) -> int:
        """Replicas that answer now."""
        return sum(replica.state == target_pb2.REPLICA_STATE_SERVING for replica in self.replicas)

    async def run(self) -> None:
        """Keeps the replicas alive until `drain`.

        Raises:
            UserError: a replica can't start because of what the user gave, and none has ever served.
            ReplicaStartError: every replica was given up.
        """
        tasks = [asyncio.create_task(self._keep_alive(replica)) for replica in self.replicas]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.kill()
        if not self._stopping:
            raise ReplicaStartError("every replica failed to start; their messages are above")

    async def drain(self) -> None:
        """Lets every replica send what runs, then ends it; kills those that overrun their deadline."""
        self._stopping = True
        alive = [replica.process for replica in self.replicas if replica.process is not None]
        for process in alive:
            _command(process, DRAIN)
        # Twice: once for what runs, once for what is still being sent.
        await _wait_all(alive, 2 * self._config.deadlines.drain_timeout_s + _KILL_WAIT_S)
        self.kill()
        await _wait_all(alive, _KILL_WAIT_S)

    def kill(self) -> None:
        """Ends every replica at once."""
        self._stopping = True
        for replica in self.replicas:
            if replica.process is not None and replica.process.returncode is None:
                replica.process.kill()

    async def _keep_alive(self, replica: ReplicaStatus) -> None:
        failures = 0
        while not self._stopping:
            started = time.monotonic()
            served = await self._run_once(replica)
            if self._stopping:
                return
            failures = 0 if served and time.monotonic() - started > _STABLE_S else failures + 1
            if not served and failures >= self._config.deadlines.max_start_failure_count:
                self._set_state(replica, target_pb2.REPLICA_STATE_FAILED)
                _log.error("replica %d is given up after %d failures: %s", replica.index, failures, replica.detail)
                return
            self._set_state(replica, target_pb2.REPLICA_STATE_RESTARTING)
            delay = self._config.deadlines.restart_delay_s * 2 ** (failures - 1) if failures else 0.0
            await asyncio.sleep(min(delay, self._config.deadlines.restart_delay_max_s))
            replica.restart_count += 1

    async def _run_once(self, replica: ReplicaStatus) -> bool:
        """Runs one process to its end; returns whether it served."""
        process = await self._spawn(replica)
        replica.process = process
        assert process.stdout is not None
        served = False
        deadline_s = self._config.deadlines.start_timeout_s
        try:
            while line := await asyncio.wait_for(process.stdout.readline(), deadline_s):
                if self._take_event(replica, decode_event(line)):
                    served, deadline_s = True, self._config.deadlines.heartbeat_timeout_s
        except TimeoutError:
            field = "heartbeat_timeout_s" if served else "start_timeout_s"
            replica.detail = f"{'hangs' if served else 'is not loaded'} after {deadline_s:.0f} s (deadlines.{field})"
        except ValueError:
            _log.exception("replica %d broke its pipe's protocol", replica.index)
        finally:
            replica.port, replica.stats = 0, None
            if process.returncode is None and not self._stopping:
                process.kill()
            code = await process.wait()
            replica.process = None
        if not self._stopping:
            replica.detail = replica.detail or f"exited with {code}"
            _log.warning("replica %d ended: %s", replica.index, replica.detail)
        return served

    async def _spawn(self, replica: ReplicaStatus) -> Process:
        config = self._config
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "target_server.replica_process",
            stdin=PIPE,
            stdout=PIPE,
            limit=MAX_LINE_BYTES,
            start_new_session=True,
        )
        start = Start(
            index=replica.index,
            devices=replica.devices,
            num_threads=thread_count(config),
            host=config.host,
            port=config.replica.port_base + replica.index if config.replica.port_base else 0,
            version_number=_FIRST_VERSION,
            config=config.model_dump(mode="json"),
        )
        _command(process, start)
        return process

    def _take_event(self, replica: ReplicaStatus, event: Event) -> bool:
        """Acts on a replica's event; returns whether it serves now."""
        if event.kind == "stats":
            replica.stats = json_format.ParseDict(event.stats or {}, target_pb2.ReplicaStats())
            return False
        if event.kind != "ready":
            replica.detail = f"{event.field}: {event.value}: {event.detail}" if event.field else event.detail
            if event.field and self.description is None:
                raise UserError(event.field, event.value, event.detail)
            return False
        assert event.description is not None
        description = json_format.ParseDict(event.description, target_pb2.DescribeTargetResponse())
        if self.description is None:
            self.description = description
        elif self.description != description:
            replica.detail = "model.path holds another model than the one served; restart the server to serve that"
            assert replica.process is not None
            replica.process.kill()
            return False
        replica.port, replica.detail = event.port, ""
        self._set_state(replica, target_pb2.REPLICA_STATE_SERVING)
        return True

    def _set_state(self, replica: ReplicaStatus, state: target_pb2.ReplicaState.ValueType) -> None:
        replica.state = state
        self._on_change()


def thread_count(config: ServerConfig) -> int:
    """Returns the compute threads of each replica: replicas on the CPU must not fight for its cores."""
    if config.replica.num_threads:
        return config.replica.num_threads
    on_cpu = sum(devices[0] == "cpu" for devices in config.replica_devices)
    return max(1, len(os.sched_getaffinity(0)) // on_cpu) if on_cpu else 1


def _command(process: Process, message: Start | dict[str, str]) -> None:
    assert process.stdin is not None
    if not process.stdin.is_closing():
        process.stdin.write(encode_line(message))


async def _wait_all(processes: list[Process], timeout_s: float) -> None:
    waits = [asyncio.create_task(process.wait()) for process in processes]
    if waits:
        _, late = await asyncio.wait(waits, timeout=timeout_s)
        for task in late:
            task.cancel()
