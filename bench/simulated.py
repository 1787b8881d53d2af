"""`python -m bench.simulated`: a target server whose forwards are a sleep. No torch, no model; all else is the product.

Front and replicas share one event loop here, a port each. A replica is the product's servicer, sessions, scheduler,
slots and publisher; only its thread is replaced by a device that is busy for `forward_s` a batch, one after the other,
and whose rows are whatever the slot holds.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import random
import sys
import threading
import time
from dataclasses import dataclass

from target_wire.channel import tune_malloc

if __name__ == "__main__":  # before grpc is imported and threads start, as a replica process does
    tune_malloc()

import grpc
import uvloop
from target_wire.channel import server_options
from target_wire.checks import ServedTarget
from target_wire.spec import PROTOCOL_VERSION, DType, row_bytes
from target_wire.v1 import target_pb2

from bench.child import commands, reply
from target_server.buffers import HostSlot, SlotPool
from target_server.config import ServerConfig
from target_server.handover import Handover
from target_server.metrics import ReplicaMetrics
from target_server.scheduler import CaptureJob, Scheduler
from target_server.servicer import Head, ReplicaServicer, build_handler
from target_server.versions import Version

__all__ = ["DIGEST", "LAYER_COUNT", "SimulatedDevice", "SimulatedServer"]

DIGEST = "0" * 32
LAYER_COUNT = 64
_VOCAB_SIZE = 1 << 16
_VERSION = Version(1, DIGEST)
_FRONT = target_pb2.DESCRIPTOR.services_by_name["TargetFrontService"].full_name


@dataclass(frozen=True)
class SimulatedServer:
    """What is simulated.

    Attributes:
        replicas: how many.
        forward_s: how long a batch keeps a replica's device busy on average; 0: not at all.
        hidden_size: width, in elements of 2 bytes.
        tap_count: taps of every session.
        batch_tokens: the largest batch.
        sessions: the most sessions of one replica.
        slots: host slots of one replica.
    """

    replicas: int
    forward_s: float
    hidden_size: int
    tap_count: int
    batch_tokens: int
    sessions: int
    slots: int

    @property
    def slot_bytes(self) -> int:
        """Size of a host slot."""
        row = row_bytes(tap_count=self.tap_count, hidden_size=self.hidden_size, dtype=DType.BFLOAT16)
        return self.batch_tokens * row

    @property
    def served(self) -> ServedTarget:
        """What requests are checked against."""
        return ServedTarget(
            layer_count=LAYER_COUNT,
            hidden_size=self.hidden_size,
            vocab_size=_VOCAB_SIZE,
            dtype=DType.BFLOAT16,
            version_number=_VERSION.number,
            version_digest=_VERSION.digest,
            max_batch_token_count=self.batch_tokens,
            max_sequence_token_count=self.batch_tokens,
        )

    @property
    def description(self) -> target_pb2.DescribeTargetResponse:
        """What the front says, without replicas."""
        model = target_pb2.TargetModel(
            architecture="Simulated",
            model_type="simulated",
            hidden_size=self.hidden_size,
            layer_count=LAYER_COUNT,
            vocab_size=_VOCAB_SIZE,
            dtype=target_pb2.Dtype.ValueType(DType.BFLOAT16.number),
        )
        return target_pb2.DescribeTargetResponse(
            protocol_version=PROTOCOL_VERSION,
            model=model,
            version=_VERSION.to_message(),
            max_batch_token_count=self.batch_tokens,
            max_sequence_token_count=self.batch_tokens,
        )


class SimulatedDevice:
    """Is busy for a while for each batch, in the order of submission.

    Forwards last up to a tenth more or less, evenly, as batches differ: devices that all began at once would else stay
    in step for ever, and answers would come in bursts.
    """

    def __init__(self, forward_s: float, seed: int) -> None:
        self._forward_s = forward_s
        self._random = random.Random(seed)
        self._loop = asyncio.get_running_loop()
        self._free_s = 0.0
        self.scheduler: Scheduler | None = None

    def submit(self, job: CaptureJob) -> None:
        """Begins a batch, or appends it to the one that runs: a device's queue leaves no gap."""
        now_s = self._loop.time()
        job.batch.version = _VERSION
        job.batch.times.began = time.monotonic()
        job.batch.times.forward = self._forward_s * self._random.uniform(0.9, 1.1)
        self._free_s = max(now_s, self._free_s) + job.batch.times.forward
        self._loop.call_at(self._free_s, self._done, job)

    def _done(self, job: CaptureJob) -> None:
        assert self.scheduler is not None
        self.scheduler.captured(job, finite=True)


class _NoHeads:
    """Nobody asks a simulation for its head."""

    def open(self, wanted: target_pb2.TargetVersion) -> Head:
        raise RuntimeError("a simulated target has no head; the bench's ranks never fetch one")


def _front_handler(description: target_pb2.DescribeTargetResponse) -> grpc.GenericRpcHandler:
    async def describe(_request: object, _context: object) -> target_pb2.DescribeTargetResponse:
        return description

    method = grpc.unary_unary_rpc_method_handler(
        describe,
        request_deserializer=target_pb2.DescribeTargetRequest.FromString,
        response_serializer=target_pb2.DescribeTargetResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(_FRONT, {"DescribeTarget": method})


def _slots(simulated: SimulatedServer) -> list[HostSlot]:
    size = -(-simulated.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = memoryview(mmap.mmap(-1, size * simulated.slots))
    # A forward would have written it; pages that were never written to all share one page of zeros.
    pattern = bytes(range(1, 252)) * (mmap.PAGESIZE // 16)
    for start in range(0, len(memory), len(pattern)):
        end = min(start + len(pattern), len(memory))
        memory[start:end] = pattern[: end - start]
    return [
        HostSlot(index, None, memory[index * size : index * size + simulated.slot_bytes])
        for index in range(simulated.slots)
    ]


def _scheduler(simulated: SimulatedServer, index: int) -> Scheduler:
    device = SimulatedDevice(simulated.forward_s, index)
    pool = SlotPool(_slots(simulated), max_owner_count=simulated.sessions)
    device.scheduler = Scheduler(pool, device.submit, max_session_count=simulated.sessions)
    return device.scheduler


def _servicer(simulated: SimulatedServer, index: int, scheduler: Scheduler) -> ReplicaServicer:
    config = ServerConfig(
        limits={"max_session_count": simulated.sessions, "max_outstanding_request_count": 1024},  # type: ignore[arg-type]
        buffers={"host_slot_count": max(simulated.slots, simulated.sessions + 1)},  # type: ignore[arg-type]
    )
    return ReplicaServicer(
        served=simulated.served,
        scheduler=scheduler,
        heads=_NoHeads(),
        config=config,
        metrics=ReplicaMetrics(),
        handover=Handover(config.buffers.shared_memory_bytes),
        replica_index=index,
    )


async def _start(simulated: SimulatedServer, schedulers: list[Scheduler]) -> tuple[list[grpc.aio.Server], int]:
    """Starts every endpoint; returns the servers and the front's port."""
    description = simulated.description
    servers = []
    for index, scheduler in enumerate(schedulers):
        server = grpc.aio.server(options=server_options())
        server.add_generic_rpc_handlers((build_handler(_servicer(simulated, index, scheduler)),))
        port = server.add_insecure_port("127.0.0.1:0")
        description.replicas.add(
            index=index, address=f"127.0.0.1:{port}", port=port, state=target_pb2.REPLICA_STATE_SERVING
        )
        servers.append(server)
    front = grpc.aio.server(options=server_options())
    front.add_generic_rpc_handlers((_front_handler(description),))
    port = front.add_insecure_port("127.0.0.1:0")
    servers.append(front)
    for server in servers:
        await server.start()
    return servers, port


async def _serve(simulated: SimulatedServer) -> None:
    """Serves until the parent is gone; answers each of its commands with the number of open sessions."""
    schedulers = [_scheduler(simulated, index) for index in range(simulated.replicas)]
    servers, port = await _start(simulated, schedulers)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def tell() -> None:
        reply({"sessions": sum(scheduler.snapshot()["sessions"] for scheduler in schedulers)})

    def watch() -> None:
        for _ in commands():
            loop.call_soon_threadsafe(tell)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=watch, daemon=True).start()
    reply({"front": f"127.0.0.1:{port}"})
    await ended.wait()
    await asyncio.gather(*(server.stop(0) for server in servers))


if __name__ == "__main__":
    uvloop.run(_serve(SimulatedServer(**json.loads(sys.argv[1]))))
