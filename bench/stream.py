"""Part *stream*: what streaming costs a forward, and what not computing the rest saves.

Tokens a second that arrive at a client which discards them, from `target-server` as a user starts it, over the same
batches as two loops without a server (`loops`). Server, loops and client take turns; the client's core is free in all.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from sys import executable

from target_wire.spec import DType

from bench.child import child
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


def run(options: Options) -> list[Figure]:
    """Measures the stream."""
    target = real_target(options)
    works = [Work.of(sequences) for sequences in target.workload.sequences()]
    # On a CPU a batch takes seconds: many short pairs tell more than a few long ones.
    shares = [range(len(works))] if target.device != "cpu" else [range(i, i + 1) for i in range(len(works))]
    with ExitStack() as stack:
        front = stack.enter_context(_server(target))
        rank = stack.enter_context(discarding_rank(front, _terms(target), works[-1]))
        loops = {
            kind: stack.enter_context(child("bench.loops", {"kind": kind, **target.argument()}))
            for kind in ("plain", "limit")
        }

        def tokens_per_s(kind: str, round_number: int) -> float:
            share = shares[round_number % len(shares)]
            chosen = works[share.start : share.stop]
            if kind == "stream":
                seconds = rank.fetch(chosen)
            else:
                command = {"first": share.start, "end": share.stop}
                seconds = loops[kind].ask(command, timeout_s=_TIMEOUT_S)["seconds"]
            return sum(work.tokens for work in chosen) / seconds

        kinds = ("stream", "limit", "plain")
        measures = {kind: functools.partial(tokens_per_s, kind) for kind in kinds}
        turns = take_numbered_turns(measures, rounds=options.pick(full=16, quick=2))
        limit = loops["limit"].ready
        peak_tokens_per_s = limit["matrix_flops_per_s"] / limit["flops_per_token"]
    where = f"{target.device}, {target.dtype}"
    return [
        figure("stream_efficiency", ratios(turns, "stream", "plain"), "x", goal=">= 1.3", note="stream / plain loop"),
        figure("stream_vs_limit", ratios(turns, "stream", "limit"), "x", goal=">= 0.95", note="stream / needed blocks"),
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
def _server(target: RealTarget) -> Iterator[str]:
    """Runs `target-server` for the time of a block; gives the front's address."""
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
                yield f"127.0.0.1:{port.strip()}"
        except DemoError as error:
            raise BenchError(str(error)) from error
