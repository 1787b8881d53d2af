"""The training loop: where a step becomes a record, a checkpoint, or the end of the run.

Owns how steps map to plan positions and when to save and stop. All ranks take the same number of steps; a step that was
left out still consumes its positions. Whatever is raised, the state that is saved is that of a whole step.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from drafter_trainer.errors import NonFiniteError
from drafter_trainer.feed import Feed
from drafter_trainer.following import Follower
from drafter_trainer.guard import StepGuard
from drafter_trainer.metrics import StepMetrics
from drafter_trainer.parallel import Ranks
from drafter_trainer.signals import StopRequestedError
from drafter_trainer.step import StepEngine
from drafter_trainer.step_records import StepOutcome
from drafter_trainer.types import MicroBatch, Version

__all__ = ["LoopSettings", "Progress", "TrainLoop", "Watcher"]

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Progress:
    """Where a run is. The position follows from the step, except at the end of a partial last step."""

    step: int = 0
    position: int = 0
    tokens: int = 0


class Watcher(Protocol):
    """Told after each step, on every rank, from the training thread."""

    def step_done(
        self, progress: Progress, batches: Sequence[tuple[MicroBatch, Version]], metrics: StepMetrics
    ) -> None:
        """A step is done; ``batches`` are this rank's, each with the target version that it was trained on."""

    def checkpoint(self, progress: Progress) -> None:
        """The state must be saved now."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How long, and what happens when."""

    total_steps: int
    stop_position: int
    """Plan position at which the run ends; the last step may be partial."""
    micro_batches_per_step: int
    """Over all ranks."""
    checkpoint_every_steps: int
    simulate_every_steps: int
    sharded: bool = False
    """Whether a checkpoint needs all ranks."""


class TrainLoop:
    """Walks the steps of a run.

    Args:
        engine: One step's arithmetic.
        feed: This rank's batches, the engine's.
        guard: Counts steps left out.
        follower: Knows the target's versions.
        ranks: Whom to agree with when to stop.
        watcher: Records and saves.
        settings: How long.
    """

    def __init__(
        self,
        engine: StepEngine,
        *,
        feed: Feed,
        guard: StepGuard,
        follower: Follower,
        ranks: Ranks,
        watcher: Watcher,
        settings: LoopSettings,
    ) -> None:
        self._engine = engine
        self._feed = feed
        self._guard = guard
        self._follower = follower
        self._ranks = ranks
        self._watcher = watcher
        self._settings = settings

    def run(self, progress: Progress, *, should_stop: Callable[[], bool]) -> bool:
        """Trains from ``progress`` to the end, or until some rank should stop; checkpoints either way.

        An error on the way is raised after a checkpoint of the last whole step, when there is one to save and this rank
        can save it alone, or all ranks are at the same place.

        Returns:
            Whether the run is finished.
        """
        saved_step = progress.step
        together = False
        try:
            while progress.step < self._settings.total_steps:
                self._step(progress)
                self._guard.check()
                if progress.step % self._settings.checkpoint_every_steps == 0:
                    self._watcher.checkpoint(progress)
                    saved_step = progress.step
                if self._ranks.sum(float(should_stop())) > 0:
                    break
            together = True
        except NonFiniteError:
            together = True  # all ranks come to it after the same step
            raise
        except StopRequestedError as stop:
            together = True  # an engine raises it on all of them
            logger.warning("%s: the step after %d is given up", stop, progress.step)
        finally:
            # Weights only change in the last act of a step, so they are those of `progress` whatever was raised.
            # Sharded ones are saved by all ranks together, and after an error there's no knowing where the others are.
            if progress.step != saved_step and (together or not self._settings.sharded):
                self._watcher.checkpoint(progress)
        return progress.step >= self._settings.total_steps

    def _step(self, progress: Progress) -> None:
        started_s = time.monotonic()
        step = progress.step + 1
        stop = min(progress.position + self._settings.micro_batches_per_step, self._settings.stop_position)
        micros = [m for m in self._feed.upcoming(self._settings.micro_batches_per_step) if m.position < stop]
        outcome = self._engine.step(step, micros, simulate=self._simulates(step))
        positions = range(progress.position, stop)
        self._judge(outcome, step, positions)
        self._follower.trained(step, positions, outcome.sums.versions, asked_again=outcome.sums.asked_again)
        progress.step, progress.position = step, stop
        progress.tokens += outcome.sums.tokens
        metrics = step_metrics(progress, outcome, step_s=time.monotonic() - started_s, skipped=self._guard.skipped)
        self._watcher.step_done(progress, list(zip(micros, outcome.versions, strict=True)), metrics)

    def _simulates(self, step: int) -> bool:
        return step == 1 or step % self._settings.simulate_every_steps == 0

    def _judge(self, outcome: StepOutcome, step: int, positions: range) -> None:
        if outcome.bad:
            self._guard.bad(step=step, positions=positions, reason=outcome.bad, culprits=outcome.culprits)
        else:
            self._guard.good(step=step, loss=outcome.loss if outcome.weight_sum else None)


def step_metrics(progress: Progress, outcome: StepOutcome, *, step_s: float, skipped: int) -> StepMetrics:
    """A step's record, as of after the step."""
    sums = outcome.sums
    return StepMetrics(
        step=progress.step,
        epoch=sums.epoch,
        position=progress.position,
        loss=finite_or_none(outcome.loss) if outcome.weight_sum else None,
        lr=outcome.lr,
        grad_norm=finite_or_none(outcome.grad_norm),
        tokens=sums.tokens,
        accept_len=outcome.accept_len,
        prefix_len=sums.prefix / sums.blocks if sums.blocks else None,
        acc_at=[right / of if of else None for right, of in zip(sums.correct, sums.valid, strict=True)],
        target_versions=sorted({version.number for version in sums.versions}),
        asked_again=sums.asked_again,
        wait_s=sums.wait_s,
        step_s=step_s,
        skipped=skipped,
        parts_s=None if outcome.parts_s is None else {"wait": sums.wait_s, **outcome.parts_s},
    )


def finite_or_none(value: float) -> float | None:
    """The value, or None for what JSON can't say."""
    return value if value - value == 0 else None
