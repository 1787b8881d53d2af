"""Tells a tie from an error where two greedy decodings of one target part.

Owns the comparison of two answers and the measurement at their first difference. Decoding one row at a time and in
blocks runs different kernels; their sums are rounded in a different order. In float32 that moves a logit by about
1e-6 of its size and answers are equal. In bfloat16 (8 significant bits) it moves logits by units in the last place,
and where the two best logits are that close, either is a right greedy choice. From there on the answers differ
entirely, so only the first difference says anything.

Shapes: V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_trainer.target_runner import TargetRunner

__all__ = ["TIE_ULPS", "Divergence", "explain_divergence", "first_difference"]

TIE_ULPS = 4.0
"""Widest gap of a tie, in units in the last place. Rounding each entry of the final hidden row moves a logit by one or
two; a wrong cache, position or feature moves it by tens."""


@dataclass(frozen=True)
class Divergence:
    """The first difference of two answers to one prompt.

    Attributes:
        position: Index within the answer.
        token_ids: The two tokens there.
        gap: How far the lower of the two is below the largest logit, one forward over the common prefix.
        ulp: Unit in the last place of the model's dtype at the largest logit.
    """

    position: int
    token_ids: tuple[int, int]
    gap: float
    ulp: float

    @property
    def is_tie(self) -> bool:
        """Whether both tokens are right greedy choices at the model's precision."""
        return self.gap <= TIE_ULPS * self.ulp


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter length if one is the other's start, None if they are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


@torch.inference_mode()
def explain_divergence(
    runner: TargetRunner, prompt_ids: Sequence[int], one: Sequence[int], other: Sequence[int]
) -> Divergence:
    """Measure the logits of both candidates after the common prefix of two answers.

    Raises:
        ValueError: The answers do not differ in a token: they are equal, or one just ends earlier, which no rounding
            explains.
    """
    position = first_difference(one, other)
    if position is None or position >= min(len(one), len(other)):
        raise ValueError(f"answers of {len(one)} and {len(other)} tokens have no differing token")
    prefix = torch.tensor([*prompt_ids, *one[:position]], device=runner.device)
    logits_V = runner.prefill(prefix).logits_RV[-1]
    pair = one[position], other[position]
    top = logits_V.max()
    gap = (top.double() - logits_V[list(pair)].double().min()).item()
    return Divergence(position, pair, gap, _ulp(top))


def _ulp(value: Tensor) -> float:
    """Distance between neighbouring numbers of the value's dtype at its magnitude."""
    magnitude = max(abs(value.item()), torch.finfo(value.dtype).tiny)
    return float(2.0 ** math.floor(math.log2(magnitude)) * torch.finfo(value.dtype).eps)
