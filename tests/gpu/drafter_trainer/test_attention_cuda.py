"""The kernel that trains on CUDA: the same as SDPA, the chunked kernel and a loop over anchors, and compiled once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_trainer.anchors import draw_anchors
from drafter_trainer.attention import BlockLayout, Visibility, attend
from drafter_trainer.attention_flex import attend_flex
from drafter_trainer.linear_cross_entropy import HeadRows, linear_cross_entropy
from tests.support.attention_oracles import assert_equals_oracles, layout_of, random_inputs
from tests.support.drafters import layouts, random_micro

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

VISIBILITIES = st.builds(Visibility, window=st.none() | st.integers(1, 12), causal=st.booleans())


@settings(max_examples=15)
@given(layouts(), VISIBILITIES)
def test_flex_equals_all_other_ways_in_outputs_and_all_gradients(
    drawn: tuple[tuple[int, ...], list[tuple[int, int]]], visibility: Visibility
) -> None:  # cases 39, 40, 41
    layout = layout_of(*drawn, 4)
    inputs = random_inputs(layout, device="cuda")
    q, kc, vc, kb, vb = inputs
    flex = attend_flex(q, (kc, vc), (kb, vb), layout=layout, visibility=visibility)
    chunked = attend(
        q.detach().cpu(), *(tuple(t.detach().cpu() for t in kv) for kv in ((kc, vc), (kb, vb))),
        layout=layout, visibility=visibility,
    )  # fmt: skip
    torch.testing.assert_close(flex.cpu(), chunked, atol=1e-5, rtol=1e-5)
    assert_equals_oracles(flex, inputs, layout, visibility)


def test_nothing_is_compiled_after_warm_up() -> None:
    """Twenty packed micro-batches of unlike documents and anchors, forward and backward, full and sliding layers."""
    kinds = Visibility(), Visibility(window=200, causal=True)

    def run(seed: int) -> None:
        lengths = tuple(torch.randint(300, 700, (3,), generator=torch.Generator().manual_seed(seed)).tolist())
        anchors = draw_anchors(random_micro(lengths, seed=seed), num_anchors=60, seed=0)
        layout = BlockLayout.from_anchors(lengths, anchors, block_size=8)
        for visibility in kinds:
            q, kc, vc, kb, vb = random_inputs(layout, head_dim=64, device="cuda")
            attend(q, (kc, vc), (kb, vb), layout=layout, visibility=visibility).sum().backward()

    torch.compiler.reset()
    run(0)  # 1024 < tokens <= 2048, 1024 < block tokens <= 2048
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(1, 20):
            run(seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    weight, hidden = torch.randn(5000, 64, device="cuda") * 0.3, torch.randn(40, 64, device="cuda")
    label = torch.randint(0, 5000, (40,), device="cuda")
    rows = hidden.to(dtype).requires_grad_()
    ours, _ = linear_cross_entropy(rows, HeadRows(weight.to(dtype)), label, chunk_rows=2)
    exact = rows.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact @ weight.to(dtype).double().T, label, reduction="none")
    torch.testing.assert_close(ours.double(), expected, atol=1e-4, rtol=1e-4)
    (gradient,), (exact_gradient,) = (
        torch.autograd.grad(loss.sum(), of) for loss, of in ((ours, rows), (expected, exact))
    )
    torch.testing.assert_close(gradient.double(), exact_gradient, atol=0.02, rtol=0.02)
