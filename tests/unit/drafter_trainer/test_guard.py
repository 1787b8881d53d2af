"""Counting steps that were left out."""

from __future__ import annotations

import pytest

from drafter_trainer.errors import NonFiniteError
from drafter_trainer.guard import StepGuard, bad_step_reason


def test_bad_steps_in_a_row_end_the_run_and_a_good_one_starts_the_row_anew() -> None:  # cases 8, 12
    guard = StepGuard(max_in_a_row=2)
    guard.bad(step=1, positions=range(4), reason="its loss is nan")
    guard.good()
    guard.bad(step=3, positions=range(8, 12), reason="its loss is nan")
    with pytest.raises(NonFiniteError, match=r"2 steps in a row.*step 4 \(plan positions 12 to 15\): its loss is nan"):
        guard.bad(step=4, positions=range(12, 16), reason="its loss is nan")
    assert guard.skipped == 3


def test_a_resumed_run_counts_on() -> None:
    guard = StepGuard(max_in_a_row=3, skipped=7, in_a_row=2)
    with pytest.raises(NonFiniteError):
        guard.bad(step=9, positions=[9], reason="its loss is nan")
    assert guard.skipped == 8


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"bad_batches": 1}, "not finite"),
        ({"loss": float("nan")}, "loss is nan"),
        ({"grad_norm": float("inf")}, "gradient norm is inf"),
        ({}, ""),
    ],
)
def test_the_reason_names_what_was_not_finite(facts: dict[str, float], part: str) -> None:
    values = {"bad_batches": 0, "loss": 1.0, "grad_norm": 1.0, **facts}
    reason = bad_step_reason(**values)  # type: ignore[arg-type]
    assert part in reason
    assert bool(reason) == bool(facts)
