"""Which side waits, in words, and where a step's time goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafter_trainer.bottleneck import Bottleneck
from drafter_trainer.stopwatch import Stopwatch
from tests.support.step_engine import fed_batch, micro_batch, run_step


def line(*, wait_s: float, parts_s: dict[str, float] | None = None, **facts: Any) -> str:
    values: dict[str, Any] = {"replicas": 5, "ranks": 3, "batches_ahead": 4, **facts}
    bottleneck = Bottleneck(**values)
    for _ in range(10):
        bottleneck.add(wait_s=wait_s, step_s=1.0, parts_s=parts_s)
    return bottleneck.line()


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"wait_s": 0.01}, "waits for the target 1% of the time, so the target waits for the trainer"),
        ({"wait_s": 0.4}, "waits for the target 40% of the time: add replicas"),
        ({"wait_s": 0.4}, "target.feature_cache_bytes"),
        ({"wait_s": 0.4, "batches_ahead": 1}, "3 windows of 1 batches can't keep 5 replicas busy: raise target.window"),
        ({"wait_s": 0.4, "parts_s": {"wait": 4.0, "forward": 3.0, "layers": 2.9}}, "most of a step is wait (57%)"),
    ],
)
def test_the_line_says_who_waits_and_what_to_change(facts: dict[str, Any], part: str) -> None:
    assert part in line(**facts)


def test_a_feature_cache_that_is_on_is_not_recommended_and_a_line_starts_anew() -> None:
    assert "feature_cache" not in line(wait_s=0.4, cached=True)
    bottleneck = Bottleneck(replicas=1, ranks=1, batches_ahead=2)
    bottleneck.add(wait_s=1.0, step_s=1.0)
    assert "100% of the time" in bottleneck.line()
    bottleneck.add(wait_s=0.0, step_s=1.0)
    assert "last 1 steps: the trainer waits for the target 0%" in bottleneck.line()


@pytest.mark.parametrize("inner", [True, False], ids=["plain", "compiled"])
def test_every_part_of_a_step_is_timed_and_inner_ones_only_without_compiling(inner: bool) -> None:
    _, engine = run_step([fed_batch(micro_batch(0, (12, 8)))])
    engine.drafter.stopwatch = Stopwatch(torch.device("cpu"), inner=inner)
    outcome, _ = run_step([fed_batch(micro_batch(1, (30,)))], engine=engine, step=2)
    outer = {"forward", "head", "loss", "backward", "optimizer"}
    assert outcome.parts_s is not None
    assert outer <= outcome.parts_s.keys()
    assert ({"fuse", "layers"} <= outcome.parts_s.keys()) == inner
    assert all(seconds > 0 for seconds in outcome.parts_s.values())
    if inner:
        assert outcome.parts_s["fuse"] + outcome.parts_s["layers"] <= outcome.parts_s["forward"] + 0.1
    assert engine.drafter.stopwatch.take() == {}


def test_without_profiling_nothing_is_timed() -> None:
    outcome, _ = run_step([fed_batch(micro_batch(0, (12, 8)))])
    assert outcome.parts_s is None
