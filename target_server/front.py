"""The front process: what the target is, where its replicas are, health. It imports no torch and carries no tensor.

Order of a start: check the checkpoint's files, bind, start the replicas; `DescribeTarget` answers UNAVAILABLE until
the first has loaded. Order of a stop: health says NOT_SERVING, the replicas drain, then the front closes; a second
signal kills the replicas and exits at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from target_wire.channel import server_options
from target_wire.errors import Code, Reason, WireError
from target_wire.v1 import target_pb2, target_pb2_grpc

from target_server.config import ServerConfig
from target_server.errors import UserError, maps_errors
from target_server.exporter import exporting
from target_server.memory_plan import build_plan
from target_server.state import VersionStore, check_swap_directories
from target_server.supervisor import ReplicaStatus, Supervisor
from target_server.swap import SwapCoordinator
from target_server.watching import watch_checkpoints

__all__ = ["check_network", "check_socket_dir", "check_start", "serve"]

_log = logging.getLogger(__name__)

SERVICE_NAME = target_pb2.DESCRIPTOR.services_by_name["TargetFrontService"].full_name
_STOP_GRACE_S = 1.0
# Linux's sun_path has 108 bytes, its end included.
_SOCKET_PATH_BYTES = 107
# What the second signal exits with: neither done nor the user's mistake.
_EXIT_FORCED = 1


class FrontServicer(target_pb2_grpc.TargetFrontServiceServicer):
    """The front's RPCs."""

    def __init__(
        self, config: ServerConfig, supervisor: Supervisor, store: VersionStore, coordinator: SwapCoordinator
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._store = store
        self._coordinator = coordinator

    @maps_errors
    async def DescribeTarget(
        self, _request: target_pb2.DescribeTargetRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.DescribeTargetResponse:
        """Returns the target and its replicas."""
        if self._supervisor.description is None:
            raise WireError(Code.UNAVAILABLE, Reason.TARGET_LOADING, "the target is being loaded; ask again")
        response = target_pb2.DescribeTargetResponse()
        response.CopyFrom(self._supervisor.description)
        response.replicas.extend(self._describe(replica) for replica in self._supervisor.replicas)
        response.earlier_versions.extend(record.version.to_message() for record in self._store.earlier)
        return response

    @maps_errors
    async def SwapTarget(  # type: ignore[override]
        self, request: target_pb2.SwapTargetRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Runs or joins a swap and tells its progress."""
        async for message in self._coordinator.swap(request):
            await context.write(message)

    def _describe(self, replica: ReplicaStatus) -> target_pb2.Replica:
        socket_address = self._config.replica_socket(replica.index)
        address = socket_address or f"{self._config.replica.advertise_host}:{replica.port}"
        return target_pb2.Replica(
            index=replica.index,
            address=address if replica.port else "",
            devices=replica.devices,
            state=replica.state,
            restart_count=replica.restart_count,
            port=0 if socket_address else replica.port,
            stats=replica.stats,
        )


def check_start(config: ServerConfig) -> None:
    """Refuses what can't be served, before anything is loaded.

    Raises:
        UserError: the checkpoint's files, memory, a port, or a directory that swaps need.
    """
    check_network(config)
    check_swap_directories(config)
    build_plan(config).check(config)
    check_socket_dir(config)
    if not config.replica.port_base:
        return
    for index in range(len(config.replica_devices)):
        port = config.replica.port_base + index
        if port > 65535:
            raise UserError("replica.port_base", config.replica.port_base, f"replica {index} would have port {port}")
        with _bound(config.host, port, field="replica.port_base"):
            pass


def check_network(config: ServerConfig) -> None:
    """Refuses to listen off loopback by accident.

    Raises:
        UserError: it would, and nobody has said that the network may be trusted.
    """
    host = config.host.strip("[]")
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost" and not config.trusted_network:
        fix = "whoever reaches it can read the target's states and swap it; listen on 127.0.0.1, or give "
        raise UserError("listen", config.listen, fix + "--trusted_network true on a network of your own")


def check_socket_dir(config: ServerConfig) -> None:
    """Refuses a directory in which replicas could not make their sockets.

    Raises:
        UserError: it can't be written to, or its path is too long.
    """
    directory = config.replica.socket_dir
    if directory is None:
        return
    if not (directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)):
        raise UserError("replica.socket_dir", directory, "is no directory that can be written to; make it first")
    longest = config.replica_socket(len(config.replica_devices) - 1).removeprefix("unix:")
    if len(os.fsencode(longest)) > _SOCKET_PATH_BYTES:
        raise UserError(
            "replica.socket_dir", directory, f"{longest} is too long for a socket ({_SOCKET_PATH_BYTES} bytes at most)"
        )


async def serve(config: ServerConfig, *, port_file: Path | None) -> int:
    """Runs the front until a signal; returns the exit code.

    Raises:
        UserError: see `check_start` and `Supervisor.run`.
        ReplicaStartError: no replica came up.
    """
    check_start(config)
    store = VersionStore(config)
    changed = asyncio.Event()
    supervisor = Supervisor(config, store, changed.set)
    coordinator = SwapCoordinator(config, supervisor, store)
    servicer = FrontServicer(config, supervisor, store, coordinator)
    status = health.aio.HealthServicer()
    with exporting(config.metrics.listen, supervisor.replicas) as metrics_port:
        server, port = await _start_server(config, servicer, status)
        if metrics_port:
            _log.info("metrics on port %d", metrics_port)
        print(f"target-server: loading {store.current.checkpoint} on {', '.join(config.devices)}", flush=True)
        announcing = asyncio.create_task(_announce(config, supervisor, status, changed, port, port_file))
        watching = asyncio.create_task(watch_checkpoints(config, supervisor, store, coordinator))
        try:
            await _run_until_signal(supervisor, status, announcing)
        finally:
            for task in (announcing, watching):
                task.cancel()
            await asyncio.gather(announcing, watching, return_exceptions=True)
            await coordinator.close()
            await server.stop(_STOP_GRACE_S)
    return 0


async def _run_until_signal(
    supervisor: Supervisor, status: health.aio.HealthServicer, announcing: asyncio.Task[None]
) -> None:
    """Keeps the replicas alive until the first signal, then drains them."""
    running = asyncio.create_task(supervisor.run())
    stopping = asyncio.create_task(_stop_signal(supervisor).wait())
    try:
        await asyncio.wait({running, announcing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in (running, announcing):
            if task.done():
                task.result()
        _log.info("draining")
        announcing.cancel()
        await status.enter_graceful_shutdown()
        await supervisor.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running, _STOP_GRACE_S)
    finally:
        supervisor.kill()
        running.cancel()
        stopping.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)


async def _start_server(
    config: ServerConfig, servicer: FrontServicer, status: health.aio.HealthServicer
) -> tuple[grpc.aio.Server, int]:
    # gRPC's own bind error names no reason; a plain socket's does.
    with _bound(config.host, config.port, field="listen"):
        pass
    server = grpc.aio.server(options=server_options())
    target_pb2_grpc.add_TargetFrontServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    for name in ("", SERVICE_NAME):
        await status.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        port = server.add_insecure_port(config.listen)
    except RuntimeError as error:
        raise UserError("listen", config.listen, "can't be bound; give another HOST:PORT") from error
    await server.start()
    return server, port


async def _announce(
    config: ServerConfig,
    supervisor: Supervisor,
    status: health.aio.HealthServicer,
    changed: asyncio.Event,
    port: int,
    port_file: Path | None,
) -> None:
    """Keeps health in step with the replicas, and says once that the server serves."""
    announced = all_announced = False
    while True:
        await changed.wait()
        changed.clear()
        serving = supervisor.serving_count > 0
        for name in ("", SERVICE_NAME):
            state = health_pb2.HealthCheckResponse
            await status.set(name, state.SERVING if serving else state.NOT_SERVING)
        if serving and not announced:
            announced = True
            if port_file is not None:
                _write_atomically(port_file, f"{port}\n")
            print(f"target-server: serving on {config.host}:{port}: {_served(supervisor)}", flush=True)
        if supervisor.serving_count == len(supervisor.replicas) > 1 and not all_announced:
            all_announced = True
            print(f"target-server: all {len(supervisor.replicas)} replicas serve", flush=True)


def _served(supervisor: Supervisor) -> str:
    description = supervisor.description
    assert description is not None, "a replica serves"
    return (
        f"{description.model.name}, {supervisor.serving_count} of {len(supervisor.replicas)} replicas, at most "
        f"{description.max_batch_token_count} tokens a batch and {description.max_sequence_token_count} a sequence"
    )


def _stop_signal(supervisor: Supervisor) -> asyncio.Event:
    """Returns the event of the first SIGTERM or SIGINT; the second one ends the process."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            supervisor.kill()
            os._exit(_EXIT_FORCED)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


@contextlib.contextmanager
def _bound(host: str, port: int, *, field: str) -> Iterator[None]:
    """Holds an address for a moment.

    Raises:
        UserError: it can't be bound, with the system's reason.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(field, f"{host}:{port}", f"{reason}; give another one") from error
        yield


def _write_atomically(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
