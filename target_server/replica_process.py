"""The process of one model copy: `python -m target_server.replica_process`, started by the front.

Order of a start: malloc, the pipe's watcher, torch, the model (its digest is computed meanwhile), buffers, endpoint,
"ready". Order of a stop: refuse new work, send what runs, close the endpoint, end the threads. The pipe's end at any
moment ends the process at once. A poisoned device ends it with an event, and the front starts another.

stdout is the pipe to the front; whatever prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from target_wire.channel import server_options, tune_malloc
from target_wire.errors import Code, Reason, WireError

from target_server.control import MAX_LINE_BYTES, Event, Start, encode_line

if TYPE_CHECKING:
    import grpc

    from target_server.config import ServerConfig
    from target_server.loading import LoadedTarget
    from target_server.replica import Replica
    from target_server.scheduler import CaptureJob, Scheduler
    from target_server.servicer import ReplicaServicer

__all__ = ["main"]

_log = logging.getLogger(__name__)

EXIT_ORPHANED = 3
_STOP_GRACE_S = 1.0


class ControlPipe:
    """The replica's ends of the pipe."""

    def __init__(self) -> None:
        self._events = os.dup(1)
        os.dup2(2, 1)
        self._buffer = b""
        self._on_drain: Callable[[], None] = lambda: os._exit(0)

    def read_start(self) -> Start:
        """Blocks for the first line."""
        line = self._read_line()
        if line is None:
            os._exit(EXIT_ORPHANED)
        return Start(**json.loads(line))

    def watch(self) -> None:
        """Starts the thread that obeys commands and ends the process when the front is gone."""
        threading.Thread(target=self._watch, name="control", daemon=True).start()

    def on_drain(self, action: Callable[[], None]) -> None:
        """Sets what a drain command does; before this is called it ends the process, which holds nothing yet."""
        self._on_drain = action

    def send(self, event: Event) -> None:
        """Reports to the front."""
        os.write(self._events, encode_line(event))

    def _watch(self) -> None:
        while (line := self._read_line()) is not None:
            if json.loads(line).get("command") == "drain":
                self._on_drain()
        os._exit(EXIT_ORPHANED)

    def _read_line(self) -> bytes | None:
        """Returns the next line; None at the pipe's end. Reads the descriptor itself: a buffered stream's lock would
        be held by the watching thread when the interpreter shuts down.
        """
        while b"\n" not in self._buffer:
            piece = os.read(0, 65536)
            if not piece or len(self._buffer) > MAX_LINE_BYTES:
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


@dataclass
class _Ending:
    """Why the process ends: a drain, or an error after which it can't go on."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Ends the process for an error."""
        self.error = self.error or error
        self.event.set()


def main() -> int:
    """Runs a replica; returns its exit code."""
    tune_malloc()
    pipe = ControlPipe()
    start = pipe.read_start()
    pipe.watch()
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s replica-{start.index} %(levelname)s %(name)s: %(message)s"
    )
    try:
        config, target, digest = _load(start)
    except Exception as error:
        pipe.send(_failure(error))
        return 1
    try:
        import uvloop

        return uvloop.run(_serve(start, config, target, digest, pipe))
    except Exception as error:
        _log.exception("the replica could not serve")
        pipe.send(Event("failed", detail=" ".join(str(error).split())[:500]))
        return 1


def _load(start: Start) -> tuple[ServerConfig, LoadedTarget, str]:
    """Loads the model; the digest of its weights is computed beside it."""
    from target_server.config import ServerConfig
    from target_server.versions import weights_digest

    config = ServerConfig(**start.config)
    assert config.model.path is not None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest") as pool:
        digest = pool.submit(weights_digest, config.model.path)
        import torch

        from target_server.loading import load_target

        torch.set_num_threads(start.num_threads)
        target = load_target(config.model, start.devices)
        return config, target, digest.result()


def _failure(error: Exception) -> Event:
    from target_server.errors import UserError

    if isinstance(error, UserError):
        return Event("failed", field=error.field, value=error.value, detail=error.fix)
    _log.error("the replica could not load its model", exc_info=error)
    return Event("failed", detail=f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")


async def _serve(start: Start, config: ServerConfig, target: LoadedTarget, digest: str, pipe: ControlPipe) -> int:
    """Serves until told to drain or until the replica can't go on."""
    ending = _Ending()
    replica, scheduler = _build_replica(target, config, ending)
    servicer = _build_servicer(start, config, target, digest, scheduler)
    server, port = await _start_server(start, servicer)
    loop = asyncio.get_running_loop()
    pipe.on_drain(lambda: loop.call_soon_threadsafe(ending.event.set))
    replica.start()
    pipe.send(Event("ready", port=port, description=_description(config, target, start.version_number, digest)))
    await ending.event.wait()
    if ending.error is not None:
        detail = f"{type(ending.error).__name__}: {' '.join(str(ending.error).split())[:500]}"
        servicer.refuse_new(_lost("the replica's device failed; ask another replica"))
        await server.stop(_STOP_GRACE_S)
        pipe.send(Event("fatal", detail=detail))
        # Threads may hang in the device's driver; nothing of value is left here.
        os._exit(1)
    await _drain(config, servicer, scheduler, server)
    replica.stop(config.deadlines.drain_timeout_s)
    return 0


def _build_replica(target: LoadedTarget, config: ServerConfig, ending: _Ending) -> tuple[Replica, Scheduler]:
    """Allocates every buffer and wires the threads' callbacks to the loop."""
    from target_server.buffers import SlotPool
    from target_server.replica import Replica, allocate_slots, slot_payload_bytes
    from target_server.scheduler import Scheduler
    from target_server.streams import build_streams

    loop = asyncio.get_running_loop()

    def captured(job: CaptureJob, finite: bool) -> None:
        loop.call_soon_threadsafe(lambda: scheduler.captured(job, finite=finite))

    def failed(job: CaptureJob, error: WireError) -> None:
        loop.call_soon_threadsafe(scheduler.failed, job, error)

    def fatal(error: Exception) -> None:
        loop.call_soon_threadsafe(ending.fail, error)

    streams = build_streams(target.output_device)
    replica = Replica(target, streams, config, on_captured=captured, on_failed=failed, on_fatal=fatal)
    slots = allocate_slots(
        streams, count=config.buffers.host_slot_count, payload_bytes=slot_payload_bytes(target, config)
    )
    pool = SlotPool(slots, max_owner_count=config.limits.max_session_count)
    scheduler = Scheduler(pool, replica.submit, max_session_count=config.limits.max_session_count)
    return replica, scheduler


def _build_servicer(
    start: Start, config: ServerConfig, target: LoadedTarget, digest: str, scheduler: Scheduler
) -> ReplicaServicer:
    from target_wire.checks import ServedTarget

    from target_server.head import HeadSource
    from target_server.servicer import ReplicaServicer

    served = ServedTarget(
        layer_count=target.description.layer_count,
        hidden_size=target.description.hidden_size,
        vocab_size=target.description.vocab_size,
        dtype=target.dtype,
        version_number=start.version_number,
        version_digest=digest,
        max_batch_token_count=config.limits.max_batch_token_count,
        max_sequence_token_count=_max_sequence(config, target),
    )
    return ReplicaServicer(
        served=served, scheduler=scheduler, head=HeadSource(target), config=config, replica_index=start.index
    )


def _max_sequence(config: ServerConfig, target: LoadedTarget) -> int:
    bounds = (
        config.limits.max_sequence_token_count,
        config.limits.max_batch_token_count,
        target.description.max_position_count,
    )
    return min(bound for bound in bounds if bound)


def _description(config: ServerConfig, target: LoadedTarget, version_number: int, digest: str) -> dict[str, Any]:
    from google.protobuf import json_format
    from target_wire.spec import PROTOCOL_VERSION
    from target_wire.v1 import target_pb2

    description = target_pb2.DescribeTargetResponse(
        protocol_version=PROTOCOL_VERSION,
        model=target.description,
        version=target_pb2.TargetVersion(number=version_number, digest=digest),
        max_batch_token_count=config.limits.max_batch_token_count,
        max_sequence_token_count=_max_sequence(config, target),
    )
    content: dict[str, Any] = json_format.MessageToDict(description)
    return content


async def _start_server(start: Start, servicer: ReplicaServicer) -> tuple[grpc.aio.Server, int]:
    """Binds and starts the data endpoint, with health and reflection."""
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection

    from target_server.servicer import SERVICE_NAME, build_handler

    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((build_handler(servicer),))
    status = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    for name in ("", SERVICE_NAME):
        await status.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = server.add_insecure_port(f"{start.host}:{start.port}")
    await server.start()
    return server, port


async def _drain(
    config: ServerConfig, servicer: ReplicaServicer, scheduler: Scheduler, server: grpc.aio.Server
) -> None:
    """Refuses new work and gives what runs its time to be sent."""
    servicer.refuse_new(
        WireError(Code.UNAVAILABLE, Reason.SHUTTING_DOWN, "the server is shutting down; ask another, or later")
    )
    timeout_s = config.deadlines.drain_timeout_s
    try:
        await asyncio.wait_for(scheduler.wait_idle(), timeout_s)
    except TimeoutError:
        _log.warning("what runs did not end within %.0f s and is dropped", timeout_s)
    # Streams end by themselves once their last frame was taken; the grace cancels those whose client does not read.
    await server.stop(timeout_s)


def _lost(detail: str) -> WireError:
    return WireError(Code.UNAVAILABLE, Reason.REPLICA_LOST, detail)


if __name__ == "__main__":
    sys.exit(main())
