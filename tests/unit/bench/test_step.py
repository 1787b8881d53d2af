"""The step's measurement: both sides compute the same thing, and a difference is not reported as a speed."""

from __future__ import annotations

import dataclasses

import pytest

from bench import step
from bench.options import BenchError, Options
from bench.step_run import Measured, Work, measure

TINY = Work("product", sequences=2, tokens=24, anchors=4, block_size=4, vocab_size=300, threads=1)


def test_product_and_reference_have_the_same_loss_and_gradient() -> None:
    ours, reference = measure(TINY), measure(dataclasses.replace(TINY, kind="reference"))
    assert ours.loss == pytest.approx(reference.loss, rel=1e-5)
    assert ours.grad_norm == pytest.approx(reference.grad_norm, rel=1e-4)
    assert min(ours.seconds, reference.seconds) > 0


def measured(work: Work, *, loss: float = 2.0) -> Measured:
    return Measured(4.0, 800, 2.0, 1.0) if work.kind == "reference" else Measured(1.0, 200, loss, 1.0)


def test_ratios_are_taken_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_in_fresh_process", measured)
    figures = {item.name: item for item in step.run(Options())}
    assert (figures["step_speedup"].value, figures["step_speedup"].runs, figures["step_speedup"].met) == (4.0, 5, True)
    assert (figures["step_memory_ratio"].value, figures["step_memory_ratio"].met) == (0.25, True)


def test_unequal_losses_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_in_fresh_process", lambda work: measured(work, loss=2.001))
    with pytest.raises(BenchError, match="the losses differ"):
        step.run(Options())


def test_a_pass_that_dies_is_no_measurement() -> None:
    with pytest.raises(BenchError, match="ended with 1"):
        step._in_fresh_process(dataclasses.replace(TINY, kind="nothing"))  # type: ignore[arg-type]
