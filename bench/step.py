"""Part *step*: the drafter's forward and backward pass against the plain reference of the tests, on the CPU in fp32.

The reference masks densely over context and blocks and holds all logits at once. Each pass runs in a process of its own
(`bench.step_run`), product and reference in turns, with as many threads as torch takes. Two sizes: many short documents
and one long one; the goals are for the long one. Both sides must come to the same loss.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys

from bench.options import CHECKOUT, BenchError, Options
from bench.pairs import take_turns
from bench.results import Figure, figure
from bench.step_run import Measured, Work

__all__ = ["run"]

_SHORT = Work("product", sequences=2, tokens=512, anchors=64, block_size=8)
_LONG = Work("product", sequences=1, tokens=2048, anchors=128, block_size=16)
_QUICK_SHORT = dataclasses.replace(_SHORT, tokens=64, anchors=8, vocab_size=2048)
_QUICK_LONG = dataclasses.replace(_LONG, tokens=128, anchors=8, vocab_size=2048)
_LOSS_TOLERANCE = 1e-4
_TIMEOUT_S = 600.0


def run(options: Options) -> list[Figure]:
    """Measures the step."""
    rounds = options.pick(full=5, quick=1)
    long = _compare(_QUICK_LONG if options.quick else _LONG, rounds)
    short = _compare(_QUICK_SHORT if options.quick else _SHORT, rounds)
    return [
        figure("step_speedup", _time_ratios(long), "x", goal=">= 2", note="reference ÷ ours, 1 x 2048 tokens"),
        figure("step_memory_ratio", _memory_ratios(long), "x", goal="<= 0.5", note="ours ÷ reference, the same"),
        figure("step_s", [pair["product"].seconds for pair in long], "s", note="ours, the same"),
        figure("step_memory_mb", [pair["product"].peak_bytes / 1e6 for pair in long], "MB", note="ours, the same"),
        figure("step_speedup_short", _time_ratios(short), "x", note="reference ÷ ours, 2 x 512 tokens"),
        figure("step_memory_ratio_short", _memory_ratios(short), "x", note="ours ÷ reference, the same"),
        figure("step_short_s", [pair["product"].seconds for pair in short], "s", note="ours, the same"),
    ]


def _compare(work: Work, rounds: int) -> list[dict[str, Measured]]:
    """Returns the product's and the reference's figures, one pair a round.

    Raises:
        BenchError: a pass failed, or the two losses differ.
    """
    kinds = {"product": work, "reference": dataclasses.replace(work, kind="reference")}
    pairs = take_turns({name: functools.partial(_in_fresh_process, of) for name, of in kinds.items()}, rounds=rounds)
    for pair in pairs:
        ours, theirs = pair["product"].loss, pair["reference"].loss
        if not abs(ours - theirs) <= _LOSS_TOLERANCE * abs(theirs):
            raise BenchError(f"the losses differ: {ours} here, {theirs} by the reference")
    return pairs


def _in_fresh_process(work: Work) -> Measured:
    command = [sys.executable, "-m", "bench.step_run", json.dumps(dataclasses.asdict(work))]
    try:
        ended = subprocess.run(
            command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"a {work.kind} pass took more than {_TIMEOUT_S:.0f} s") from error
    if ended.returncode != 0:
        raise BenchError(f"a {work.kind} pass ended with {ended.returncode}; its messages are above")
    return Measured(**json.loads(ended.stdout))


def _time_ratios(pairs: list[dict[str, Measured]]) -> list[float]:
    return [pair["reference"].seconds / pair["product"].seconds for pair in pairs]


def _memory_ratios(pairs: list[dict[str, Measured]]) -> list[float]:
    return [pair["product"].peak_bytes / pair["reference"].peak_bytes for pair in pairs]
