"""What a decoding round costs on this machine, by block length.

Owns the measurement behind the choice of a block length. A block costs what its rows cost, and that is a property of
the machine: nothing on one that computes a block as fast as it reads the weights, a full forward a few rows
elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from drafter_trainer.acceptance import choose_block_length
from drafter_trainer.decode import BlockDrafter
from drafter_trainer.target_runner import TargetRunner

__all__ = ["candidate_lengths", "measure_rounds", "pick_drafter"]

_REPEATS = 4


def candidate_lengths(trained: int) -> tuple[int, ...]:
    """Block lengths worth measuring: multiples of four fill the kernels' tiles, and the trained one."""
    return tuple(sorted({n for n in (4, 8, 12, 16) if n < trained} | {trained}))


@torch.inference_mode()
def measure_rounds(
    runner: TargetRunner, drafters: Sequence[BlockDrafter], prompt_ids: Sequence[int]
) -> dict[int, float]:
    """Seconds of one round after `prompt_ids`, by block length; length 1 is a plain step.

    Args:
        runner: Tapped as the drafters want.
        drafters: One for each length; their contexts are restarted.
        prompt_ids: Of usual length, so that attention costs what it will.
    """
    prompt = torch.tensor(prompt_ids, device=runner.device)
    best: dict[int, float] = {}
    for drafter in (None, *drafters):
        features = runner.prefill(prompt).features_RC
        if drafter is not None:
            assert features is not None, "the runner has no taps"
            drafter.restart()
            drafter.read(features)
        for attempt in range(_REPEATS + 1):
            seconds = _timed_round(runner, drafter, prompt[-1:])
            if attempt:  # the first pays for allocation
                length = 1 if drafter is None else drafter.block_size
                best[length] = min(best.get(length, seconds), seconds)
    return best


def pick_drafter(
    runner: TargetRunner,
    drafters: Sequence[BlockDrafter],
    prompt_ids: Sequence[int],
    by_slot: Sequence[float | None],
) -> BlockDrafter:
    """Return the one of `drafters` whose block length is expected to emit most tokens a second."""
    rounds = measure_rounds(runner, drafters, prompt_ids)
    del rounds[1]  # plain decoding is what it is compared with, not a choice
    length, _ = choose_block_length(rounds, by_slot)
    return next(d for d in drafters if d.block_size == length)


def _timed_round(runner: TargetRunner, drafter: BlockDrafter | None, anchor: torch.Tensor) -> float:
    """One round that accepts nothing, so that the next starts where this one did plus one row."""
    started = time.perf_counter()
    block = anchor if drafter is None else torch.cat([anchor, drafter.draft(int(anchor))])
    rows = runner.extend(block)
    rows.logits_RV.float().argmax(-1).tolist()
    runner.keep(1)
    if drafter is not None and rows.features_RC is not None:
        drafter.read(rows.features_RC[:1])
    return time.perf_counter() - started
