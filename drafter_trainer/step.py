"""One optimizer step's arithmetic, over all ranks. Knows no files, no schedule of a run, no server.

A step: draw anchors and targets from the plan, agree on the weight sum over ranks and micro-batches BEFORE the first
forward, then per micro-batch forward and backward of its share, sum gradients over ranks, and update, unless something
was not finite; then nothing has changed. All ranks take part in every exchange, also with nothing to train.

Shapes: T packed tokens, C taps * target hidden, A anchors, K block.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch

from drafter_trainer.anchors import Anchors, draw_anchors
from drafter_trainer.ema import WeightAverage
from drafter_trainer.feed import FedBatch, Feed
from drafter_trainer.guard import bad_step_reason
from drafter_trainer.head import TargetHead
from drafter_trainer.loss import BlockTargets, Distillation, LossOutput, build_block_targets, drafter_loss
from drafter_trainer.model import Drafter
from drafter_trainer.optim import DrafterOptimizer
from drafter_trainer.parallel import Ranks
from drafter_trainer.types import MicroBatch, TrainBatch, Version
from drafter_trainer.vocabulary import VocabSampler
from drafter_trainer.walk import simulate_acceptance

__all__ = ["StepEngine", "StepOutcome", "StepSettings", "StepSums"]

# The simulation walks this much of a step's first batch: enough to follow a curve, too little to slow training. An
# untrained drafter advances one token a round.
SIMULATED_DOCUMENTS = 4
SIMULATED_TOKENS = 48


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
    compute_dtype: torch.dtype
    """Type of products; weights are fp32."""
    device: torch.device


@dataclasses.dataclass(frozen=True)
class PreparedMicroBatch:
    """What of a micro-batch is known before its features are there."""

    micro: MicroBatch
    anchors: Anchors
    targets: BlockTargets


@dataclasses.dataclass
class StepSums:
    """Sums over this rank's micro-batches of one step; exchanged as one row of doubles."""

    block_size: int
    loss: float = 0.0
    bad_batches: int = 0
    tokens: int = 0
    prefix: float = 0.0
    blocks: int = 0
    wait_s: float = 0.0
    epoch: int = 0
    correct: list[float] = dataclasses.field(default_factory=list)
    valid: list[float] = dataclasses.field(default_factory=list)
    versions: set[int] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self.correct = self.correct or [0.0] * (self.block_size - 1)
        self.valid = self.valid or [0.0] * (self.block_size - 1)

    def add(self, fed: FedBatch, output: LossOutput) -> None:
        """Counts a batch in. Reads the device once."""
        correct_AK, valid_AK = output.correct_AK[:, 1:], output.valid_AK[:, 1:]
        prefix_A = (correct_AK & valid_AK).to(torch.int64).cumprod(1).sum(1)
        supervised_A = valid_AK.any(1)
        counts = torch.stack([(correct_AK & valid_AK).sum(0), valid_AK.sum(0)]).double()
        totals = torch.stack([(1 + prefix_A[supervised_A]).sum(), supervised_A.sum()]).double()
        row = torch.cat([output.loss_sum.detach().double()[None], totals, counts.flatten()]).tolist()
        slots = self.block_size - 1
        self.loss += row[0]
        self.prefix += row[1]
        self.blocks += int(row[2])
        self.correct = [a + b for a, b in zip(self.correct, row[3 : 3 + slots], strict=True)]
        self.valid = [a + b for a, b in zip(self.valid, row[3 + slots :], strict=True)]
        self.tokens += sum(fed.batch.micro.lengths)
        self.epoch = max(self.epoch, fed.batch.micro.epoch)
        self.bad_batches += not fed.finite
        self.versions.add(fed.batch.target_version.number)

    def row(self) -> list[float]:
        """The sums as numbers to exchange; versions as the lowest and the highest (0: none)."""
        lasting = [self.wait_s, float(self.epoch)]
        versions = [float(min(self.versions, default=0)), float(max(self.versions, default=0))]
        plain = [self.loss, float(self.bad_batches), float(self.tokens), self.prefix, float(self.blocks)]
        return [*lasting, *versions, *plain, *self.correct, *self.valid]

    @classmethod
    def over_ranks(cls, rows: Sequence[Sequence[float]], block_size: int) -> StepSums:
        """The sums over all ranks, in rank order; the longest wait and the latest epoch of any."""
        wait_s, epoch = (max(column) for column in zip(*(row[:2] for row in rows), strict=True))
        loss, bad, tokens, prefix, blocks, *slots = (sum(column) for column in zip(*(r[4:] for r in rows), strict=True))
        return cls(
            block_size=block_size,
            loss=loss,
            bad_batches=int(bad),
            tokens=int(tokens),
            prefix=prefix,
            blocks=int(blocks),
            wait_s=wait_s,
            epoch=int(epoch),
            correct=slots[: block_size - 1],
            valid=slots[block_size - 1 :],
            versions={int(version) for row in rows for version in row[2:4] if version},
        )


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
    accept_len: float | None


class Heads(Protocol):
    """Heads by version; fetched when a new one is met."""

    def head(self, version: Version) -> TargetHead:
        """The head of a version, on the drafter's device in the compute type."""


class StepEngine:
    """One optimizer step. Used by one thread; every rank calls ``step`` equally often.

    Args:
        drafter: The drafter, on its device.
        optimizer: Of its parameters.
        feed: This rank's batches.
        heads: The target's frozen ends.
        ranks: Whom to agree with.
        settings: The arithmetic's settings.
        average: Follows the weights after each step that was made; acceptance is simulated with it.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        optimizer: DrafterOptimizer,
        feed: Feed,
        heads: Heads,
        ranks: Ranks,
        settings: StepSettings,
        average: WeightAverage | None = None,
    ) -> None:
        self.drafter = drafter
        self.optimizer = optimizer
        self._feed = feed
        self._heads = heads
        self._ranks = ranks
        self._settings = settings
        self._average = average

    def step(self, step: int, micros: Sequence[MicroBatch], *, simulate: bool) -> StepOutcome:
        """Trains this rank's micro-batches of one step; they are the feed's next ones.

        Args:
            step: Number of the step; with the seed it decides all randomness.
            micros: May be empty in a partial last step.
            simulate: Whether to simulate acceptance on the first batch.
        """
        torch.manual_seed(step_seed(self._settings.seed, step))
        prepared = [self._prepare(micro) for micro in micros]
        weight_sum = self._ranks.sum(sum(item.targets.weight_sum for item in prepared))
        sums = StepSums(block_size=self._settings.block_size)
        accept_len = None
        for number, item in enumerate(prepared):
            with self._feed.next_batch() as fed:
                if simulate and number == 0 and fed.finite:
                    accept_len = self._simulate(fed)
                sums.add(fed, self._forward_backward(fed, item, weight_sum))
        sums.wait_s = self._feed.take_wait_s()
        self._ranks.sum_gradients(p for p in self.drafter.parameters() if p.requires_grad)
        total = StepSums.over_ranks(self._ranks.gather(sums.row()), self._settings.block_size)
        return self._update(total, weight_sum, accept_len)

    def _prepare(self, micro: MicroBatch) -> PreparedMicroBatch:
        settings = self._settings
        anchors = draw_anchors(micro, num_anchors=settings.num_anchors, seed=settings.seed)
        targets = build_block_targets(micro, anchors, block_size=settings.block_size, gamma=settings.gamma)
        return PreparedMicroBatch(micro, anchors, targets)

    def _forward_backward(self, fed: FedBatch, item: PreparedMicroBatch, weight_sum: float) -> LossOutput:
        with self._autocast():
            output = drafter_loss(
                self.drafter,
                self._heads.head(fed.batch.target_version),
                fed.batch,
                item.anchors,
                item.targets,
                dpace_alpha=self._settings.dpace_alpha,
                sampler=self._settings.sampler,
                distillation=self._settings.distillation,
                chunk_rows=self._settings.chunk_rows,
            )
        (output.loss_sum / max(weight_sum, torch.finfo(torch.float32).tiny)).backward()  # type: ignore[no-untyped-call]
        return output

    def _update(self, sums: StepSums, weight_sum: float, accept_len: float | None) -> StepOutcome:
        loss = sums.loss / weight_sum if weight_sum else 0.0
        lr = self.optimizer.lr
        bad = bad_step_reason(bad_batches=sums.bad_batches, loss=loss, grad_norm=0.0)
        grad_norm = float("nan")
        if bad or not weight_sum:
            self.drafter.zero_grad(set_to_none=True)
        else:
            result = self.optimizer.step()
            grad_norm = result.grad_norm
            bad = bad_step_reason(bad_batches=0, loss=loss, grad_norm=grad_norm)
            if self._average is not None and not result.skipped:
                self._average.update()
        return StepOutcome(
            sums=sums,
            loss=loss,
            weight_sum=weight_sum,
            grad_norm=grad_norm,
            lr=lr,
            bad=bad,
            accept_len=accept_len,
        )

    def _simulate(self, fed: FedBatch) -> float | None:
        """Simulated acceptance length on the head of a batch; None when it holds no answer."""
        head = self._heads.head(fed.batch.target_version)
        with self._autocast(), self._averaged():
            acceptance = simulate_acceptance(self.drafter, head, simulated_part(fed.batch))
        return acceptance.micro if acceptance.rounds else None

    def _averaged(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._average is None else self._average.applied()

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._settings.compute_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._settings.device.type, dtype=self._settings.compute_dtype)


def step_seed(seed: int, step: int) -> int:
    """Seed of the global generator for one step, the same on every rank; steps of one run never share one."""
    return (seed * 0x9E3779B97F4A7C15 + step) % 2**63


def simulated_part(batch: TrainBatch) -> TrainBatch:
    """The first documents of a batch, each with only its first supervised tokens left."""
    micro = batch.micro
    lengths = micro.lengths[:SIMULATED_DOCUMENTS]
    tokens = sum(lengths)
    masks = torch.split(micro.loss_mask_T[:tokens], list(lengths))
    limited = dataclasses.replace(
        micro,
        sample_ids=micro.sample_ids[: len(lengths)],
        lengths=lengths,
        input_ids_T=micro.input_ids_T[:tokens],
        loss_mask_T=torch.cat([mask_T & (mask_T.cumsum(0) <= SIMULATED_TOKENS) for mask_T in masks]),
    )
    return dataclasses.replace(batch, micro=limited, features_TC=batch.features_TC[:tokens], last_TD=None)
