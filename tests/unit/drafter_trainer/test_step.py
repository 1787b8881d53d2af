"""One step's arithmetic: normalisation, partition of work, and what must not change when something isn't finite."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from drafter_trainer.feed import FedBatch
from drafter_trainer.types import MicroBatch, TrainBatch, Version
from drafter_trainer.walk import SIMULATED_TOKENS, simulated_part
from tests.support.step_engine import assert_equal, fed_batch, micro_batch, run_step, state_of


def test_the_same_documents_in_one_or_several_micro_batches_give_the_same_step() -> None:
    """The loss is normalised over the step, not over micro-batches of unequal supervision."""
    lengths = (9, 14, 21)
    whole = micro_batch(0, lengths)
    starts = [0, 9, 23]
    features = fed_batch(whole).batch.features_TC
    parts = []
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        rows = slice(start, start + length)
        part = MicroBatch(
            index, 0, (whole.sample_ids[index],), (length,), whole.input_ids_T[rows], whole.loss_mask_T[rows]
        )
        parts.append(FedBatch(TrainBatch(part, features[rows], Version(1, "d"), 0), True))
    one, engine_one = run_step([fed_batch(whole)])
    several, engine_several = run_step(parts)
    assert several.loss == pytest.approx(one.loss, rel=1e-6)
    assert several.weight_sum == pytest.approx(one.weight_sum)
    assert several.sums.correct == one.sums.correct
    for name, tensor in engine_one.drafter.state_dict().items():
        torch.testing.assert_close(engine_several.drafter.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)


BAD = {
    "a batch marked as not finite": lambda: fed_batch(micro_batch(1, (12,)), finite=False),
    "features that overflow": lambda: fed_batch(micro_batch(1, (12,)), scale=float("inf")),
    "features that are NaN": lambda: fed_batch(micro_batch(1, (12,)), scale=float("nan")),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD.keys())
def test_a_step_with_something_not_finite_changes_nothing(make: Any) -> None:  # I4, cases 7, 8, 12
    _, engine = run_step([fed_batch(micro_batch(0, (12, 8)))])
    before = state_of(engine)
    outcome, _ = run_step([fed_batch(micro_batch(2, (15,))), make()], engine=engine, step=2)
    assert outcome.bad
    assert [(c.position, c.kind, c.sample_ids) for c in outcome.culprits] == [(1, "features", (10,))]
    after = state_of(engine)
    for counter in ("skipped_count", "skipped_in_a_row"):  # the optimizer counts what it refuses itself
        before["optimizer"].pop(counter, None)
        after["optimizer"].pop(counter, None)
    assert_equal(after, before)
    assert all(p.grad is None for p in engine.drafter.parameters())
    good, _ = run_step([fed_batch(micro_batch(3, (15,)))], engine=engine, step=3)
    assert not good.bad


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:  # case 8
    _, engine = run_step([fed_batch(micro_batch(0, (12, 8)))])
    before = state_of(engine)
    hook = next(iter(engine.drafter.parameters())).register_hook(lambda grad: grad * float("inf"))
    outcome, _ = run_step([fed_batch(micro_batch(1, (12, 8)))], engine=engine, step=2)
    hook.remove()
    assert "gradient" in outcome.bad
    assert [culprit.kind for culprit in outcome.culprits] == ["gradient"]
    after = state_of(engine)
    assert_equal(after["model"], before["model"])
    assert_equal(after["optimizer"]["optimizers"], before["optimizer"]["optimizers"])
    assert after["optimizer"]["step_count"] == before["optimizer"]["step_count"]


def test_a_step_with_nothing_to_supervise_changes_nothing_and_is_not_bad() -> None:  # cases 1, 2
    _, engine = run_step([fed_batch(micro_batch(0, (12, 8)))])
    before = state_of(engine)
    outcome, _ = run_step([fed_batch(micro_batch(1, (12, 1), supervised=0.0))], engine=engine, step=2)
    assert (outcome.bad, outcome.weight_sum, outcome.loss) == ("", 0.0, 0.0)
    assert_equal(state_of(engine), before)


def test_a_rank_without_a_micro_batch_still_steps() -> None:  # case 70
    outcome, _ = run_step([])
    assert (outcome.sums.tokens, outcome.weight_sum, outcome.bad) == (0, 0.0, "")


def test_unsupervised_micro_batches_do_not_dilute_the_others() -> None:  # cases 1, 2, 71
    alone, _ = run_step([fed_batch(micro_batch(0, (12, 8)))])
    beside, _ = run_step([fed_batch(micro_batch(0, (12, 8))), fed_batch(micro_batch(1, (9, 1), supervised=0.0))])
    assert beside.loss == alone.loss
    assert beside.grad_norm == alone.grad_norm


def test_a_step_repeats_bit_for_bit() -> None:  # I6
    results = [run_step([fed_batch(micro_batch(0, (12, 8))), fed_batch(micro_batch(1, (30,)))]) for _ in range(2)]
    assert results[0][0] == results[1][0]
    assert_equal(state_of(results[0][1]), state_of(results[1][1]))


def test_the_simulation_sees_few_documents_and_the_start_of_each_answer() -> None:
    micro = dataclasses.replace(micro_batch(0, (200,) * 6), loss_mask_T=torch.ones(1200, dtype=torch.bool))
    part = simulated_part(fed_batch(micro).batch)
    assert part.micro.lengths == (200,) * 4
    assert part.features_TC.shape[0] == part.micro.input_ids_T.numel() == 800
    assert part.micro.loss_mask_T.sum() == 4 * SIMULATED_TOKENS
