"""A real replica endpoint inside the test's process: real gRPC, real pipeline, an event loop on a thread of its own.

It saves the ten seconds of a process's start, and lets a test look into the scheduler and swap a part. What needs a
process to die is tested with processes.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from target_server.config import ServerConfig
from target_server.control import Event, Start
from target_server.loading import LoadedTarget
from target_server.replica_server import serve_replica

DIGEST = "0123456789abcdef0123456789abcdef"
_TIMEOUT_S = 30.0


class _Pipe:
    """Stands in for the pipe to the front."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.drain: Callable[[], object] = lambda: None

    def send(self, event: Event) -> None:
        self.events.put(event)

    def on_drain(self, action: Callable[[], object]) -> None:
        self.drain = action


class RunningReplica:
    """A replica that serves.

    Attributes:
        address: of its data endpoint.
        pipe: its events and its drain.
        result: what `serve_replica` returned or raised, once it has ended.
    """

    def __init__(self, target: LoadedTarget, config: ServerConfig) -> None:
        self.pipe = _Pipe()
        self.result: Any = None
        start = Start(0, ["cpu"], 1, "127.0.0.1", 0, 1, {})

        async def serve() -> None:
            self.result = await serve_replica(start, config, target, DIGEST, self.pipe)

        self.thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self.thread.start()
        ready = self.pipe.events.get(timeout=_TIMEOUT_S)
        assert ready.kind == "ready", ready
        self.address = f"127.0.0.1:{ready.port}"
        self.description = ready.description

    def stop(self) -> None:
        """Drains the replica and waits for its end."""
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
