"""What a step is made with and what it leaves: settings, a micro-batch before its features, outcome, bad micro-batches.

Shapes: T packed tokens, A anchors, K block.
"""

from __future__ import annotations

import dataclasses

import torch

from drafter_trainer.anchors import Anchors
from drafter_trainer.feed import FedBatch
from drafter_trainer.loss import BlockTargets, Distillation
from drafter_trainer.tally import Culprit, StepSums
from drafter_trainer.types import MicroBatch, Version
from drafter_trainer.vocabulary import VocabSampler

__all__ = ["BadBatch", "PreparedMicroBatch", "StepOutcome", "StepSettings", "step_seed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What a step's arithmetic depends on beside the weights."""

    seed: int
    num_anchors: int
    block_size: int
    gamma: float | None
    dpace_alpha: float | None
    chunk_rows: int
    sampler: VocabSampler | None
    """Draws the head's rows in the softmax; None takes all."""
    distillation: Distillation | None = None
    final_norm_offset: float = 0.0
    """Of the target's head; only dumps need it here."""
    compute_dtype: torch.dtype
    """Type of products; weights are fp32."""
    device: torch.device
    accumulation: int = 1
    """Micro-batches of one rank in a step, at most."""


@dataclasses.dataclass(frozen=True)
class PreparedMicroBatch:
    """What of a micro-batch is known before its features are there."""

    micro: MicroBatch
    anchors: Anchors
    targets: BlockTargets


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """One step over all ranks, before it's judged by people."""

    sums: StepSums
    loss: float
    weight_sum: float
    grad_norm: float
    lr: float
    bad: str
    """Why the step was left out; empty when it was made (or had nothing to supervise)."""
    parts_s: dict[str, float] | None = None
    """This rank's seconds by part, where they are measured."""
    culprits: tuple[Culprit, ...] = ()
    """Of a step left out: the micro-batches of all ranks that were not finite."""
    accept_len: float | None
    versions: tuple[Version, ...] = ()
    """Of this rank's micro-batches, in their order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadBatch:
    """A micro-batch that made something not finite, with all that is needed to do it again."""

    step: int
    fed: FedBatch
    """Valid only while it's reported."""
    prepared: PreparedMicroBatch
    loss_sum: float
    weight_sum: float
    """Of the whole step."""
    culprit: Culprit


def step_seed(seed: int, step: int) -> int:
    """Seed of the global generator for one step, the same on every rank; steps of one run never share one."""
    return (seed * 0x9E3779B97F4A7C15 + step) % 2**63
