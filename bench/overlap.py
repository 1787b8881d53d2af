"""Part *overlap*: whether copying beside the next forward pays, with the ownership that makes it safe and the audit on.

The replica's own thread, buffers, copier and audit over a real model (`pipeline`), with `copy_overlap` on and off in
turns. On CUDA the copies are the device's. Without it, two host threads stand in for the device's two engines
(`thread_streams`), once with a copy that also takes a tenth of a forward without using a core, as a transfer over PCIe
does, and once with its memcpy alone, which on a CPU is next to nothing.
"""

from __future__ import annotations

import dataclasses

from bench.child import child
from bench.options import Options
from bench.pairs import ratios, take_turns
from bench.results import Figure, figure
from bench.target import real_target

__all__ = ["run"]

_TIMEOUT_S = 600.0
_COPY_SHARE = 0.1
_CPU_BATCHES = {"batches": 6, "batch_tokens": 128, "longest": 64}


def run(options: Options) -> list[Figure]:
    """Measures the gain."""
    target = real_target(options)
    on_gpu = target.device != "cpu"
    if not on_gpu:
        # Several batches a turn, so that there is a next forward; small ones, so that there are many turns.
        target = dataclasses.replace(target, workload=dataclasses.replace(target.workload, **_CPU_BATCHES))
    with child("bench.pipeline", target.argument()) as process:

        def seconds(*, overlap: bool, copy_s: float) -> float:
            answer = process.ask({"overlap": overlap, "copy_s": copy_s}, timeout_s=_TIMEOUT_S)
            return float(answer["seconds"])

        forward_s = seconds(overlap=False, copy_s=0.0) / process.ready["batches"]
        copy_s = 0.0 if on_gpu else _COPY_SHARE * forward_s
        turns = take_turns(
            {
                "off": lambda: seconds(overlap=False, copy_s=copy_s),
                "on": lambda: seconds(overlap=True, copy_s=copy_s),
                "plain off": lambda: seconds(overlap=False, copy_s=0.0),
                "plain on": lambda: seconds(overlap=True, copy_s=0.0),
            },
            rounds=options.pick(full=8, quick=1),
        )
    what = f"{target.device}; audit sampled" if on_gpu else f"copies of {1e3 * copy_s:.0f} ms; audit sampled"
    gain = figure("overlap_gain", ratios(turns, "off", "on"), "x", goal=">= 1", note=f"overlap on / off, {what}")
    if on_gpu:
        return [gain]
    plain = ratios(turns, "plain off", "plain on")
    return [gain, figure("overlap_gain_memcpy", plain, "x", note="overlap on / off, copies of a memcpy only")]
