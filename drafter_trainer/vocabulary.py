"""Which rows of the head take part in the partition sum: all of them, or a corrected sample.

Owns the sample for machines on which the head is most of a step. Rows that matter are always in (the batch's labels,
and any the caller names, such as the tokens of the corpus) and count once. Of the others a uniform draw without
replacement is in, and each stands for (others / drawn) rows: the estimate of the partition sum is unbiased. Its
logarithm, and so the loss, is biased low by half the estimate's relative variance.

A draw depends on (seed, position) alone, so that a resumed run repeats it.

Shapes: V vocab, E hidden, R supervised slots, S sampled rows.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from drafter_trainer.head import TargetHead
from drafter_trainer.linear_cross_entropy import HeadRows

__all__ = ["VocabSampler", "all_rows"]


def all_rows(head: TargetHead) -> HeadRows:
    """Return the whole head: the exact partition sum."""
    return HeadRows(head.lm_head_weight_VD, head.lm_head_bias_V, head.logit_scale, head.logit_softcap)


class VocabSampler:
    """Draws the head's rows for one micro-batch at a time.

    Attributes:
        rows, seed, always: As given.
    """

    def __init__(self, *, rows: int, seed: int, always: Tensor | None = None) -> None:
        """Set up the draws.

        Args:
            rows: Rows wanted in all. At least a quarter as many are drawn at random, whatever else is in.
            seed: The run's seed.
            always: Token ids that are in every draw, int64, any order.
        """
        self.rows, self.seed = rows, seed
        self.always = torch.empty(0, dtype=torch.int64) if always is None else always.cpu()

    def draw(self, head: TargetHead, label_R: Tensor, *, position: int) -> tuple[HeadRows, Tensor]:
        """Draw for one micro-batch.

        Args:
            head: The frozen head.
            label_R: Token ids that must be in, int64.
            position: The micro-batch's place in the plan.

        Returns:
            The rows, and `label_R` as indices into them.
        """
        vocab = head.vocab_size
        surely = torch.zeros(vocab, dtype=torch.bool)
        surely[self.always] = True
        surely[label_R.cpu()] = True
        others = (~surely).nonzero()[:, 0]
        count = min(len(others), max(self.rows - (vocab - len(others)), self.rows // 4))
        keys = np.random.default_rng([self.seed, position]).random(len(others))
        drawn = others[torch.from_numpy(np.argsort(keys, kind="stable")[:count])]
        ids_S = torch.cat([surely.nonzero()[:, 0], drawn]).sort().values
        importance_S = torch.zeros(len(ids_S)).where(surely[ids_S], math.log(max(len(others), 1) / max(count, 1)))
        ids_S, importance_S = ids_S.to(label_R.device), importance_S.to(label_R.device)
        bias = None if head.lm_head_bias_V is None else head.lm_head_bias_V[ids_S]
        rows = HeadRows(head.lm_head_weight_VD[ids_S], bias, head.logit_scale, head.logit_softcap, importance_S)
        return rows, torch.searchsorted(ids_S, label_R)
