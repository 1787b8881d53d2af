"""Part *wire*: how much of a loopback socket one stream uses, and what a gigabyte costs in CPU time.

One stream of the product between two processes: a server whose forward takes no time (`simulated`) on one core, and a
rank's client with its receiver process on another, as they come: on one host bodies go through shared memory. The
reference target's rows: five taps of 5120 elements of 2 bytes. Interleaved with it, the same with bodies on the gRPC
stream (as between hosts), a raw socket and the naive way, each with the same batches, frames, slots and cores. CPU
seconds are of all processes of both sides, measured over the same bytes.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from target_wire.spec import DType

from bench.child import Child, child
from bench.cores import cpu_seconds, pinned, two_sides
from bench.naive import naive_sender, receive_naively
from bench.options import Options
from bench.pairs import ratios, take_turns
from bench.rank import DiscardingRank, Work, discarding_rank
from bench.raw_socket import RawReceiver, Sizes, raw_receiver
from bench.results import Figure, figure
from drafter_trainer.client.ring import Ring
from drafter_trainer.client.terms import StreamTerms
from target_server.config import BuffersConfig

__all__ = ["run"]

_HIDDEN_SIZE = 5120
_TAPS = (1, 16, 31, 46, 61)
_BATCH_TOKENS = 512  # 26 MB
_WORK = Work.of([[1] * 128] * (_BATCH_TOKENS // 128))
_SLOTS = 5
_CLIENTS = 3


def run(options: Options) -> list[Figure]:
    """Measures the wire."""
    terms = _terms()
    count = options.pick(full=40, quick=4)
    rounds = options.pick(full=7, quick=2)
    server_cores, client_cores = two_sides()
    frame_bytes = BuffersConfig().frame_bytes // terms.row_bytes * terms.row_bytes
    with ExitStack() as stack:
        with pinned(server_cores):
            server = stack.enter_context(child("bench.simulated", _server(terms)))
        stack.enter_context(pinned(client_cores))
        sizes = Sizes(terms.max_batch_bytes, _SLOTS, frame_bytes)
        raw = stack.enter_context(raw_receiver(sizes, cores=server_cores))
        naive = stack.enter_context(naive_sender(sizes, batch_count=count, cores=server_cores))
        rank = stack.enter_context(discarding_rank(server.ready["front"], terms, _WORK))
        by_grpc = dataclasses.replace(terms, shared_memory=False)
        grpc_rank = stack.enter_context(discarding_rank(server.ready["front"], by_grpc, _WORK))
        meter = _Meter(terms.max_batch_bytes * count)
        ring = Ring.create(slot_bytes=terms.max_batch_bytes, slot_count=_SLOTS)
        _warm_up([rank, grpc_rank], raw, naive, ring)
        turns = take_turns(
            {
                "stream": lambda: meter.stream("stream", server, rank, count),
                "grpc": lambda: meter.stream("grpc", server, grpc_rank, count),
                "raw": lambda: meter.raw(raw, count),
                "naive": lambda: meter.naive(naive, ring.whole()),
            },
            rounds=rounds,
        )
        ring.close()
    figures = _figures(turns, meter)
    return [*figures, _many_clients(terms, options)]


def _warm_up(ranks: Sequence[DiscardingRank], raw: RawReceiver, naive: Child, ring: Ring) -> None:
    """Touches every page once: a ring is used round and round, its first lap is no measure."""
    for rank in ranks:
        rank.fetch([_WORK] * _SLOTS)
    raw.receive(_SLOTS)
    receive_naively(naive.ready["address"], ring.whole())


class _Meter:
    """Runs one side of a comparison; returns bytes a second and notes CPU seconds a GB."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self.cpu_s_per_gb: dict[str, list[float]] = {"stream": [], "grpc": [], "raw": [], "naive": []}

    def stream(self, name: str, server: Child, rank: DiscardingRank, count: int) -> float:
        receiver = rank.delivery.receiver_pid
        assert receiver is not None
        return self._measure(name, [server.pid, receiver, os.getpid()], lambda: rank.fetch([_WORK] * count))

    def raw(self, receiver: RawReceiver, count: int) -> float:
        return self._measure("raw", [receiver.sender.pid, os.getpid()], lambda: receiver.receive(count))

    def naive(self, sender: Child, ring: memoryview) -> float:
        return self._measure("naive", [sender.pid, os.getpid()], lambda: receive_naively(sender.ready["address"], ring))

    def _measure(self, name: str, pids: Sequence[int], work: Callable[[], object]) -> float:
        cpu_s, began_s = cpu_seconds(pids), time.perf_counter()
        work()
        took_s = time.perf_counter() - began_s
        self.cpu_s_per_gb[name].append((cpu_seconds(pids) - cpu_s) / (self._size_bytes / 1e9))
        return self._size_bytes / took_s / 1e9


def _figures(turns: list[dict[str, float]], meter: _Meter) -> list[Figure]:
    stream, grpc, raw, naive = ([turn[name] for turn in turns] for name in ("stream", "grpc", "raw", "naive"))
    cpu = meter.cpu_s_per_gb
    return [
        figure("wire_ratio", ratios(turns, "stream", "raw"), "x", goal=">= 0.5", note="one stream / raw TCP loopback"),
        figure("wire_cpu_s_per_gb", cpu["stream"], "s/GB", goal="<= 0.9", note="CPU of both sides"),
        figure("wire_gb_per_s", stream, "GB/s", note="one stream, a core a side, shared memory"),
        figure(
            "wire_grpc_ratio", ratios(turns, "grpc", "raw"), "x", note="bodies on the gRPC stream / raw TCP loopback"
        ),
        figure("wire_grpc_cpu_s_per_gb", cpu["grpc"], "s/GB", note="bodies on the gRPC stream"),
        figure("wire_grpc_gb_per_s", grpc, "GB/s", note="bodies on the gRPC stream"),
        figure("wire_raw_gb_per_s", raw, "GB/s", note="raw TCP loopback, same sizes"),
        figure("wire_raw_cpu_s_per_gb", cpu["raw"], "s/GB", note="raw TCP loopback, same sizes"),
        figure("wire_naive_gb_per_s", naive, "GB/s", note="protobuf, default options"),
        figure("wire_naive_cpu_s_per_gb", cpu["naive"], "s/GB", note="protobuf, default options"),
    ]


def _many_clients(terms: StreamTerms, options: Options) -> Figure:
    """Bytes a second that three client processes get from one server together."""
    count = options.pick(full=30, quick=3)
    server_cores, _ = two_sides()
    speeds = []
    with ExitStack() as stack:
        with pinned(server_cores):
            server = stack.enter_context(child("bench.simulated", _server(terms)))
        ranks = [stack.enter_context(discarding_rank(server.ready["front"], terms, _WORK)) for _ in range(_CLIENTS)]
        for _ in range(options.pick(full=3, quick=1)):
            threads = [threading.Thread(target=rank.fetch, args=([_WORK] * count,)) for rank in ranks]
            began_s = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            speeds.append(_CLIENTS * count * terms.max_batch_bytes / (time.perf_counter() - began_s) / 1e9)
    return figure("wire_3_clients_gb_per_s", speeds, "GB/s", note="three client processes, one server process")


def _terms() -> StreamTerms:
    return StreamTerms(
        taps=_TAPS, hidden_size=_HIDDEN_SIZE, dtype=DType.BFLOAT16, max_batch_tokens=_BATCH_TOKENS, slot_count=_SLOTS
    )


def _server(terms: StreamTerms) -> dict[str, float]:
    return {
        "replicas": 1,
        "forward_s": 0.0,
        "hidden_size": terms.hidden_size,
        "tap_count": len(terms.taps),
        "batch_tokens": terms.max_batch_tokens,
        "sessions": _CLIENTS + 1,
        # Two streams are open and one is used: its fair part of the shared slots is a ring's.
        "slots": _CLIENTS + 1 + 2 * _SLOTS,
    }
