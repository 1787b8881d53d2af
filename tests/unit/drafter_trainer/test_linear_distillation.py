"""The chunked divergences against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafter_trainer.linear_cross_entropy import HeadRows
from drafter_trainer.linear_distillation import Divergence, linear_distillation

DIVERGENCES: list[Divergence] = ["kl", "tv", "lk"]


def naive(hidden: Tensor, target: Tensor, head: HeadRows, divergence: Divergence) -> Tensor:
    def log_probabilities(rows: Tensor) -> Tensor:
        z = rows @ head.weight_VE.to(rows.dtype).T * head.scale
        if head.softcap:
            z = head.softcap * torch.tanh(z / head.softcap)
        return z.log_softmax(1)

    log_q, log_p = log_probabilities(hidden), log_probabilities(target)
    kl = (log_p.exp() * (log_p - log_q)).sum(1)
    tv = 1 - torch.minimum(log_p.exp(), log_q.exp()).sum(1)
    w = torch.exp(-3 * (1 - tv)).detach()
    return {"kl": kl, "tv": tv, "lk": w * kl + (1 - w) * tv}[divergence]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("facts", [{}, {"scale": 0.5, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_loss_and_gradient_equal_the_definition(
    divergence: Divergence, facts: dict[str, float], chunk_rows: int
) -> None:
    head = HeadRows(torch.randn(50, 8), **facts)
    hidden, target, weight = torch.randn(10, 8, requires_grad=True), torch.randn(10, 8), torch.rand(10)
    ours, alpha = linear_distillation(hidden, target, head, divergence=divergence, chunk_rows=chunk_rows)
    expected = naive(hidden, target, head, divergence)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(alpha, 1 - naive(hidden, target, head, "tv").detach(), atol=1e-5, rtol=1e-4)
    gradients = [torch.autograd.grad((loss * weight).sum(), hidden)[0] for loss in (ours, expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("distance", [1e-1, 1e-2, 1e-3])
def test_gradient_near_convergence_survives_a_bfloat16_head(distance: float) -> None:  # case 11
    """Subtracting probabilities of bf16 logits is 10 to 1000 % wrong here."""
    head = HeadRows((torch.randn(400, 64) * 0.3).bfloat16())
    target = torch.randn(32, 64)
    hidden = (target + distance * torch.randn(32, 64)).requires_grad_()
    exact = hidden.detach().double().requires_grad_()
    for divergence in ("kl", "tv"):
        loss, _ = linear_distillation(hidden, target, head, divergence=divergence)
        (ours,) = torch.autograd.grad(loss.sum(), hidden)
        # The same difference from the target as the head sees it.
        seen = target.bfloat16().double()
        expected = naive(exact - target.double() + seen, seen, HeadRows(head.weight_VE.double()), divergence)
        (gradient,) = torch.autograd.grad(expected.sum(), exact)
        assert ((ours.double() - gradient).norm() / gradient.norm()).item() < 0.02, divergence


def test_equal_rows_have_no_loss_and_no_gradient() -> None:
    head, rows = HeadRows(torch.randn(50, 8)), torch.randn(4, 8)
    for divergence in DIVERGENCES:
        hidden = rows.clone().requires_grad_()
        loss, alpha = linear_distillation(hidden, rows, head, divergence=divergence)
        assert loss.abs().max().item() < 1e-6
        assert alpha.tolist() == pytest.approx([1.0] * 4)
        assert torch.autograd.grad(loss.sum(), hidden)[0].abs().max().item() < 1e-6


def test_lk_falls_from_kl_to_tv() -> None:
    head = HeadRows(torch.randn(50, 8))
    far, near = torch.randn(6, 8) * 20, torch.randn(6, 8) * 0.01
    for hidden, target, like in ((far, far.flip(0), "kl"), (near, near.flip(0), "tv")):
        values = {d: linear_distillation(hidden, target, head, divergence=d)[0].sum().item() for d in DIVERGENCES}
        assert values["lk"] == pytest.approx(values[like], rel=0.1)


def test_no_row_at_all_still_has_a_graph() -> None:  # case 71
    hidden = torch.empty(0, 8, requires_grad=True)
    loss, _ = linear_distillation(hidden, torch.empty(0, 8), HeadRows(torch.randn(20, 8)), divergence="lk")
    assert torch.autograd.grad(loss.sum(), hidden)[0].shape == (0, 8)
