"""The chunked cross-entropy against the naive one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafter_trainer import linear_cross_entropy as linear_cross_entropy_module
from drafter_trainer.linear_cross_entropy import HeadRows, linear_cross_entropy

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def naive(hidden: Tensor, head: HeadRows, label: Tensor) -> Tensor:
    z = hidden @ head.weight_VE.to(hidden.dtype).T
    if head.bias_V is not None:
        z = z + head.bias_V
    z = z * head.scale
    if head.softcap:
        z = head.softcap * torch.tanh(z / head.softcap)
    if head.log_importance_V is not None:
        z = z + head.log_importance_V
    return F.cross_entropy(z, label, reduction="none")


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"scale": 0.25},
        {"softcap": 3.0},
        {"scale": 1.7, "softcap": 2.0, "bias_V": torch.linspace(-1, 1, 41)},
        {"log_importance_V": torch.linspace(0, 3, 41)},
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
@pytest.mark.parametrize("columns", [1, 6, 20, 1024])
def test_loss_and_gradient_equal_naive(
    facts: dict[str, Any], chunk_rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_cross_entropy_module, "MIN_TILE_COLUMNS", columns)
    head = HeadRows(torch.randn(41, 12), **facts)
    hidden = torch.randn(23, 12, requires_grad=True)
    label, weight = torch.randint(0, 41, (23,)), torch.rand(23)
    ours, correct = linear_cross_entropy(hidden, head, label, chunk_rows=chunk_rows)
    expected = naive(hidden, head, label)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad((loss * weight).sum(), hidden)[0] for loss in (ours, expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)
    assert not correct.requires_grad


def test_gradient_is_exact_in_float64() -> None:
    head = HeadRows(torch.randn(9, 5, dtype=torch.float64), scale=0.8, softcap=4.0)
    hidden, label = torch.randn(6, 5, dtype=torch.float64, requires_grad=True), torch.randint(0, 9, (6,))
    assert torch.autograd.gradcheck(lambda h: linear_cross_entropy(h, head, label, chunk_rows=4)[0], hidden)


@pytest.mark.parametrize("head_dtype", DTYPES)
@pytest.mark.parametrize("hidden_dtype", DTYPES)
def test_every_pair_of_dtypes_is_near_float32(hidden_dtype: torch.dtype, head_dtype: torch.dtype) -> None:  # case 65
    weight, exact = torch.randn(300, 32), torch.randn(40, 32) * 0.5
    label = torch.randint(0, 300, (40,))
    hidden = exact.to(hidden_dtype).requires_grad_()
    ours, _ = linear_cross_entropy(hidden, HeadRows(weight.to(head_dtype)), label, chunk_rows=16)
    assert ours.dtype == torch.float32
    exact.requires_grad_()
    expected = naive(exact, HeadRows(weight), label)
    torch.testing.assert_close(ours, expected, atol=0.1, rtol=0.02)
    (gradient,) = torch.autograd.grad(ours.sum(), hidden)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), exact)
    assert gradient.dtype == hidden_dtype
    torch.testing.assert_close(gradient.float(), expected_gradient, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("head_dtype", DTYPES)
def test_gradient_near_convergence_is_exact_to_the_heads_rounding(head_dtype: torch.dtype) -> None:  # case 11
    """Where p is nearly 1, p - 1 must not be what is left of a rounded p."""
    weight = (torch.eye(6) * 4).to(head_dtype)
    logits = torch.tensor([10.0, 10.5, 11, 11.5, 12, 13])  # exact in bf16
    hidden = torch.diag(logits / 4).requires_grad_()
    label = torch.arange(6)
    ours, correct = linear_cross_entropy(hidden, HeadRows(weight), label)
    exact = hidden.detach().to(head_dtype).double().requires_grad_()
    expected = naive(exact, HeadRows(weight.double()), label)
    gradients = [torch.autograd.grad(loss.sum(), rows)[0] for loss, rows in ((ours, hidden), (expected, exact))]
    assert correct.all()
    assert expected.min() < 1e-4
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=0.02, atol=0)


@pytest.mark.parametrize("rows", [0, 1, 7, 1920, 100_000])
@pytest.mark.parametrize("vocab", [1, 97, 49_152, 248_320])
@pytest.mark.parametrize("chunk_rows", [1, 128])
def test_tiles_fit_their_room_and_use_it(rows: int, vocab: int, chunk_rows: int) -> None:
    at_once, columns = linear_cross_entropy_module._tile_shape(rows, vocab, chunk_rows)
    room = chunk_rows * vocab
    assert 1 <= at_once <= max(rows, 1)
    assert 1 <= columns <= vocab
    assert at_once * columns <= room
    assert at_once * columns >= min(rows * vocab, room) * 0.9


def test_autocast_does_not_touch_a_float32_head() -> None:
    head, hidden, label = HeadRows(torch.randn(50, 8)), torch.randn(5, 8), torch.randint(0, 50, (5,))
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = linear_cross_entropy(hidden, head, label)
    assert torch.equal(inside, linear_cross_entropy(hidden, head, label)[0])


def test_extreme_logits_stay_finite() -> None:
    hidden = (torch.eye(3) * 1e4).requires_grad_()
    head = HeadRows(torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, 0, -1]]))
    loss, correct = linear_cross_entropy(hidden, head, torch.tensor([0, 1, 3]))
    assert loss.tolist() == pytest.approx([0.0, 1e4, 1e4], abs=2.0)
    assert correct.tolist() == [True, False, False]
    assert torch.isfinite(torch.autograd.grad(loss.sum(), hidden)[0]).all()


def test_a_nan_row_gives_a_nan_loss_and_leaves_the_others() -> None:  # case 12
    hidden = torch.randn(4, 8)
    hidden[2] = float("nan")
    loss, correct = linear_cross_entropy(hidden, HeadRows(torch.randn(20, 8)), torch.zeros(4, dtype=torch.int64))
    assert torch.isnan(loss).tolist() == [False, False, True, False]
    assert not correct[2]


def test_correct_is_the_argmax() -> None:
    hidden, head = torch.randn(64, 8), HeadRows(torch.randn(5, 8))
    label = torch.randint(0, 5, (64,))
    _, correct = linear_cross_entropy(hidden, head, label, chunk_rows=10)
    assert torch.equal(correct, (hidden @ head.weight_VE.T).argmax(1) == label)


def test_no_row_at_all_still_has_a_graph() -> None:  # case 71
    hidden = torch.empty(0, 8, requires_grad=True)
    loss, _ = linear_cross_entropy(hidden, HeadRows(torch.randn(20, 8)), torch.empty(0, dtype=torch.int64))
    assert torch.autograd.grad(loss.sum(), hidden)[0].shape == (0, 8)


@pytest.mark.parametrize("columns", [50, 1024])
def test_memory_does_not_grow_with_rows(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles or twenty: no tensor of more than one tile's logits is ever made, beside the head's own."""
    monkeypatch.setattr(linear_cross_entropy_module, "MIN_TILE_COLUMNS", columns)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return out

    head = HeadRows(torch.randn(1000, 8))
    hidden = torch.randn(320, 8, requires_grad=True)
    with Watch():
        loss, _ = linear_cross_entropy(hidden, head, torch.zeros(320, dtype=torch.int64), chunk_rows=16)
        loss.sum().backward()
    assert largest == 16 * 1000
