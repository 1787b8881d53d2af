"""A real replica endpoint inside the test's process: real gRPC, real pipeline, an event loop on a thread of its own.

It saves the ten seconds of a process's start, and lets a test look into the scheduler and swap a part. What needs a
process to die is tested with processes.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from target_server import replica_server
from target_server.config import ServerConfig
from target_server.control import Event, Start, SwapCommand
from target_server.loading import LoadedTarget
from target_server.replica import Replica
from target_server.scheduler import Scheduler
from target_server.versions import VersionRecord, files_mark
from target_server.weights import map_weights

DIGEST = "0123456789abcdef0123456789abcdef"
_TIMEOUT_S = 30.0


class _Pipe:
    """Stands in for the pipe to the front."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.drain: Callable[[], object] = lambda: None
        self.swap: Callable[[SwapCommand], object] = lambda _command: None

    def send(self, event: Event) -> None:
        self.events.put(event)

    def on_drain(self, action: Callable[[], object]) -> None:
        self.drain = action

    def on_swap(self, action: Callable[[SwapCommand], object]) -> None:
        self.swap = action


class RunningReplica:
    """A replica that serves.

    Attributes:
        address: of its data endpoint.
        pipe: its events and its drain.
        result: what `serve_replica` returned, once it has ended.
        scheduler: its scheduler; touch it by `on_loop` only.
        replica: its thread.
    """

    scheduler: Scheduler
    replica: Replica

    def __init__(self, target: LoadedTarget, config: ServerConfig) -> None:
        self.pipe = _Pipe()
        self.result: Any = None
        checkpoint = Path(target.model.name_or_path)
        record = VersionRecord(1, DIGEST, checkpoint, files_mark(checkpoint))
        loaded = replica_server.LoadedVersion(target, map_weights(target, checkpoint), record)
        start = Start(0, ["cpu"], 1, "127.0.0.1", 0, record.to_json(), [], {})

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self.result = await replica_server.serve_replica(start, config, loaded, self.pipe)

        build = replica_server._build_replica

        def build_and_keep(*arguments: Any) -> tuple[Replica, Scheduler]:
            self.replica, self.scheduler = build(*arguments)
            return self.replica, self.scheduler

        with patch.object(replica_server, "_build_replica", build_and_keep):
            self.thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
            self.thread.start()
            ready = self.pipe.events.get(timeout=_TIMEOUT_S)
        assert ready.kind == "ready", ready
        self.address = f"127.0.0.1:{ready.port}"
        self.description = ready.description

    def on_loop(self, action: Callable[[], Any]) -> Any:
        """Returns what the action returns on the replica's event loop."""

        async def act() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result(_TIMEOUT_S)

    def wait_for(self, **expected: int) -> None:
        """Waits until the scheduler's snapshot has these values, then checks that nothing has leaked."""
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            snapshot = self.on_loop(self.scheduler.snapshot)
            if all(snapshot[name] == value for name, value in expected.items()):
                break
            assert time.monotonic() < deadline, (snapshot, expected)
            time.sleep(0.01)
        self.on_loop(self.scheduler.check_integrity)

    def stop(self) -> None:
        """Drains the replica and waits for its end."""
        if self.thread.is_alive():
            self.pipe.drain()
        self.thread.join(_TIMEOUT_S)
        assert not self.thread.is_alive(), "the replica did not drain"


@contextmanager
def running_replica(target: LoadedTarget, **settings: Any) -> Iterator[RunningReplica]:
    """Runs a replica with these settings (sections as dicts) for the time of a block."""
    replica = RunningReplica(target, ServerConfig(**settings))
    try:
        yield replica
    finally:
        replica.stop()
