"""Part *scale*: what many replicas and many ranks cost in control traffic.

Replicas are simulated: a sleep instead of a forward and rows of a few bytes, so that nothing but requests, credit,
scheduling, placing and answers is left. Ranks are the trainer's own clients, a receiver process each. A grid of replica
counts and rank counts; for each the
requests answered a second against replicas ÷ sleep, and how alike the ranks fare.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import psutil
from target_wire.spec import DType

from bench.child import Child, child
from bench.cores import cpu_seconds
from bench.options import BenchError, Options, say
from bench.rank import DiscardingRank, Work, discarding_rank
from bench.results import Figure, figure
from drafter_trainer.client.terms import StreamTerms

__all__ = ["run"]

_HIDDEN_SIZE = 8
_TAPS = (1,)
_BATCH_TOKENS = 16
_WORK = Work.of([[1] * _BATCH_TOKENS])
# All replicas together answer this many a second at best, so that every cell of the grid has enough answers to count.
# At 64 replicas that is a forward of half a second; the reference target takes one to two.
_IDEAL_PER_S = 128
# Batches asked for per replica, over all ranks. Ranks don't see each other's requests, so queues are uneven: with 3 a
# replica idles a sixth of the time, with 6 a fiftieth (discrete simulation of 64 x 24). And a slot per replica for each
# rank: with fewer, which replicas a rank's first batches wait at decides how it fares (most / fewest 1.45, else 1.05).
_OUTSTANDING_PER_REPLICA = 8
# A thousand and a half connections on two busy cores take some twenty seconds.
_CONNECT_S = 180.0


@dataclass(frozen=True)
class _Cell:
    """What one point of the grid gave: requests a second of each interval, answers of each rank, busy cores."""

    rates: list[float]
    by_rank: list[int]
    busy_cores: float


def run(options: Options) -> list[Figure]:
    """Measures the grid."""
    replica_counts = (2,) if options.quick else (1, 8, 64)
    rank_counts = (2,) if options.quick else (1, 3, 24)
    figures: list[Figure] = []
    for replicas in replica_counts:
        for ranks in rank_counts:
            cell = _measure(replicas, ranks, options)
            figures += _figures(
                replicas, ranks, cell, largest=(replicas, ranks) == (replica_counts[-1], rank_counts[-1])
            )
    return figures


def _figures(replicas: int, ranks: int, cell: _Cell, *, largest: bool) -> list[Figure]:
    efficiency = [rate / _IDEAL_PER_S for rate in cell.rates]
    fairness = [max(cell.by_rank) / max(1, min(cell.by_rank))]
    name = f"scale_{replicas}x{ranks}"
    shown = [
        figure(
            f"{name}_requests_per_s", cell.rates, "1/s", note=f"of {_IDEAL_PER_S}; {cell.busy_cores:.2f} cores busy"
        ),
        figure(f"{name}_fairness", fairness, "x", note="most / fewest answers of a rank"),
    ]
    if largest:
        goal = figure("scale_efficiency", efficiency, "x", goal=">= 0.95", note=f"{replicas} replicas x {ranks} ranks")
        return [goal, *shown]
    return shown


def _measure(replicas: int, ranks: int, options: Options) -> _Cell:
    slots = max(4, replicas, math.ceil(_OUTSTANDING_PER_REPLICA * replicas / ranks))
    # Answers come in the order of the plan, so a rank gets them in bursts as long as what all ranks have asked for
    # takes: shorter intervals would count where the bursts lie.
    outstanding_s = slots * ranks / _IDEAL_PER_S
    interval_s = max(options.pick(full=4, quick=1), outstanding_s)
    intervals = options.pick(full=3, quick=1)
    with ExitStack() as stack:
        server = stack.enter_context(child("bench.simulated", _server(replicas, ranks)))
        clients = _start_ranks(stack, server.ready["front"], ranks, slots)
        _wait_for_sessions(server, replicas * ranks)
        with ThreadPoolExecutor(len(clients)) as pool:
            # Every session has answered, and those that broke while all connected at once are there again.
            list(pool.map(lambda client: client.fetch([_WORK] * slots), clients))
        # All ranks have begun at once: until each has had its first burst, none is where it will be.
        begin_s = time.monotonic() + 1.0 + max(4 * replicas / _IDEAL_PER_S, 1.5 * outstanding_s)
        end_s = begin_s + intervals * interval_s
        pids = [server.pid, psutil.Process().pid, *(client.delivery.receiver_pid or 0 for client in clients)]
        with ThreadPoolExecutor(len(clients)) as pool:
            runs = [pool.submit(client.arrivals_until, end_s, _WORK) for client in clients]
            time.sleep(max(0.0, begin_s - time.monotonic()))
            cpu_s = cpu_seconds(pids)
            time.sleep(max(0.0, end_s - time.monotonic()))
            busy = (cpu_seconds(pids) - cpu_s) / (end_s - begin_s)
            arrivals = [run.result() for run in runs]
    counts = [[int((time_s - begin_s) // interval_s) for time_s in times] for times in arrivals]
    rates = [sum(row.count(index) for row in counts) / interval_s for index in range(intervals)]
    by_rank = [sum(0 <= index < intervals for index in row) for row in counts]
    say(f"bench: scale: {replicas} replicas x {ranks} ranks: {sum(rates) / len(rates):.1f} requests/s")
    return _Cell(rates, by_rank, busy)


def _wait_for_sessions(server: Child, count: int) -> None:
    """Waits until every rank has a session with every replica.

    Raises:
        BenchError: they have not in time.
    """
    deadline_s = time.monotonic() + _CONNECT_S
    while (opened := server.ask({}, timeout_s=_CONNECT_S)["sessions"]) < count:
        if time.monotonic() > deadline_s:
            raise BenchError(f"{opened} of {count} sessions were open after {_CONNECT_S:.0f} s")
        time.sleep(0.2)


def _start_ranks(stack: ExitStack, front: str, count: int, slots: int) -> list[DiscardingRank]:
    """Starts every rank's client at once: each is a process that takes a second to import."""

    def start(index: int) -> DiscardingRank:
        return stack.enter_context(discarding_rank(front, _terms(slots, index), _WORK))

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start, range(count)))


def _terms(slots: int, index: int) -> StreamTerms:
    return StreamTerms(
        taps=_TAPS,
        hidden_size=_HIDDEN_SIZE,
        dtype=DType.BFLOAT16,
        max_batch_tokens=_BATCH_TOKENS,
        slot_count=slots,
        client_name=f"rank-{index}",
        # Bodies cost nothing here; a buffer for each of 1536 sessions would.
        shared_memory=False,
    )


def _server(replicas: int, ranks: int) -> dict[str, float]:
    return {
        "replicas": replicas,
        "forward_s": replicas / _IDEAL_PER_S,
        "hidden_size": _HIDDEN_SIZE,
        "tap_count": len(_TAPS),
        "batch_tokens": _BATCH_TOKENS,
        "sessions": ranks,
        "slots": ranks + 4,
    }
