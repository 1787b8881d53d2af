"""What a drafter is trained on: labels, weights and the loss of a batch.

Owns the alignment of slots and labels (slot k of the block at anchor a predicts the token AT a + k: no shift), the
weights, and which rows reach the head: only supervised ones, never slot 0.

A step's loss is sum(w * CE) / sum(w) with both sums over all micro-batches and ranks of the step. The weights are a
pure function of the plan and the anchors, so every rank knows the denominator before its first forward. Dividing on
each rank and averaging would weigh tokens by how well supervised their neighbours are.

Shapes: T packed tokens, A anchors, K block, Q = A*K block tokens, R supervised slots, E hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from drafter_trainer.attention import BlockLayout
from drafter_trainer.linear_cross_entropy import DEFAULT_CHUNK_ROWS, linear_cross_entropy
from drafter_trainer.linear_distillation import Divergence, linear_distillation
from drafter_trainer.vocabulary import VocabSampler, all_rows

if TYPE_CHECKING:
    from drafter_trainer.anchors import Anchors
    from drafter_trainer.drafter_config import DrafterConfig
    from drafter_trainer.head import TargetHead
    from drafter_trainer.stopwatch import Stopwatch
    from drafter_trainer.types import MicroBatch, TrainBatch

__all__ = [
    "BlockTargets",
    "Distillation",
    "LossOutput",
    "block_hidden",
    "build_block_targets",
    "dpace_weights",
    "drafter_loss",
]


class BlockModel(Protocol):
    """A drafter, or whatever ranks call in its stead."""

    @property
    def config(self) -> DrafterConfig:
        """The drafter's shape."""

    @property
    def stopwatch(self) -> Stopwatch:
        """What times its parts."""

    def __call__(self, block_embeds: Tensor, context_TC: Tensor, *, layout: BlockLayout) -> Tensor:
        """Run all blocks over their contexts, as `Drafter.forward` does."""


@dataclass(frozen=True)
class BlockTargets:
    """Labels and weights of every slot, on the CPU.

    Attributes:
        labels_AK: The token at the slot's position, int64; meaningless where the weight is 0.
        weights_AK: fp32, 0 for slot 0, beyond the document and on unsupervised tokens.
    """

    labels_AK: Tensor
    weights_AK: Tensor

    @property
    def weight_sum(self) -> float:
        """This micro-batch's share of the step's denominator."""
        return float(self.weights_AK.sum(dtype=torch.float64))

    @property
    def valid_AK(self) -> Tensor:
        """Which slots are supervised, bool."""
        return self.weights_AK > 0


def build_block_targets(micro: MicroBatch, anchors: Anchors, *, block_size: int, gamma: float | None) -> BlockTargets:
    """Label and weigh the slots of all blocks.

    Args:
        micro: The packed documents.
        anchors: Where blocks start.
        block_size: K.
        gamma: Slot k weighs exp(-(k - 1) / gamma) (DFlash, equation 4); None weighs all alike.
    """
    slot_K = torch.arange(block_size)
    lengths = torch.tensor(micro.lengths, dtype=torch.int64)
    inside_AK = anchors.position_A[:, None] + slot_K < lengths[anchors.document_A][:, None]
    index_AK = (anchors.index_A[:, None] + slot_K).where(inside_AK, 0)
    supervised_AK = micro.loss_mask_T.cpu()[index_AK] & inside_AK & (slot_K > 0)
    decay_K = torch.ones(block_size) if gamma is None else torch.exp(-(slot_K - 1) / gamma)
    return BlockTargets(micro.input_ids_T.cpu()[index_AK], supervised_AK * decay_K)


@dataclass(frozen=True)
class Distillation:
    """The part of the loss that compares with the target's own distribution.

    Attributes:
        divergence: How they are compared.
        weight: Its share, in (0, 1]; cross-entropy has the rest.
    """

    divergence: Divergence
    weight: float


@dataclass(frozen=True)
class LossOutput:
    """Sums over one micro-batch.

    Attributes:
        loss_sum: sum(w * loss), with CE for the loss or its mixture with a divergence; fp32 scalar with a graph that
            reaches every trainable parameter.
        weight_sum: The share of the denominator, `BlockTargets.weight_sum`.
        cross_entropy_AK: Unweighted cross-entropy by slot, fp32, detached; 0 where not valid.
        correct_AK: Whether a valid slot's label has the largest logit.
        valid_AK: Which slots are supervised. These three are on the drafter's device.
    """

    loss_sum: Tensor
    weight_sum: float
    cross_entropy_AK: Tensor
    correct_AK: Tensor
    valid_AK: Tensor


def drafter_loss(  # noqa: PLR0913 - what is learned from, and four independent settings
    drafter: BlockModel,
    head: TargetHead,
    batch: TrainBatch,
    anchors: Anchors,
    targets: BlockTargets,
    *,
    dpace_alpha: float | None = None,
    sampler: VocabSampler | None = None,
    distillation: Distillation | None = None,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> LossOutput:
    """Run the drafter over a batch and return its weighted loss.

    A batch without an anchor gives 0 with a graph that still reaches every trainable parameter (all products have no
    rows), so that a rank which drew such a batch takes part in its peers' reductions.

    Args:
        drafter: The drafter; for bf16 call this under autocast.
        head: The frozen head of the version that made the batch, on the drafter's device.
        batch: Documents and features.
        anchors: From `draw_anchors` for this micro-batch.
        targets: From `build_block_targets` for these anchors.
        dpace_alpha: Multiply the weights by D-PACE's, see `dpace_weights`; None leaves them.
        sampler: Estimate the partition sum from a part of the vocabulary; correctness then means among that part.
            None is exact.
        distillation: Mix in a divergence from the target's distribution over the whole vocabulary; needs
            `batch.last_TD`.
        chunk_rows: Rows whose logits are held at once.
    """
    device = head.device
    stopwatch = drafter.stopwatch
    with stopwatch.part("forward"):
        hidden_QE = block_hidden(drafter, head, batch, anchors)
    valid_AK = targets.valid_AK
    row_R = valid_AK.flatten().nonzero()[:, 0]
    # The target's row that predicts a slot's token is that of the token before it.
    before_R = anchors.index_A[row_R // drafter.config.block_size] + row_R % drafter.config.block_size - 1
    label_R = targets.labels_AK.flatten()[row_R].to(device)
    row_R, valid_AK, weight_AK = row_R.to(device), valid_AK.to(device), targets.weights_AK.to(device)
    rows = all_rows(head)
    if sampler is not None:
        rows, label_R = sampler.draw(head, label_R, position=batch.micro.position)
    hidden_RE = hidden_QE[row_R]
    with stopwatch.part("head"):
        loss_R, correct_R = linear_cross_entropy(hidden_RE, rows, label_R, chunk_rows=chunk_rows)
    with stopwatch.part("loss"):
        loss_AK = _by_slot(loss_R.detach(), row_R, valid_AK)
        if dpace_alpha is not None:
            weight_AK = weight_AK * dpace_weights(loss_AK, valid_AK, alpha=dpace_alpha)
        if distillation is not None:
            divergence_R = _divergence(hidden_RE, before_R, head, batch, distillation, chunk_rows=chunk_rows)
            loss_R = (1 - distillation.weight) * loss_R + distillation.weight * divergence_R
        loss_sum = (loss_R * weight_AK.flatten()[row_R]).sum()
    return LossOutput(
        loss_sum=loss_sum,
        weight_sum=targets.weight_sum,
        cross_entropy_AK=loss_AK,
        correct_AK=_by_slot(correct_R, row_R, valid_AK),
        valid_AK=valid_AK,
    )


def _divergence(
    hidden_RE: Tensor,
    before_R: Tensor,
    head: TargetHead,
    batch: TrainBatch,
    distillation: Distillation,
    *,
    chunk_rows: int,
) -> Tensor:
    """Divergence of each row from the target's own distribution at its row `before_R`, fp32 [R]."""
    assert batch.last_TD is not None, "the target was not asked for its last block"
    target_RE = head.normed(batch.last_TD[before_R.to(batch.last_TD.device)].to(hidden_RE.device))
    divergence_R, _ = linear_distillation(
        hidden_RE, target_RE, all_rows(head), divergence=distillation.divergence, chunk_rows=chunk_rows
    )
    return divergence_R


def block_hidden(drafter: BlockModel, head: TargetHead, batch: TrainBatch, anchors: Anchors) -> Tensor:
    """Run the drafter on blocks of [anchor token, mask, mask, …]; returns its final hidden rows, [Q, E]."""
    config = drafter.config
    layout = BlockLayout.from_anchors(batch.micro.lengths, anchors, block_size=config.block_size)
    ids_AK = torch.full((len(anchors), config.block_size), config.mask_token_id)
    ids_AK[:, 0] = batch.micro.input_ids_T.cpu()[anchors.index_A]
    embeds_QE = head.embed(ids_AK.flatten().to(head.device))
    hidden_QE: Tensor = drafter(embeds_QE, batch.features_TC.to(head.device), layout=layout)
    return hidden_QE


def dpace_weights(loss_AK: Tensor, valid_AK: Tensor, *, alpha: float) -> Tensor:
    """Return D-PACE's weights: how much of the expected accepted length rests on each slot.

    With q = exp(-CE), s = (1 - alpha) q + alpha on valid slots and 1 elsewhere, and P_m = s_1 … s_m, slot j weighs
    w_j = sum over valid m >= j of P_m (D-PACE, arXiv 2605.18810). Detached: a weight, not a loss.

    Trainers disagree on the denominator, so that their learning rates don't carry over. Here it stays the plain loss's,
    the sum of the weights before this factor: known before the forward and the same for any split over ranks. Slot 1 of
    an untrained drafter then weighs about 1, as in the plain loss, and up to K - 1 once whole blocks are right.

    Args:
        loss_AK: Cross-entropy by slot.
        valid_AK: Which slots are supervised.
        alpha: Floor of s, in [0, 1]; published: 0.5.
    """
    confidence = torch.exp(-loss_AK.detach())
    step = ((1 - alpha) * confidence + alpha).where(valid_AK, 1.0)
    reached = step.cumprod(1) * valid_AK
    return reached.flip(1).cumsum(1).flip(1) * valid_AK


def _by_slot(value_R: Tensor, row_R: Tensor, valid_AK: Tensor) -> Tensor:
    out = value_R.new_zeros(valid_AK.numel())
    out[row_R] = value_R
    return out.view(valid_AK.shape)
