"""The loop's bookkeeping: what is saved when a run gives up, and that a resumed run counts on from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from drafter_trainer.errors import NonFiniteError
from drafter_trainer.following import Follower, Span
from drafter_trainer.guard import StepGuard
from drafter_trainer.parallel import Ranks
from drafter_trainer.step_records import StepOutcome
from drafter_trainer.tally import StepSums
from drafter_trainer.trainer import LoopSettings, Progress, TrainLoop
from drafter_trainer.types import MicroBatch, Version

SETTINGS = LoopSettings(
    total_steps=6, stop_position=6, micro_batches_per_step=1, checkpoint_every_steps=100, simulate_every_steps=100
)
BAD_STEPS = (2, 3)


class Feed:
    """Micro-batches of one token, by position."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def upcoming(self, count: int) -> list[MicroBatch]:
        ids, mask = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
        return [MicroBatch(self._progress.position + i, 0, (i,), (1,), ids, mask) for i in range(count)]


class Engine:
    """Makes every step but the bad ones."""

    def step(self, step: int, micros: list[MicroBatch], *, simulate: bool) -> StepOutcome:
        bad = "its loss is nan" if step in BAD_STEPS else ""
        sums = StepSums(block_size=2, tokens=1)
        return StepOutcome(
            sums=sums, loss=1.0, weight_sum=1.0, grad_norm=1.0, lr=1.0, bad=bad, accept_len=None, versions=(V1,)
        )


V1 = Version(1, "d")


class Watcher:
    """Keeps what a checkpoint would hold of the counters."""

    def __init__(self, guard: StepGuard) -> None:
        self._guard = guard
        self.positions: list[int] = []
        self.skipped: list[int] = []
        self.saved: tuple[Progress, Mapping[str, int]] | None = None

    def step_done(self, progress: Progress, batches: Any, metrics: Any) -> None:
        self.positions += [micro.position for micro, _ in batches]
        self.skipped.append(metrics.skipped)

    def checkpoint(self, progress: Progress) -> None:
        self.saved = Progress(progress.step, progress.position, progress.tokens), dict(self._guard.counters)


def run(progress: Progress, counters: Mapping[str, int]) -> tuple[Watcher, NonFiniteError | None]:
    guard = StepGuard(max_in_a_row=2, counters=counters)
    watcher = Watcher(guard)
    loop = TrainLoop(
        Engine(),  # type: ignore[arg-type]
        feed=Feed(progress),  # type: ignore[arg-type]
        guard=guard,
        follower=Follower([Span(V1, 0, 0)], on_change="follow", window=1, say=False),
        ranks=Ranks(),
        watcher=watcher,
        settings=SETTINGS,
    )
    try:
        loop.run(progress, should_stop=lambda: False)
    except NonFiniteError as error:
        return watcher, error
    return watcher, None


def test_a_step_that_ends_the_run_is_counted_once_by_the_run_that_goes_on() -> None:  # I1, I4, case 12
    first, error = run(Progress(), {})
    assert error is not None
    assert "2 steps in a row were left out, the last at step 3" in str(error)
    assert first.saved is not None
    progress, counters = first.saved
    assert (progress.step, counters["skipped"]) == (3, len(BAD_STEPS))
    assert first.skipped == [0, 1, 2]
    second, error = run(progress, counters)
    assert error is None
    assert first.positions + second.positions == list(range(SETTINGS.total_steps))
    assert second.skipped == [2, 2, 2]


def test_a_run_that_goes_on_and_is_bad_again_at_once_ends_again() -> None:
    """The row goes on across the interruption: a target that is still broken must not cost a whole row each time."""
    _, error = run(Progress(2, 2), {"skipped": 2, "skipped_in_a_row": 2})
    assert error is not None
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        raise error
