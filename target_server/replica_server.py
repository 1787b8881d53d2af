"""What a replica process does between its start message and its end: load, serve, drain.

Order of a start: the model (its digest is computed beside it), buffers, endpoint, "ready". Order of a stop: refuse new
work, send what runs, close the endpoint, end the threads. A device that can't be trusted any more ends the process with
an event, and the front starts another.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import torch
import uvloop
from google.protobuf import json_format
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from target_wire.channel import server_options
from target_wire.checks import ServedTarget
from target_wire.errors import Code, Reason, WireError
from target_wire.imports import quick_imports
from target_wire.spec import PROTOCOL_VERSION
from target_wire.v1 import target_pb2

from target_server.buffers import SlotPool
from target_server.config import ServerConfig
from target_server.control import Event, Start, SwapCommand
from target_server.errors import DeadlineError, UserError
from target_server.handover import Handover
from target_server.head import HeadStore
from target_server.loading import LoadedTarget, load_target
from target_server.metrics import ReplicaMetrics
from target_server.replica import Replica, allocate_slots, slot_payload_bytes
from target_server.replica_swap import ReplicaSwap, SwapParts
from target_server.scheduler import CaptureJob, Scheduler
from target_server.servicer import SERVICE_NAME, ReplicaServicer, build_handler
from target_server.streams import build_streams
from target_server.versions import VersionRecord, files_mark, weights_digest
from target_server.weights import WeightMap, map_weights

__all__ = ["LoadedVersion", "Pipe", "run_replica", "serve_replica"]

_log = logging.getLogger(__name__)

_STOP_GRACE_S = 1.0
_REPORT_S = 1.0


class Pipe(Protocol):
    """What is needed of `replica_process.ControlPipe`."""

    def send(self, event: Event) -> None:
        """Reports to the front."""

    def on_drain(self, action: Callable[[], object]) -> None:
        """Sets what a drain command does; the action is called on the pipe's thread."""

    def on_swap(self, action: Callable[[SwapCommand], object]) -> None:
        """Sets what swap commands do; the action is called on the pipe's thread."""


@dataclass(frozen=True)
class LoadedVersion:
    """What a replica has loaded.

    Attributes:
        target: the model.
        weights: how its tensors are stored.
        record: which version that is.
    """

    target: LoadedTarget
    weights: WeightMap
    record: VersionRecord


@dataclass
class _Ending:
    """Why the process ends: a drain, or an error after which it can't go on."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Ends the process for an error."""
        self.error = self.error or error
        self.event.set()


def run_replica(start: Start, pipe: Pipe) -> int:
    """Runs a replica to its end; returns the process's exit code."""
    try:
        config, loaded = _load(start)
        fault = uvloop.run(serve_replica(start, config, loaded, pipe))
    except Exception as error:
        pipe.send(_failure(error))
        return 1
    if fault is None:
        return 0
    pipe.send(Event("fatal", detail=_one_line(fault)))
    # Threads may hang in the device's driver, and would hold up a regular exit; nothing of value is left here.
    os._exit(1)


def _load(start: Start) -> tuple[ServerConfig, LoadedVersion]:
    """Loads the model; the digest of its weights is computed beside it."""
    config = ServerConfig(**start.config)
    wanted = VersionRecord.from_json(start.version)
    path = wanted.checkpoint
    mark = files_mark(path)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest") as pool:
        digesting = pool.submit(weights_digest, path)
        torch.set_num_threads(start.num_threads)
        with quick_imports():  # the model's own module is one of hundreds, and imported by its name
            target = load_target(config.model.model_copy(update={"path": path}), start.devices)
        weights = map_weights(target, path)
        digest = digesting.result()
    # Files that were replaced since the front wrote down their digest are another version.
    number = wanted.number + (wanted.digest not in ("", digest))
    return config, LoadedVersion(target, weights, VersionRecord(number, digest, path, mark))


def _failure(error: Exception) -> Event:
    if isinstance(error, UserError):
        return Event("failed", field=error.field, value=error.value, detail=error.fix)
    _log.error("the replica could not load its model", exc_info=error)
    return Event("failed", detail=_one_line(error))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


async def serve_replica(start: Start, config: ServerConfig, loaded: LoadedVersion, pipe: Pipe) -> Exception | None:
    """Serves until told to drain, or until the replica can't go on.

    Returns:
        None after a drain, else what went wrong; then its threads may still hang.
    """
    ending = _Ending()
    replica, scheduler = _build_replica(loaded, config, ending)
    metrics = ReplicaMetrics()
    earlier = [VersionRecord.from_json(record) for record in start.earlier]
    heads = HeadStore(loaded.target, loaded.weights, loaded.record, earlier)
    handover = Handover(config.buffers.shared_memory_bytes)
    servicer = _build_servicer(start, config, loaded, scheduler, metrics, heads, handover)
    parts = SwapParts(config, loaded.target, loaded.weights, replica, scheduler, heads, servicer, metrics)
    swap = ReplicaSwap(parts, loaded.record, earlier, send=pipe.send, on_fatal=ending.fail)
    server, port = await _start_server(start, servicer)
    loop = asyncio.get_running_loop()
    pipe.on_drain(lambda: loop.call_soon_threadsafe(ending.event.set))
    pipe.on_swap(lambda command: loop.call_soon_threadsafe(swap.obey, command))
    replica.start()
    description = _description(config, loaded)
    pipe.send(Event("ready", port=port, description=description, version=loaded.record.to_json()))
    reporting = asyncio.create_task(_report(config, scheduler, metrics, handover, pipe, ending, swap))
    await ending.event.wait()
    reporting.cancel()
    handover.close()
    await swap.close()
    if ending.error is None:
        await _drain(config, servicer, scheduler, server)
        await asyncio.to_thread(replica.stop, config.deadlines.drain_timeout_s)
        return None
    lost = WireError(Code.UNAVAILABLE, Reason.REPLICA_LOST, "the replica's device failed; ask another replica")
    servicer.refuse_new(lost, at_once=True)
    await server.stop(_STOP_GRACE_S)
    return ending.error


def _build_replica(loaded: LoadedVersion, config: ServerConfig, ending: _Ending) -> tuple[Replica, Scheduler]:
    """Allocates every buffer and wires the threads' callbacks to the loop."""
    loop = asyncio.get_running_loop()

    def captured(job: CaptureJob, finite: bool) -> None:
        loop.call_soon_threadsafe(lambda: scheduler.captured(job, finite=finite))

    def failed(job: CaptureJob, error: WireError) -> None:
        loop.call_soon_threadsafe(scheduler.failed, job, error)

    def fatal(error: Exception) -> None:
        loop.call_soon_threadsafe(ending.fail, error)

    target = loaded.target
    streams = build_streams(target.output_device)
    version = loaded.record.version
    replica = Replica(target, streams, config, version, on_captured=captured, on_failed=failed, on_fatal=fatal)
    slots = allocate_slots(
        streams, count=config.buffers.host_slot_count, payload_bytes=slot_payload_bytes(target, config)
    )
    pool = SlotPool(slots, max_owner_count=config.limits.max_session_count)
    scheduler = Scheduler(pool, replica.submit, max_session_count=config.limits.max_session_count)
    return replica, scheduler


def _build_servicer(
    start: Start,
    config: ServerConfig,
    loaded: LoadedVersion,
    scheduler: Scheduler,
    metrics: ReplicaMetrics,
    heads: HeadStore,
    handover: Handover,
) -> ReplicaServicer:
    target = loaded.target
    served = ServedTarget(
        layer_count=target.description.layer_count,
        hidden_size=target.description.hidden_size,
        vocab_size=target.description.vocab_size,
        dtype=target.dtype,
        version_number=loaded.record.number,
        version_digest=loaded.record.digest,
        max_batch_token_count=config.limits.max_batch_token_count,
        max_sequence_token_count=_max_sequence(config, target),
    )
    return ReplicaServicer(
        served=served,
        scheduler=scheduler,
        heads=heads,
        config=config,
        metrics=metrics,
        handover=handover,
        replica_index=start.index,
    )


async def _report(
    config: ServerConfig,
    scheduler: Scheduler,
    metrics: ReplicaMetrics,
    handover: Handover,
    pipe: Pipe,
    ending: _Ending,
    swap: ReplicaSwap,
) -> None:
    """Reports once a second, which is also the replica's heartbeat; and ends a replica whose thread hangs."""
    while True:
        await asyncio.sleep(_REPORT_S)
        running_s = scheduler.longest_running_s()
        if running_s > config.deadlines.forward_timeout_s:
            ending.fail(DeadlineError(f"a forward has run for {running_s:.0f} s (deadlines.forward_timeout_s)"))
        lagging = scheduler.lagging_session_count(swap.current.version)
        stats = metrics.snapshot({**scheduler.snapshot(), "lagging": lagging})
        stats.shared_memory_session_count = handover.attached_count
        stats.shared_memory_problem = handover.problem
        pipe.send(Event("stats", stats=json_format.MessageToDict(stats)))


def _max_sequence(config: ServerConfig, target: LoadedTarget) -> int:
    bounds = (
        config.limits.max_sequence_token_count,
        config.limits.max_batch_token_count,
        target.description.max_position_count,
    )
    return min(bound for bound in bounds if bound)


def _description(config: ServerConfig, loaded: LoadedVersion) -> dict[str, Any]:
    target = loaded.target
    description = target_pb2.DescribeTargetResponse(
        protocol_version=PROTOCOL_VERSION,
        model=target.description,
        version=loaded.record.version.to_message(),
        max_batch_token_count=config.limits.max_batch_token_count,
        max_sequence_token_count=_max_sequence(config, target),
    )
    content: dict[str, Any] = json_format.MessageToDict(description)
    return content


async def _start_server(start: Start, servicer: ReplicaServicer) -> tuple[grpc.aio.Server, int]:
    """Binds and starts the data endpoint, with health and reflection."""
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((build_handler(servicer),))
    status = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    for name in ("", SERVICE_NAME):
        await status.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    on_socket = start.host.startswith("unix:")
    port = server.add_insecure_port(start.host if on_socket else f"{start.host}:{start.port}")
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
