"""One optimizer step's arithmetic, over all ranks. Knows no files, no schedule of a run, no server.

A step: draw anchors and targets from the plan, agree on the weight sum over ranks and micro-batches BEFORE the first
forward, then per micro-batch forward and backward of its share, sum gradients over ranks, and update, unless something
was not finite; then nothing has changed. All ranks take part in every exchange, also with nothing to train.

Shapes: T packed tokens, C taps * target hidden, A anchors, K block.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from drafter_trainer.anchors import Anchors, draw_anchors
from drafter_trainer.ema import WeightAverage
from drafter_trainer.errors import TargetChangedError
from drafter_trainer.feed import FedBatch, Feed
from drafter_trainer.guard import bad_step_reason
from drafter_trainer.head import TargetHead
from drafter_trainer.loss import BlockTargets, Distillation, LossOutput, build_block_targets, drafter_loss
from drafter_trainer.model import Drafter
from drafter_trainer.optim import DrafterOptimizer
from drafter_trainer.parallel import SharedDrafter
from drafter_trainer.tally import BadKind, Culprit, StepSums
from drafter_trainer.types import MicroBatch, TrainBatch, Version
from drafter_trainer.vocabulary import VocabSampler
from drafter_trainer.walk import simulate_acceptance

__all__ = ["BadBatch", "StepEngine", "StepOutcome", "StepSettings"]

# The simulation walks this much of a step's first batch: enough to follow a curve, too little to slow training. An
# untrained drafter advances one token a round.
SIMULATED_DOCUMENTS = 4
SIMULATED_TOKENS = 48
# How often in a row a step is made again because the target changed within it; a target that changes faster than a
# step can be made can't be trained on.
MAX_MADE_AGAIN = 8


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


@dataclasses.dataclass(frozen=True)
class _Pass:
    """This rank's part of a step: its gradients are in the drafter."""

    sums: StepSums
    accept_len: float | None
    versions: tuple[Version, ...]
    culprits: tuple[Culprit, ...]


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


class Heads(Protocol):
    """Heads by version."""

    def head(self, version: Version) -> TargetHead:
        """The head of a version, on the drafter's device in the compute type."""


class StepEngine:
    """One optimizer step. Used by one thread; every rank calls ``step`` equally often.

    Args:
        shared: The drafter, on its device, as the ranks share it.
        optimizer: Of its parameters.
        feed: This rank's batches.
        heads: The target's frozen ends.
        settings: The arithmetic's settings.
        average: Follows the weights after each step that was made; acceptance is simulated with it.
        on_bad: Told of a micro-batch that made something not finite, before the next one is taken.
        may_train: Whether a step of these batches (version to number, over all ranks) may be made; if not, it is made
            again from batches that are asked for anew. May raise to end the run.
    """

    def __init__(
        self,
        shared: SharedDrafter,
        *,
        optimizer: DrafterOptimizer,
        feed: Feed,
        heads: Heads,
        settings: StepSettings,
        average: WeightAverage | None = None,
        on_bad: Callable[[BadBatch], None] = lambda bad: None,
        may_train: Callable[[Mapping[Version, int]], bool] = lambda counts: True,
    ) -> None:
        self.drafter = shared.drafter
        self.shared = shared
        self.optimizer = optimizer
        self._feed = feed
        self._heads = heads
        self._ranks = shared.ranks
        self._settings = settings
        self._average = average
        self._on_bad = on_bad
        self._may_train = may_train

    def step(self, step: int, micros: Sequence[MicroBatch], *, simulate: bool) -> StepOutcome:
        """Trains this rank's micro-batches of one step; they are the feed's next ones.

        Args:
            step: Number of the step; with the seed it decides all randomness.
            micros: May be empty in a partial last step.
            simulate: Whether the first rank is to simulate acceptance on its first batch; the same on all ranks.

        Raises:
            TargetChangedError: The target changes faster than a step can be made.
        """
        prepared = [self._prepare(micro) for micro in micros]
        agreed = self._ranks.gather([sum(item.targets.weight_sum for item in prepared), len(prepared)])
        weight_sum, passes = sum(row[0] for row in agreed), max(int(row[1]) for row in agreed)
        for _ in range(MAX_MADE_AGAIN):
            torch.manual_seed(step_seed(self._settings.seed, step))
            mine = self._accumulate(step, prepared, weight_sum, passes=passes, simulate=simulate)
            row = mine.sums.row(version_entries=self._settings.accumulation)
            total = StepSums.over_ranks(self._ranks.gather(row), self._settings.block_size)
            if self._may_train(total.versions):
                return self._finish(mine, total, weight_sum)
            self.drafter.zero_grad(set_to_none=True)
            if micros:
                self._feed.go_back(micros[0].position)
        raise TargetChangedError(
            f"the target changed {MAX_MADE_AGAIN} times within step {step}; swap less often, and all servers together"
        )

    def _accumulate(
        self, step: int, prepared: Sequence[PreparedMicroBatch], weight_sum: float, *, passes: int, simulate: bool
    ) -> _Pass:
        """Forward and backward of this rank's micro-batches, each with its own version's head; sums gradients."""
        sums = StepSums(block_size=self._settings.block_size)
        accept_len = None
        versions: list[Version] = []
        culprits: list[Culprit] = []
        simulated = self._simulated_drafter() if simulate and passes else None
        for number, item in enumerate(prepared):
            with self._feed.next_batch() as fed, self.shared.accumulating(last=number == passes - 1):
                versions.append(fed.batch.target_version)
                if simulated is not None and number == 0 and fed.finite:
                    accept_len = self._simulate(simulated, fed)
                output = self._forward_backward(fed, item, weight_sum)
                kind = sums.add(fed, output, self.shared.gradient_size())
                if kind is not None:
                    bad = self._describe(step, fed, item, output, weight_sum, kind)
                    culprits.append(bad.culprit)
                    self._on_bad(bad)
        for number in range(len(prepared), passes):  # other ranks have more: a partial last step
            with self.shared.accumulating(last=number == passes - 1):
                self.shared.idle_pass()
        sums.wait_s = self._feed.take_wait_s()
        sums.asked_again = self._feed.take_asked_again()
        return _Pass(sums, accept_len, tuple(versions), tuple(culprits))

    def _finish(self, mine: _Pass, total: StepSums, weight_sum: float) -> StepOutcome:
        """Updates, or leaves the step out."""
        outcome = dataclasses.replace(
            self._update(total, weight_sum, mine.accept_len),
            versions=mine.versions,
            parts_s=self.drafter.stopwatch.take(),
        )
        # Every rank knows by now whether the step is bad, so all take part in this.
        return dataclasses.replace(outcome, culprits=self._everyones(mine.culprits)) if outcome.bad else outcome

    def _prepare(self, micro: MicroBatch) -> PreparedMicroBatch:
        settings = self._settings
        anchors = draw_anchors(micro, num_anchors=settings.num_anchors, seed=settings.seed)
        targets = build_block_targets(micro, anchors, block_size=settings.block_size, gamma=settings.gamma)
        return PreparedMicroBatch(micro, anchors, targets)

    def _forward_backward(self, fed: FedBatch, item: PreparedMicroBatch, weight_sum: float) -> LossOutput:
        with self._autocast():
            output = drafter_loss(
                self.shared,
                self._heads.head(fed.batch.target_version),
                fed.batch,
                item.anchors,
                item.targets,
                dpace_alpha=self._settings.dpace_alpha,
                sampler=self._settings.sampler,
                distillation=self._settings.distillation,
                chunk_rows=self._settings.chunk_rows,
            )
        with self.drafter.stopwatch.part("backward"):
            scale = max(weight_sum, torch.finfo(torch.float32).tiny)
            (output.loss_sum / scale).backward()  # type: ignore[no-untyped-call]
        return output

    def _describe(
        self,
        step: int,
        fed: FedBatch,
        item: PreparedMicroBatch,
        output: LossOutput,
        weight_sum: float,
        kind: BadKind,
    ) -> BadBatch:
        loss_sum = float(output.loss_sum.detach())
        said = "the target marked its features as not finite" if not fed.finite else "its features are not finite"
        details = {"features": said, "loss": f"its loss is {loss_sum}", "gradient": "its gradient is not finite"}
        culprit = Culprit(
            rank=self._ranks.rank,
            position=item.micro.position,
            sample_ids=tuple(item.micro.sample_ids),
            replica_index=fed.batch.replica_index,
            version=fed.batch.target_version.number,
            kind=kind,
            detail=details[kind],
        )
        return BadBatch(step=step, fed=fed, prepared=item, loss_sum=loss_sum, weight_sum=weight_sum, culprit=culprit)

    def _everyones(self, culprits: Sequence[Culprit]) -> tuple[Culprit, ...]:
        texts = self._ranks.gather_texts([culprit.to_json() for culprit in culprits])
        return tuple(Culprit.from_json(text) for text in texts)

    def _update(self, sums: StepSums, weight_sum: float, accept_len: float | None) -> StepOutcome:
        loss = sums.loss / weight_sum if weight_sum else 0.0
        lr = self.optimizer.lr
        bad = bad_step_reason(bad=sums.bad, loss=loss, grad_norm=0.0)
        grad_norm = float("nan")
        if bad or not weight_sum:
            self.drafter.zero_grad(set_to_none=True)
        else:
            with self.drafter.stopwatch.part("optimizer"):
                result = self.optimizer.step()
            grad_norm = result.grad_norm
            bad = bad_step_reason(bad={}, loss=loss, grad_norm=grad_norm)
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

    def _simulated_drafter(self) -> Drafter | None:
        """The drafter to simulate with, on the first rank; all ranks take part."""
        with self._averaged():
            return self.shared.whole_drafter()

    def _simulate(self, drafter: Drafter, fed: FedBatch) -> float | None:
        """Simulated acceptance length on the head of a batch; None when it holds no answer."""
        head = self._heads.head(fed.batch.target_version)
        with self._autocast(), self._averaged():
            acceptance = simulate_acceptance(drafter, head, simulated_part(fed.batch))
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
