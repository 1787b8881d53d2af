"""Counting steps that were left out, what is said about them, and unusual losses."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from drafter_trainer.errors import NonFiniteError
from drafter_trainer.guard import StepGuard, bad_step_reason, diagnosis
from drafter_trainer.tally import Culprit


def culprit(**changes: Any) -> Culprit:
    values: dict[str, Any] = {
        "rank": 1,
        "position": 13,
        "sample_ids": (5, 6),
        "replica_index": 2,
        "version": 3,
        "kind": "loss",
        "detail": "its loss is nan",
    }
    return Culprit(**{**values, **changes})


def test_bad_steps_in_a_row_end_the_run_and_a_good_one_starts_the_row_anew() -> None:  # cases 8, 12
    guard = StepGuard(max_in_a_row=2)
    guard.bad(step=1, positions=range(4), reason="its loss is nan")
    guard.good(step=2, loss=1.0)
    guard.bad(step=3, positions=range(8, 12), reason="its loss is nan")
    guard.check()
    guard.bad(step=4, positions=range(12, 16), reason="its loss is nan", culprits=[culprit()])
    with pytest.raises(NonFiniteError, match=r"2 steps in a row.*step 4 \(plan positions 12 to 15\): its loss is nan"):
        guard.check()
    assert guard.skipped == 3
    assert guard.by_kind == {"features": 0, "loss": 1, "gradient": 0}


def test_a_bad_step_names_samples_replica_and_version(caplog: pytest.LogCaptureFixture) -> None:  # case 12
    guard = StepGuard(max_in_a_row=2)
    with caplog.at_level(logging.WARNING):
        guard.bad(step=4, positions=range(12, 16), reason="its loss is nan", culprits=[culprit()])
    assert "plan position 13 (samples 5, 6; rank 1, replica 2, target version 3): its loss is nan" in caplog.text


def test_a_resumed_run_counts_on() -> None:
    guard = StepGuard(max_in_a_row=9)
    for step in range(2):
        guard.bad(step=step, positions=[9], reason="r", culprits=[culprit(kind="gradient")])
    resumed = StepGuard(max_in_a_row=3, counters=guard.counters)
    resumed.check()
    resumed.bad(step=9, positions=[9], reason="its loss is nan", culprits=[culprit()])
    with pytest.raises(NonFiniteError):
        resumed.check()
    assert (resumed.skipped, resumed.by_kind) == (3, {"features": 0, "loss": 1, "gradient": 2})


@pytest.mark.parametrize(
    ("culprits", "part"),
    [
        ([culprit(kind="features")] * 2, "all from replica 2, target version 3: the target makes them"),
        ([culprit(kind="features"), culprit(kind="features", replica_index=0)], "from replicas 0, 2"),
        ([culprit(), culprit(sample_ids=(6, 9))], "Each held sample 6: look at it"),
        ([culprit(), culprit(sample_ids=(8, 9))], "it's the drafter"),
        ([], "it's the drafter"),
    ],
)
def test_the_diagnosis_is_what_they_have_in_common(culprits: list[Culprit], part: str) -> None:
    assert part in diagnosis(culprits)


def test_a_loss_far_above_the_running_median_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    guard = StepGuard(max_in_a_row=2, spike_factor=2.0)
    spikes = [guard.good(step=step, loss=2.0 + 0.1 * (step % 3)) for step in range(40)]
    assert not any(spikes)
    with caplog.at_level(logging.WARNING):
        assert guard.good(step=40, loss=5.0)
    assert "the loss of step 40 is 5.000, 2.4 times the median 2.100" in caplog.text
    assert not guard.good(step=41, loss=4.0)  # the median did not move
    assert not guard.good(step=42, loss=None)
    assert guard.counters["loss_spikes"] == 1


def test_the_first_steps_are_no_measure_of_what_is_usual() -> None:
    guard = StepGuard(max_in_a_row=2, spike_factor=2.0)
    assert not any(guard.good(step=step, loss=1.0 * 3**step) for step in range(10))


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"bad": {"features": 1}}, "not finite"),
        ({"bad": {"gradient": 2}}, "the gradient of 2 of its batches"),
        ({"loss": float("nan")}, "loss is nan"),
        ({"grad_norm": float("inf")}, "gradient norm is inf"),
        ({}, ""),
    ],
)
def test_the_reason_names_what_was_not_finite(facts: dict[str, Any], part: str) -> None:
    values: dict[str, Any] = {"bad": {}, "loss": 1.0, "grad_norm": 1.0, **facts}
    reason = bad_step_reason(**values)
    assert part in reason
    assert bool(reason) == bool(facts)
