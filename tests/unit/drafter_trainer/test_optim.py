"""Updates, schedule, clipping and the guard."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch

from drafter_trainer.model import Drafter
from drafter_trainer.optim import DrafterOptimizer, OptimSettings, build_optimizer, schedule_factor
from tests.support.drafters import random_drafter, tiny_config


def prepared(**changes: Any) -> tuple[Drafter, DrafterOptimizer]:
    drafter = random_drafter(tiny_config())
    return drafter, build_optimizer(drafter, OptimSettings(**{"total_steps": 20, "lr": 1e-2, **changes}))


def fill_gradients(drafter: Drafter, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in drafter.parameters():
        p.grad = torch.randn(p.shape, generator=generator) * scale


def snapshot(drafter: Drafter, optimizer: DrafterOptimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    return copy.deepcopy(drafter.state_dict()), copy.deepcopy(optimizer.state_dict())


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_non_finite_gradient_changes_nothing_and_is_counted(bad: float, max_grad_norm: float | None) -> None:  # 7, 8
    drafter, optimizer = prepared(max_grad_norm=max_grad_norm)
    for seed in range(3):
        fill_gradients(drafter, seed)
        assert not optimizer.step().skipped
    weights, state = snapshot(drafter, optimizer)
    rate = optimizer.lr
    for times in (1, 2):
        fill_gradients(drafter, 9)
        gradient = drafter.layers[0].input_layernorm.weight.grad
        assert gradient is not None
        gradient[3] = bad
        result = optimizer.step()
        assert result.skipped
        assert result.lr == rate
        assert (optimizer.skipped_count, optimizer.skipped_in_a_row) == (times, times)
    after_weights, after_state = snapshot(drafter, optimizer)
    assert_same(weights, after_weights)
    for key in ("optimizers", "step_count"):
        assert_same(state[key], after_state[key])
    assert optimizer.lr == rate
    assert all(p.grad is None for p in drafter.parameters())
    fill_gradients(drafter, 4)
    assert not optimizer.step().skipped
    assert (optimizer.skipped_count, optimizer.skipped_in_a_row, optimizer.step_count) == (2, 0, 4)


def test_overflowing_norm_of_finite_gradients_is_refused() -> None:  # case 8
    drafter, optimizer = prepared()
    fill_gradients(drafter, 0, scale=1e38)
    before = copy.deepcopy(drafter.state_dict())
    assert optimizer.step().skipped
    assert_same(before, drafter.state_dict())


def test_gradients_are_clipped_to_the_norm() -> None:
    updates = []
    for scale in (10.0, 1000.0):
        drafter, optimizer = prepared(eps=1.0)  # a large eps makes the update depend on the gradient's size
        before = torch.cat([p.detach().flatten().clone() for p in drafter.parameters()])
        fill_gradients(drafter, 0, scale=scale)
        assert optimizer.step().grad_norm > scale
        updates.append(torch.cat([p.detach().flatten() for p in drafter.parameters()]) - before)
    torch.testing.assert_close(updates[0], updates[1], rtol=1e-3, atol=1e-7)


def test_step_equals_plain_adamw() -> None:
    drafter, optimizer = prepared(weight_decay=0.1, max_grad_norm=None, schedule="constant", warmup_share=0.0)
    twin = random_drafter(tiny_config())
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in twin.parameters() if p.dim() == 2], "weight_decay": 0.1},
            {"params": [p for p in twin.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    for seed in range(4):
        fill_gradients(drafter, seed)
        fill_gradients(twin, seed)
        optimizer.step()
        plain.step()
    assert_same(drafter.state_dict(), twin.state_dict())


def test_resumed_state_continues_bit_for_bit() -> None:
    drafter, optimizer = prepared()
    for seed in range(3):
        fill_gradients(drafter, seed)
        optimizer.step()
    weights, state = snapshot(drafter, optimizer)
    resumed, fresh = prepared()
    resumed.load_state_dict(weights)
    fresh.load_state_dict(state)
    for seed in range(3, 6):
        for d, o in ((drafter, optimizer), (resumed, fresh)):
            fill_gradients(d, seed)
            o.step()
    assert_same(drafter.state_dict(), resumed.state_dict())
    assert optimizer.lr == fresh.lr


def factors(**changes: Any) -> list[float]:
    settings = OptimSettings(**{"total_steps": 100, "warmup_share": 0.1, **changes})
    return [schedule_factor(settings, step) for step in range(101)]


def test_warmup_rises_from_above_zero_to_the_peak() -> None:
    assert factors()[:11] == pytest.approx([i / 10 for i in range(1, 11)] + [1.0])


def test_cosine_falls_to_the_final_factor() -> None:
    values = factors(final_factor=0.1)
    assert values[55] == pytest.approx(0.55, abs=0.01)
    assert values[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(values[10:]))


def test_linear_constant_and_wsd() -> None:
    assert factors(schedule="linear")[55] == pytest.approx(0.5)
    assert set(factors(schedule="constant")[10:]) == {1.0}
    values = factors(schedule="wsd", decay_share=0.2)
    assert set(values[10:81]) == {1.0}
    assert values[90] == pytest.approx(0.5)
    assert values[100] == 0.0


def test_schedule_stays_put_beyond_the_last_step() -> None:
    settings = OptimSettings(total_steps=10, final_factor=0.2)
    assert schedule_factor(settings, 50) == pytest.approx(0.2)


def test_frozen_parameters_are_left_alone() -> None:
    drafter = random_drafter(tiny_config())
    drafter.fc.requires_grad_(False)
    optimizer = build_optimizer(drafter, OptimSettings(total_steps=5))
    before = drafter.fc.weight.clone()
    fill_gradients(drafter, 0)
    optimizer.step()
    assert torch.equal(before, drafter.fc.weight)


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_algorithms_lower_a_loss_and_resume_bit_for_bit(algorithm: str) -> None:
    def loss(drafter: Drafter) -> torch.Tensor:
        return sum((p.square().mean() for p in drafter.parameters()), torch.zeros(()))

    options = {"algorithm": algorithm, "lr": 3e-2, "warmup_share": 0.0}
    drafter, optimizer = prepared(**options)
    first = loss(drafter).item()
    for _ in range(5):
        loss(drafter).backward()
        optimizer.step()
    assert loss(drafter).item() < first
    resumed, fresh = prepared(**options)
    weights, state = snapshot(drafter, optimizer)
    resumed.load_state_dict(weights)
    fresh.load_state_dict(state)
    for d, o in ((drafter, optimizer), (resumed, fresh)):
        loss(d).backward()
        o.step()
    assert_same(drafter.state_dict(), resumed.state_dict())


def test_muon_takes_matrices_and_scales_updates_like_adamw() -> None:
    sizes = {}
    for algorithm in ("adamw", "muon"):
        drafter, optimizer = prepared(algorithm=algorithm, schedule="constant", warmup_share=0.0, max_grad_norm=None)
        before = drafter.fc.weight.clone()
        fill_gradients(drafter, 0)
        optimizer.step()
        sizes[algorithm] = (drafter.fc.weight - before).square().mean().sqrt().item()
    assert sizes["adamw"] == pytest.approx(1e-2, rel=0.01)
    assert 0.1 < sizes["muon"] / sizes["adamw"] < 0.5  # 0.2, the constant of match_rms_adamw


def test_muon_in_fp32_makes_torchs_step_to_bf16s_rounding() -> None:
    """It stands in for torch's own where bf16 is emulated; the state has torch's names and sizes."""
    steps = {}
    for dtype in (torch.float32, torch.bfloat16):
        drafter, optimizer = prepared(algorithm="muon", muon_dtype=dtype, warmup_share=0.0, weight_decay=0.1)
        before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
        for seed in range(2):
            fill_gradients(drafter, seed)
            optimizer.step()
        steps[dtype] = {name: p.detach() - before[name] for name, p in drafter.named_parameters() if p.dim() > 1}
        states = optimizer.state_dict()["optimizers"][0]["state"]
        assert {name for state in states.values() for name in state} == {"momentum_buffer"}
    for name, exact in steps[torch.float32].items():
        assert (exact - steps[torch.bfloat16][name]).norm() < 0.03 * exact.norm(), name
