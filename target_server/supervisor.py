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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from google.protobuf import json_format
from target_wire.v1 import target_pb2

from target_server.config import ServerConfig
from target_server.control import (
    DRAIN,
    MAX_LINE_BYTES,
    Event,
    Start,
    SwapCommand,
    SwapEvent,
    decode_event,
)
from target_server.errors import ReplicaStartError, UserError
from target_server.replica_pipe import await_end, read_line, send_line, wait_all
from target_server.state import VersionStore
from target_server.versions import VersionRecord

__all__ = ["ReplicaStatus", "Supervisor", "thread_count"]

_log = logging.getLogger(__name__)

# A replica that served this long before it died starts anew without a penalty for earlier failures.
_STABLE_S = 60.0
_KILL_WAIT_S = 10.0


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
        version_number: of what it serves; 0 while it does not.
        stale: whether it was ended because another version counts; then it starts again at once.
        stats: what it last reported while it serves.
        stats_s: when, of the monotonic clock.
        process: its process, while there is one.
    """

    index: int
    devices: list[str]
    state: target_pb2.ReplicaState.ValueType = target_pb2.REPLICA_STATE_LOADING
    port: int = 0
    restart_count: int = 0
    detail: str = ""
    version_number: int = 0
    stale: bool = False
    stats: target_pb2.ReplicaStats | None = None
    stats_s: float = 0.0
    process: Process | None = field(default=None, repr=False)


class Supervisor:
    """All replicas of one front."""

    def __init__(self, config: ServerConfig, store: VersionStore, on_change: Callable[[], None]) -> None:
        """Plans the replicas; `run` starts them.

        Args:
            config: the server's settings.
            store: which version they are to serve.
            on_change: called when a replica's state has changed.
        """
        self._config = config
        self._store = store
        self._on_change = on_change
        self._stopping = False
        self.replicas = [ReplicaStatus(i, devices) for i, devices in enumerate(config.replica_devices)]
        self.description: target_pb2.DescribeTargetResponse | None = None
        # What a swap wants to know; its coordinator sets them.
        self.on_swap_event: Callable[[int, SwapEvent], None] = lambda _index, _event: None
        self.on_lost: Callable[[int], None] = lambda _index: None

    @property
    def serving_count(self) -> int:
        """Replicas that answer now."""
        return len(self.serving_indices())

    def serving_indices(self) -> list[int]:
        """Returns which replicas answer now."""
        return [r.index for r in self.replicas if r.state == target_pb2.REPLICA_STATE_SERVING]

    def send(self, index: int, command: SwapCommand) -> None:
        """Tells a replica what to do for a swap; nothing happens when it has just died."""
        process = self.replicas[index].process
        if process is not None:
            send_line(process, command)

    def kill_replica(self, index: int, reason: str) -> None:
        """Ends a replica at once; it is started again with the version that counts then."""
        replica = self.replicas[index]
        replica.detail = reason
        if replica.process is not None and replica.process.returncode is None:
            replica.process.kill()

    def adopt(self, record: VersionRecord, indices: Sequence[int]) -> None:
        """Describes this version, the store's current one, from now on.

        Args:
            record: the version.
            indices: the replicas that serve it; others that serve are started again.
        """
        assert self.description is not None
        self.description.version.CopyFrom(record.version.to_message())
        self.description.model.name = record.checkpoint.name
        for index in self.serving_indices():
            if index in indices:
                self.replicas[index].version_number = record.number
            else:
                self._restart_stale(self.replicas[index])
        self._on_change()

    def _restart_stale(self, replica: ReplicaStatus) -> None:
        replica.stale = True
        self.kill_replica(replica.index, f"another version counts now: {self._store.current.number}")

    async def run(self) -> None:
        """Keeps the replicas alive until `drain`.

        Raises:
            UserError: a replica can't start because of what the user gave, and none has ever served.
            ReplicaStartError: every replica was given up.
        """
        tasks = [asyncio.create_task(self._keep_alive(replica)) for replica in self.replicas]
        try:
            await asyncio.gather(*tasks)
            if not self._stopping:
                raise ReplicaStartError("every replica failed to start; their messages are above")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.kill()

    async def drain(self) -> None:
        """Lets every replica send what runs, then ends it; kills those that overrun their deadline."""
        self._stopping = True
        alive = [replica.process for replica in self.replicas if replica.process is not None]
        for process in alive:
            send_line(process, DRAIN)
        # Twice: once for what runs, once for what is still being sent.
        await wait_all(alive, 2 * self._config.deadlines.drain_timeout_s + _KILL_WAIT_S)
        self.kill()
        await wait_all(alive, _KILL_WAIT_S)

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
            stable = served and time.monotonic() - started > _STABLE_S
            failures = 0 if stable or replica.stale else failures + 1
            replica.stale = False
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
        try:
            process = await self._spawn(replica)
        except OSError as error:
            replica.detail = f"its process can't be started ({(error.strerror or str(error)).lower()})"
            _log.warning("replica %d: %s", replica.index, replica.detail)
            return False
        replica.process = process
        assert process.stdout is not None
        served = False
        deadline_s = self._config.deadlines.start_timeout_s
        try:
            while line := await read_line(process.stdout, deadline_s):
                if self._take_event(replica, decode_event(line)):
                    served, deadline_s = True, self._config.deadlines.heartbeat_timeout_s
        except TimeoutError:
            field = "heartbeat_timeout_s" if served else "start_timeout_s"
            replica.detail = f"{'hangs' if served else 'is not loaded'} after {deadline_s:.0f} s (deadlines.{field})"
        except ValueError:
            _log.exception("replica %d broke its pipe's protocol", replica.index)
        finally:
            replica.port, replica.stats, replica.version_number = 0, None, 0
            if process.returncode is None and not self._stopping:
                process.kill()
            code = await await_end(process, f"replica {replica.index}")
            replica.process = None
            self.on_lost(replica.index)
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
            host=config.replica_socket(replica.index) or config.host,
            port=config.replica.port_base + replica.index if config.replica.port_base else 0,
            version=self._store.current.to_json(),
            earlier=[record.to_json() for record in self._store.earlier],
            config=config.model_dump(mode="json"),
        )
        send_line(process, start)
        return process

    def _take_event(self, replica: ReplicaStatus, event: Event) -> bool:
        """Acts on a replica's event; returns whether it serves now."""
        if event.kind == "stats":
            replica.stats = json_format.ParseDict(event.stats or {}, target_pb2.ReplicaStats())
            replica.stats_s = time.monotonic()
            return False
        if event.kind == "swap":
            self.on_swap_event(replica.index, SwapEvent(**(event.swap or {})))
            return False
        if event.kind != "ready":
            replica.detail = f"{event.field}: {event.value}: {event.detail}" if event.field else event.detail
            if event.field and self.description is None:
                raise UserError(event.field, event.value, event.detail)
            return False
        assert event.description is not None
        assert event.version is not None
        record = VersionRecord.from_json(event.version)
        description = json_format.ParseDict(event.description, target_pb2.DescribeTargetResponse())
        if self.description is None:
            self._store.loaded(record)
            self.description = description
        elif not self._fits(replica, record, description):
            return False
        replica.port, replica.detail, replica.version_number = event.port, "", record.number
        self._set_state(replica, target_pb2.REPLICA_STATE_SERVING)
        return True

    def _fits(
        self, replica: ReplicaStatus, record: VersionRecord, description: target_pb2.DescribeTargetResponse
    ) -> bool:
        """Whether a replica that has loaded serves what the others do; ends it if not."""
        current = self._store.current
        if record.number < current.number:
            self._restart_stale(replica)
            return False
        if record.version != current.version or _without_version(description) != _without_version(self.description):
            fix = "restart the server to serve that"
            self.kill_replica(replica.index, f"{record.checkpoint} holds another model than the one served; {fix}")
            return False
        return True

    def _set_state(self, replica: ReplicaStatus, state: target_pb2.ReplicaState.ValueType) -> None:
        replica.state = state
        self._on_change()


def _without_version(
    description: target_pb2.DescribeTargetResponse | None,
) -> target_pb2.DescribeTargetResponse:
    """Returns the part of a description that no swap changes."""
    rest = target_pb2.DescribeTargetResponse()
    if description is not None:
        rest.CopyFrom(description)
    rest.ClearField("version")
    rest.model.name = ""
    return rest


def thread_count(config: ServerConfig) -> int:
    """Returns the compute threads of each replica: replicas on the CPU must not fight for its cores."""
    if config.replica.num_threads:
        return config.replica.num_threads
    on_cpu = sum(devices[0] == "cpu" for devices in config.replica_devices)
    return max(1, len(os.sched_getaffinity(0)) // on_cpu) if on_cpu else 1
