"""One optimizer step's arithmetic, over all ranks. Knows no files, no schedule of a run, no server.

A step: draw anchors and targets from the plan, agree on the weight sum over ranks and micro-batches BEFORE the first
forward, then per micro-batch forward and backward of its share, sum gradients over ranks, and update, unless something
was not finite; then nothing has changed. All ranks take part in every exchange, also with nothing to train.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from drafter_trainer.anchors import draw_anchors
from drafter_trainer.ema import WeightAverage
from drafter_trainer.errors import TargetChangedError
from drafter_trainer.feed import FedBatch, Feed
from drafter_trainer.guard import bad_step_reason
from drafter_trainer.head import TargetHead
from drafter_trainer.loss import LossOutput, build_block_targets, drafter_loss
from drafter_trainer.model import Drafter
from drafter_trainer.optim import DrafterOptimizer
from drafter_trainer.parallel import SharedDrafter
from drafter_trainer.sharded import whole
from drafter_trainer.signals import StopRequestedError
from drafter_trainer.step_records import BadBatch, PreparedMicroBatch, StepOutcome, StepSettings, step_seed
from drafter_trainer.tally import BadKind, Culprit, StepSums
from drafter_trainer.types import MicroBatch, Version
from drafter_trainer.walk import simulate_acceptance, simulated_part

__all__ = ["StepEngine"]

# How often in a row a step is made again because the target changed within it; a target that changes faster than a
# step can be made can't be trained on.
MAX_MADE_AGAIN = 8


@dataclasses.dataclass(frozen=True)
class _Pass:
    """This rank's part of a step: its gradients are in the drafter."""

    sums: StepSums
    accept_len: float | None
    versions: tuple[Version, ...]
    culprits: tuple[Culprit, ...]


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
        on_bad_weights: Told of the whole weights that this rank's bad micro-batches of a step met, at its end, where
            each rank holds only a part of them.
        may_train: Whether a step of these batches (version to number, over all ranks) may be made; if not, it is made
            again from batches that are asked for anew. May raise to end the run.
    """

    def __init__(  # noqa: PLR0913 - its collaborators
        self,
        shared: SharedDrafter,
        *,
        optimizer: DrafterOptimizer,
        feed: Feed,
        heads: Heads,
        settings: StepSettings,
        average: WeightAverage | None = None,
        on_bad: Callable[[BadBatch], None] = lambda bad: None,
        on_bad_weights: Callable[[dict[str, Tensor]], None] = lambda weights: None,
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
        self._on_bad_weights = on_bad_weights
        self._may_train = may_train

    def step(self, step: int, micros: Sequence[MicroBatch], *, simulate: bool) -> StepOutcome:
        """Trains this rank's micro-batches of one step; they are the feed's next ones.

        Args:
            step: Number of the step; with the seed it decides all randomness.
            micros: May be empty in a partial last step.
            simulate: Whether the first rank is to simulate acceptance on its first batch; the same on all ranks.

        Raises:
            TargetChangedError: The target changes faster than a step can be made.
            StopRequestedError: A rank was asked to stop while its batch doesn't come; raised on all ranks at once.
        """
        prepared = [self._prepare(micro) for micro in micros]
        agreed = self._ranks.gather([sum(item.targets.weight_sum for item in prepared), len(prepared)])
        weight_sum, passes = sum(row[0] for row in agreed), max(int(row[1]) for row in agreed)
        given_up = False
        for _ in range(MAX_MADE_AGAIN):
            torch.manual_seed(step_seed(self._settings.seed, step))
            mine = self._accumulate(step, prepared, weight_sum, passes=passes, simulate=simulate, given_up=given_up)
            row = mine.sums.row(version_entries=self._settings.accumulation)
            total = StepSums.over_ranks(self._ranks.gather(row), self._settings.block_size)
            if total.given_up:
                self.drafter.zero_grad(set_to_none=True)
                raise StopRequestedError("asked to stop while waiting for a batch")
            if self._may_train(total.versions):
                return self._finish(mine, total, weight_sum)
            self.drafter.zero_grad(set_to_none=True)
            given_up = bool(micros) and not self._go_back(micros[0].position)
        raise TargetChangedError(
            f"the target changed {MAX_MADE_AGAIN} times within step {step}; swap less often, and all servers together"
        )

    def _accumulate(
        self,
        step: int,
        prepared: Sequence[PreparedMicroBatch],
        weight_sum: float,
        *,
        passes: int,
        simulate: bool,
        given_up: bool,
    ) -> _Pass:
        """Forward and backward of this rank's micro-batches, each with its own version's head; sums gradients.

        A rank that has nothing to train, or that gives the step up, takes part in the others' exchanges all the same.
        """
        sums = StepSums(block_size=self._settings.block_size, given_up=given_up)
        accept_len = None
        versions: list[Version] = []
        culprits: list[Culprit] = []
        simulated = self._simulated_drafter() if simulate and passes else None
        for number in range(passes):
            with contextlib.ExitStack() as stack:
                fed = None if sums.given_up or number >= len(prepared) else self._take(stack)
                stack.enter_context(self.shared.accumulating(last=number == passes - 1))
                if fed is None:
                    sums.given_up |= number < len(prepared)
                    self.shared.idle_pass()
                    continue
                item = prepared[number]
                versions.append(fed.batch.target_version)
                if simulated is not None and number == 0 and fed.finite:
                    accept_len = self._simulate(simulated, fed)
                output = self._forward_backward(fed, item, weight_sum)
                kind = sums.add(fed, output, self.shared.gradient_size())
                if kind is not None:
                    bad = self._describe(step, fed, item, output, weight_sum, kind)
                    culprits.append(bad.culprit)
                    self._on_bad(bad)
        sums.wait_s = self._feed.take_wait_s()
        sums.asked_again = self._feed.take_asked_again()
        return _Pass(sums, accept_len, tuple(versions), tuple(culprits))

    def _take(self, stack: contextlib.ExitStack) -> FedBatch | None:
        """The next batch, valid until the stack ends; None when a stop was asked for and it doesn't come."""
        try:
            return stack.enter_context(self._feed.next_batch())
        except StopRequestedError:
            return None

    def _go_back(self, position: int) -> bool:
        """Has the step's batches made again; False when a stop was asked for and what is on the way doesn't come."""
        try:
            self._feed.go_back(position)
        except StopRequestedError:
            return False
        return True

    def _finish(self, mine: _Pass, total: StepSums, weight_sum: float) -> StepOutcome:
        """Updates, or leaves the step out."""
        outcome = dataclasses.replace(
            self._update(total, weight_sum, mine.accept_len),
            versions=mine.versions,
            parts_s=self.drafter.stopwatch.take(),
        )
        if not outcome.bad:
            return outcome
        # Every rank knows by now that the step is bad, so all take part in this.
        outcome = dataclasses.replace(outcome, culprits=self._everyones(mine.culprits))
        if outcome.culprits and self.shared.is_sharded:
            weights = whole(self.drafter.state_dict(), keep=bool(mine.culprits))
            if mine.culprits:
                self._on_bad_weights(weights)
        return outcome

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
