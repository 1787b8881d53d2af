"""Every form computes the same product; the table chooses, remembers and shares."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drafter_trainer.linear_forms import NATIVE, forms_for, packs_half
from drafter_trainer.skinny import MANY_ROWS, LinearForms, SkinnyLinear

DTYPES = [torch.float32, torch.bfloat16]
needs_packing = pytest.mark.skipif(not packs_half(), reason="this CPU or torch build has no FBGEMM")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_equals_the_native_product(dtype: torch.dtype, rows: int, bias: bool) -> None:
    weight, x = torch.randn(48, 32).to(dtype), torch.randn(rows, 32).to(dtype)
    b = torch.randn(48).to(dtype) if bias else None
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    one_rounding = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-4, "rtol": 2**-8}
    names = set()
    for form in forms_for(dtype, rows):
        output = form.run(x, weight if form.prepare is None else form.prepare(weight), b)
        assert output.dtype == dtype
        assert output.is_contiguous()
        torch.testing.assert_close(output.double(), exact, **one_rounding)
        names.add(form.name)
    assert "transposed" in names
    assert ("packed-half" in names) == (packs_half() and dtype != torch.float32)
    assert ("padded" in names) == (rows in (3, 7))


def _chosen(weight: torch.Tensor, rows: int, name: str) -> LinearForms:
    form = next(f for f in forms_for(weight.dtype, rows) if f.name == name)
    return LinearForms({(*weight.shape, weight.dtype, rows): form})


@needs_packing
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_packing_loses_nothing_at_any_scale(size: float) -> None:
    """Float16 has few exponents; weights of any size, and small ones beside large, keep their bits all the same."""
    form = next(f for f in forms_for(torch.bfloat16, 4) if f.name == "packed-half")
    signs = torch.randn(48, 32).sign()
    weight = ((1 + torch.rand(48, 32)) * signs * torch.logspace(-8, 0, 32) * size).bfloat16()
    x = torch.eye(32).bfloat16()  # each output is one weight
    assert torch.equal(form.run(x, form.prepare(weight), None), weight.t())  # type: ignore[misc]


@needs_packing
def test_a_weight_of_zeros_is_packed() -> None:
    form = next(f for f in forms_for(torch.float16, 2) if f.name == "packed-half")
    weight = torch.zeros(8, 4, dtype=torch.float16)
    assert torch.equal(form.run(torch.ones(2, 4).half(), form.prepare(weight), None), torch.zeros(2, 8).half())  # type: ignore[misc]


@pytest.mark.parametrize(
    "name",
    [
        "native",
        "transposed",
        "padded",
        "upcast",
        "upcast-transposed",
        "upcast-padded",
        pytest.param("packed-half", marks=needs_packing),
    ],
)
def test_leading_dimensions_are_kept(name: str) -> None:
    weight, x = torch.randn(24, 16).bfloat16(), torch.randn(1, 3, 16).bfloat16()
    output = _chosen(weight, 3, name).linear(x, weight)
    assert output.shape == (1, 3, 24)
    torch.testing.assert_close(output, F.linear(x, weight), atol=0.02, rtol=0.02)


def test_measured_choice_is_kept() -> None:
    forms, weights = LinearForms(), [torch.randn(64, 32) for _ in range(3)]
    forms.measure(weights, [1, 4])
    first = dict(forms.chosen)
    assert set(first) == {(64, 32, torch.float32, 1), (64, 32, torch.float32, 4)}
    forms.measure(weights, [1, 4])
    assert forms.chosen == first


def test_unmeasured_rows_run_natively() -> None:
    forms, weight = LinearForms(), torch.randn(8, 4)
    forms.measure([weight], [2])
    assert forms.form(weight, 3) is NATIVE
    assert forms.form(weight, 100) is NATIVE


def test_a_prompts_many_rows_share_one_choice() -> None:
    forms, weight = LinearForms(), torch.randn(8, 4)
    forms.measure([weight], [100])
    assert set(forms.chosen) == {(8, 4, torch.float32, MANY_ROWS)}
    assert forms.form(weight, 17) is forms.form(weight, 500) is forms.chosen[8, 4, torch.float32, MANY_ROWS]
    assert forms.form(weight, 16) is NATIVE


def test_a_copy_is_made_once_per_weight() -> None:
    weight, other = torch.randn(24, 16).bfloat16(), torch.randn(24, 16).bfloat16()
    forms = _chosen(weight, 2, "upcast")
    form = forms.form(weight, 2)
    assert forms.weight_for(form, weight).data_ptr() == forms.weight_for(form, weight).data_ptr()
    assert torch.equal(forms.weight_for(form, other), other.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_installed_model_computes_the_same_and_is_restored(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 8, bias=False)).to(dtype).eval()
    x = torch.randn(1, 4, 16).to(dtype)
    with torch.inference_mode():
        expected = model(x)
        with SkinnyLinear(model, LinearForms(), rows=[4]):
            assert "forward" in vars(model[0])
            torch.testing.assert_close(model(x), expected, atol=0.02, rtol=0.02)
        assert "forward" not in vars(model[0])
        assert torch.equal(model(x), expected)


def test_gradients_flow_as_ever_while_installed() -> None:
    model = nn.Linear(4, 3)
    with SkinnyLinear(model, LinearForms(), rows=[2]):
        model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
