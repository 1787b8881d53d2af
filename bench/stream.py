"""Part *stream*: what streaming costs a forward, and what not computing the rest saves.

Tokens a second that arrive at a client which discards them, from `target-server` as a user starts it, over the same
batches as two loops without a server (`loops`). Server, loops and client take turns; the client's core is free in all.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from sys import executable

import psutil
from target_wire.spec import DType

from bench.child import child
from bench.cores import cpu_seconds
from bench.options import BenchError, Options
from bench.pairs import ratios, take_numbered_turns
from bench.rank import Work, discarding_rank
from bench.results import Figure, figure
from bench.target import RealTarget, real_target
from demo.errors import DemoError
from demo.programs import start_program, wait_for_file
from drafter_trainer.client.terms import StreamTerms

__all__ = ["run"]

_TIMEOUT_S = 600.0
_START_TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class _Speed:
    """Tokens a second, of time and of CPU time."""

    by_clock: float
    by_cpu: float

    def __str__(self) -> str:
        return f"{self.by_clock:.4g} tok/s"


def run(options: Options) -> list[Figure]:
    """Measures the stream."""
    target = real_target(options)
    works = [Work.of(sequences) for sequences in target.workload.sequences()]
    # On a CPU a batch takes seconds: many short pairs tell more than a few long ones.
    shares = [range(len(works))] if target.device != "cpu" else [range(i, i + 1) for i in range(len(works))]
    with ExitStack() as stack:
        front, server_pid = stack.enter_context(_server(target))
        rank = stack.enter_context(discarding_rank(front, _terms(target), works[-1]))
        loops = {
            kind: stack.enter_context(child("bench.loops", {"kind": kind, **target.argument()}))
            for kind in ("plain", "limit")
        }

        pids = {"stream": _tree(server_pid), "limit": [loops["limit"].pid], "plain": [loops["plain"].pid]}

        def speed(kind: str, round_number: int) -> _Speed:
            share = shares[round_number % len(shares)]
            chosen = works[share.start : share.stop]
            cpu_s = cpu_seconds(pids[kind])
            if kind == "stream":
                seconds = rank.fetch(chosen)
            else:
                command = {"first": share.start, "end": share.stop}
                seconds = loops[kind].ask(command, timeout_s=_TIMEOUT_S)["seconds"]
            tokens = sum(work.tokens for work in chosen)
            return _Speed(tokens / seconds, tokens / (cpu_seconds(pids[kind]) - cpu_s))

        measures = {kind: functools.partial(speed, kind) for kind in pids}
        speeds = take_numbered_turns(measures, rounds=options.pick(full=16, quick=2))
        turns = [{kind: of.by_clock for kind, of in turn.items()} for turn in speeds]
        cpu_turns = [{kind: of.by_cpu for kind, of in turn.items()} for turn in speeds]
        limit = loops["limit"].ready
        peak_tokens_per_s = limit["matrix_flops_per_s"] / limit["flops_per_token"]
    where = f"{target.device}, {target.dtype}"
    return [
        figure("stream_efficiency", ratios(turns, "stream", "plain"), "x", goal=">= 1.3", note="stream / plain loop"),
        figure("stream_vs_limit", ratios(turns, "stream", "limit"), "x", goal=">= 0.95", note="stream / needed blocks"),
        *_cpu_figures(target, cpu_turns),
        figure("stream_tokens_per_s", [turn["stream"] for turn in turns], "tok/s", note=f"SmolLM2-135M, {where}"),
        figure(
            "stream_matrix_fraction",
            [turn["stream"] / peak_tokens_per_s for turn in turns],
            "x",
            note="of one large matrix product's speed, padding not counted",
        ),
        figure("plain_tokens_per_s", [turn["plain"] for turn in turns], "tok/s", note="plain loop"),
        figure("limit_tokens_per_s", [turn["limit"] for turn in turns], "tok/s", note="needed blocks only"),
    ]


def _cpu_figures(target: RealTarget, cpu_turns: list[dict[str, float]]) -> list[Figure]:
    """The same ratios by CPU time of server and loops, which other programs on the machine disturb less."""
    if target.device != "cpu":
        return []
    return [
        figure(f"{name}_cpu", ratios(cpu_turns, "stream", below), "x", note="the same by CPU seconds, client left out")
        for name, below in (("stream_efficiency", "plain"), ("stream_vs_limit", "limit"))
    ]


def _tree(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def _terms(target: RealTarget) -> StreamTerms:
    return StreamTerms(
        taps=target.taps,
        hidden_size=target.hidden_size,
        dtype=DType(target.dtype),
        max_batch_tokens=target.workload.batch_tokens,
        slot_count=4,
        client_name="bench",
    )


@contextmanager
def _server(target: RealTarget) -> Iterator[tuple[str, int]]:
    """Runs `target-server` for the time of a block; gives the front's address and process id."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        port_file = Path(scratch) / "port"
        settings = {
            "model.path": target.path,
            "model.dtype": target.dtype,
            "devices": target.device,
            "listen": "127.0.0.1:0",
            "replica.num_threads": target.threads,
            "limits.max_batch_token_count": target.workload.batch_tokens,
            "limits.max_tap_count": len(target.taps),
            "limits.max_session_count": 2,
            "buffers.host_slot_count": 5,
        }
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        command = [executable, "-m", "target_server", "serve", *flags, "--port-file", str(port_file)]
        try:
            with start_program("target-server", command, log=Path(scratch) / "log", environment={}) as program:
                port = wait_for_file(port_file, program=program, timeout_s=_START_TIMEOUT_S)
                yield f"127.0.0.1:{port.strip()}", program.pid
        except DemoError as error:
            raise BenchError(str(error)) from error
