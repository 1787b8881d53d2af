"""Which evaluation each figure of the last line is from."""

from __future__ import annotations

from typing import Any

import pytest

from demo.report import build_outcome, print_table

METRICS = [{"step": step, "tokens": 100, "step_s": 0.5} for step in (1, 2, 3)]


def _evaluation(scale: float, *, prompts: int, identical: int, ties: int) -> dict[str, Any]:
    return {
        "accept_len": 1.5 * scale,
        "accept_len_macro": 1.6 * scale,
        "accept_len_simulated": 1.7 * scale,
        "prompts": prompts,
        "identical": identical,
        "ties": ties,
        "mismatches": prompts - identical - ties,
        "tok_s_plain": 10.0 * scale,
        "tok_s_speculative": 14.0 * scale,
    }


EVALUATIONS = {
    "fp32": _evaluation(1.0, prompts=42, identical=42, ties=0),
    "bf16": _evaluation(2.0, prompts=12, identical=9, ties=2),
}


def test_figures_are_taken_from_the_right_evaluation() -> None:
    outcome = build_outcome(EVALUATIONS, METRICS, train_dtype="fp32", minutes=2.0, train_minutes=1.0)
    assert (outcome.accept_len, outcome.prompts, outcome.ties) == (3.0, 12, 2)
    assert (outcome.tok_s_plain, outcome.tok_s_speculative) == (20.0, 28.0)
    assert (outcome.accept_len_fp32, outcome.identical, outcome.prompts_fp32) == (1.5, 42, 42)
    assert (outcome.tok_s_plain_fp32, outcome.tok_s_speculative_fp32) == (10.0, 14.0)
    assert outcome.train_dtype == "fp32"


def test_a_speed_that_was_not_timed_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    untimed = {**EVALUATIONS["fp32"], "tok_s_plain": None, "tok_s_speculative": None}
    outcome = build_outcome(
        {**EVALUATIONS, "fp32": untimed}, METRICS, train_dtype="bf16", minutes=2.0, train_minutes=1.0
    )
    print_table(outcome, title="Test")
    assert capsys.readouterr().out.count("not timed") == 2


def test_a_difference_without_a_tie_is_an_error() -> None:
    assert build_outcome(EVALUATIONS, METRICS, train_dtype="fp32", minutes=2.0, train_minutes=1.0).errors == 1


def test_training_is_summed_over_steps() -> None:
    outcome = build_outcome(EVALUATIONS, METRICS, train_dtype="fp32", minutes=2.0, train_minutes=1.0)
    assert (outcome.steps, outcome.tokens_trained, outcome.tok_s_trained) == (3, 300, 200.0)


def test_table_shows_the_speed_up(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(build_outcome(EVALUATIONS, METRICS, train_dtype="fp32", minutes=2.0, train_minutes=1.0), title="Test")
    shown = capsys.readouterr().out
    assert "14.0 tok/s (1.40 x)" in shown
    assert "28.0 tok/s (1.40 x)" in shown
    assert "42 of 42" in shown
