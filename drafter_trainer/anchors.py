"""Draws the anchors of a micro-batch: where the training blocks start.

Owns the eligibility rule and the randomness. An anchor of a document depends on (seed, epoch, sample id) and the
document's own loss mask only: not on the batch it is packed with, the rank, the world size or the time, so that a
resumed or re-partitioned run draws the same blocks. Must never raise for a document without an eligible token: ranks
would diverge; such a document simply has no anchor.

Shapes: T packed tokens, A anchors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from drafter_trainer.types import MicroBatch

__all__ = ["Anchors", "draw_anchors"]


@dataclass(frozen=True)
class Anchors:
    """Block starts, sorted by document and then by position. All tensors are int64 on the CPU.

    Attributes:
        index_A: Index of the anchor token in the packed row.
        document_A: Index of its document within the micro-batch.
        position_A: Its position within the document.
    """

    index_A: Tensor
    document_A: Tensor
    position_A: Tensor

    def __len__(self) -> int:
        """Return the number of anchors."""
        return self.index_A.numel()


def draw_anchors(micro: MicroBatch, *, num_anchors: int, seed: int) -> Anchors:
    """Draw up to `num_anchors` anchors in each document, uniformly without replacement.

    A token is eligible when it and its successor in the same document are both supervised: the anchor is then a token
    the drafter is started from when serving, and slot 1 has a label (DFlash as trained by SpecForge since its PR 731).

    Args:
        micro: The packed documents.
        num_anchors: Limit *per document*, so that short documents packed beside long ones keep their share.
        seed: The run's seed.
    """
    mask_T = micro.loss_mask_T.cpu().numpy()
    index, document, position = [], [], []
    start = 0
    for number, (length, sample_id) in enumerate(zip(micro.lengths, micro.sample_ids, strict=True)):
        mask = mask_T[start : start + length]
        eligible = np.flatnonzero(mask[:-1] & mask[1:])
        rng = np.random.default_rng([seed, micro.epoch, sample_id])
        # Keys by uniform random numbers: unlike Generator.choice their stream is the same in every numpy.
        keys = rng.random(eligible.size)
        chosen = np.sort(eligible[np.argsort(keys, kind="stable")[:num_anchors]])
        position.append(chosen)
        index.append(chosen + start)
        document.append(np.full(chosen.size, number))
        start += length
    return Anchors(*(_join(parts) for parts in (index, document, position)))


def _join(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([*parts, np.empty(0, np.int64)]).astype(np.int64))
