"""A step whose batches were made by several versions of the target: whose head, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest

from drafter_trainer.errors import TargetChangedError
from drafter_trainer.feed import FedBatch
from drafter_trainer.head import TargetHead
from drafter_trainer.optim import OptimSettings, build_optimizer
from drafter_trainer.parallel import Ranks, SharedDrafter
from drafter_trainer.step import StepEngine
from drafter_trainer.types import Version
from tests.support.drafters import random_drafter, random_head
from tests.support.step_engine import (
    CONFIG,
    OTHER,
    SERVED,
    SETTINGS,
    Batches,
    assert_equal,
    fed_batch,
    micro_batch,
    state_of,
)


class Rewinding(Batches):
    """A feed in which the target changes within the step: each pass gets other versions of its batches."""

    def __init__(self, passes: list[list[FedBatch]]) -> None:
        super().__init__(passes[0])
        self._passes = passes
        self.back_to: list[int] = []

    def go_back(self, position: int) -> None:
        self.back_to.append(position)
        self._batches = iter(self._passes[min(len(self.back_to), len(self._passes) - 1)])


class HeadByVersion:
    def __init__(self) -> None:
        self.values = {SERVED: random_head(), OTHER: random_head(seed=9)}

    def head(self, version: Version) -> TargetHead:
        return self.values[version]


def engine_over(feed: Batches, **options: Any) -> StepEngine:
    drafter = random_drafter(CONFIG)
    optimizer = build_optimizer(drafter, OptimSettings(lr=1e-3, total_steps=10, max_grad_norm=None))
    return StepEngine(
        SharedDrafter(drafter, Ranks()),
        optimizer=optimizer,
        feed=feed,  # type: ignore[arg-type]
        heads=HeadByVersion(),
        settings=SETTINGS,
        **options,
    )


def test_each_batch_of_a_step_is_trained_with_its_own_versions_head() -> None:  # I3, case 107
    first, second = micro_batch(0, (12, 8)), micro_batch(1, (9,))
    mixed = engine_over(Batches([fed_batch(first), fed_batch(second, version=OTHER)]))
    outcome = mixed.step(1, [first, second], simulate=False)
    assert outcome.versions == (SERVED, OTHER)
    assert outcome.sums.versions == {SERVED: 1, OTHER: 1}
    # The sum of what each gives alone, with its head.
    losses = []
    for micro, version in ((first, SERVED), (second, OTHER)):
        alone = engine_over(Batches([fed_batch(micro, version=version)])).step(1, [micro], simulate=False)
        losses.append(alone.loss * alone.weight_sum)
    assert outcome.loss * outcome.weight_sum == pytest.approx(sum(losses), rel=1e-6)
    same_head = engine_over(Batches([fed_batch(first), fed_batch(second)])).step(1, [first, second], simulate=False)
    assert same_head.loss != pytest.approx(outcome.loss, rel=1e-3)


def test_a_step_that_may_not_be_made_is_made_again_as_if_only_once() -> None:  # I3, I6
    micros = [micro_batch(0, (12, 8)), micro_batch(1, (9,))]
    after = [fed_batch(micro, version=OTHER) for micro in micros]
    feed = Rewinding([[fed_batch(micros[0]), after[1]], after])
    engine = engine_over(feed, may_train=lambda counts: len(counts) == 1)
    outcome = engine.step(1, micros, simulate=True)
    assert feed.back_to == [0]
    once = engine_over(Batches(after))
    assert once.step(1, micros, simulate=True) == outcome
    assert_equal(state_of(engine), state_of(once))


def test_a_target_that_changes_faster_than_a_step_ends_the_run() -> None:  # I7
    micros = [micro_batch(0, (12, 8))]
    engine = engine_over(Rewinding([[fed_batch(micros[0])]]), may_train=lambda counts: False)
    with pytest.raises(TargetChangedError, match="8 times within step 3"):
        engine.step(3, micros, simulate=False)
    assert all(p.grad is None for p in engine.drafter.parameters())
