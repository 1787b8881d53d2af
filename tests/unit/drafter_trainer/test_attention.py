"""The kernel against the rules of `attention_rules`, one by one, and against the dense mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafter_trainer import attention
from drafter_trainer.attention import BlockLayout, Visibility, attend
from tests.support.attention_oracles import assert_equals_oracles, layout_of, random_inputs
from tests.support.dense_reference import dense_mask
from tests.support.drafters import layouts


def seen(lengths: tuple[int, ...], blocks: list[tuple[int, int]], block_size: int, visibility: Visibility) -> Tensor:
    """What each query attends to, bool [Q, T + Q]: one-hot values turn the output into the attention itself."""
    layout = layout_of(lengths, blocks, block_size)
    tokens, queries = sum(lengths), len(blocks) * block_size
    values = torch.eye(tokens + queries)[:, None]
    query, key = torch.randn(queries, 1, tokens + queries), torch.randn(tokens + queries, 1, tokens + queries)
    out = attend(
        query,
        (key[:tokens] * 0.1, values[:tokens]),
        (key[tokens:] * 0.1, values[tokens:]),
        layout=layout,
        visibility=visibility,
    )
    return out[:, 0] > 0


def positions_seen(row: Tensor, tokens: int) -> tuple[list[int], list[int]]:
    return row[:tokens].nonzero()[:, 0].tolist(), row[tokens:].nonzero()[:, 0].tolist()


def test_rule_1_context_is_seen_strictly_before_the_anchor() -> None:
    visible = seen((6,), [(0, 0), (0, 3)], 2, Visibility())
    for slot in range(2):
        assert positions_seen(visible[slot], 6)[0] == []
        assert positions_seen(visible[2 + slot], 6)[0] == [0, 1, 2]


def test_rule_1_compares_positions_when_blocks_overlap() -> None:  # case 39
    visible = seen((8,), [(0, 3), (0, 4), (0, 5)], 4, Visibility())
    for block, anchor in enumerate((3, 4, 5)):
        for slot in range(4):
            assert positions_seen(visible[4 * block + slot], 8)[0] == list(range(anchor))


def test_rule_1_documents_do_not_see_each_other() -> None:
    visible = seen((4, 5, 3), [(0, 2), (2, 1)], 2, Visibility())
    assert positions_seen(visible[0], 12)[0] == [0, 1]
    assert positions_seen(visible[2], 12)[0] == [9]


def test_rule_2_window_counts_the_querys_own_position() -> None:
    visible = seen((9,), [(0, 6)], 3, Visibility(window=4))
    assert [positions_seen(row, 9)[0] for row in visible] == [[3, 4, 5], [4, 5], [5]]


def test_rule_3_own_block_is_seen_in_both_directions() -> None:  # case 40
    visible = seen((5,), [(0, 2), (0, 4)], 3, Visibility())
    assert [positions_seen(row, 5)[1] for row in visible] == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3


def test_rule_3_causal_layers_hide_later_slots() -> None:
    visible = seen((5,), [(0, 2), (0, 4)], 3, Visibility(causal=True))
    assert [positions_seen(row, 5)[1] for row in visible] == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5]]


def test_rule_3_window_holds_within_the_block() -> None:
    visible = seen((5,), [(0, 4)], 4, Visibility(window=2, causal=True))
    assert [positions_seen(row, 5) for row in visible] == [([3], [0]), ([], [0, 1]), ([], [1, 2]), ([], [2, 3])]


@given(layouts(), st.integers(1, 5), st.none() | st.integers(1, 12), st.booleans(), st.sampled_from([1, 3, 8, 128]))
def test_rule_4_nothing_else_is_seen(
    drawn: tuple[tuple[int, ...], list[tuple[int, int]]],
    block_size: int,
    window: int | None,
    causal: bool,
    chunk_tokens: int,
) -> None:
    lengths, blocks = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "CHUNK_TOKENS", chunk_tokens)
        visible = seen(lengths, blocks, block_size, Visibility(window=window, causal=causal))
    expected = dense_mask(lengths, blocks, block_size=block_size, window=window, causal=causal)
    assert torch.equal(visible, expected)
    assert expected.any(1).all(), "a query without any key"


@settings(max_examples=25)
@given(layouts(), st.integers(1, 5), st.none() | st.integers(1, 12), st.booleans(), st.sampled_from([1, 8, 128]))
def test_chunked_sdpa_and_per_anchor_agree_in_outputs_and_all_gradients(
    drawn: tuple[tuple[int, ...], list[tuple[int, int]]],
    block_size: int,
    window: int | None,
    causal: bool,
    chunk_tokens: int,
) -> None:  # cases 39, 40, 41
    """Several documents in a row, any anchors, any window: three ways that share no line."""
    layout, visibility = layout_of(*drawn, block_size), Visibility(window=window, causal=causal)
    inputs = random_inputs(layout)
    q, kc, vc, kb, vb = inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "CHUNK_TOKENS", chunk_tokens)
        ours = attend(q, (kc, vc), (kb, vb), layout=layout, visibility=visibility)
        assert_equals_oracles(ours, inputs, layout, visibility)


def test_gradients_are_exact_in_float64() -> None:
    layout = layout_of((7, 4), [(0, 0), (0, 3), (0, 5), (1, 2)], 2)
    shapes = ((8, 4, 3), (11, 2, 3), (11, 2, 3), (8, 2, 3), (8, 2, 3))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    for visibility in (Visibility(), Visibility(window=3, causal=True)):

        def run(q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor, rules: Visibility = visibility) -> Tensor:
            return attend(q, (kc, vc), (kb, vb), layout=layout, visibility=rules)

        assert torch.autograd.gradcheck(run, inputs)


def test_blocks_without_any_context_are_finite_forward_and_backward() -> None:  # case 9
    layout = layout_of((5, 60), [(0, 0), (1, 0), (1, 59)], 3)
    inputs = [torch.randn(n, 2, 8, requires_grad=True) for n in (9, 65, 65, 9, 9)]
    out = attend(
        inputs[0], (inputs[1], inputs[2]), (inputs[3], inputs[4]), layout=layout, visibility=Visibility(2, True)
    )
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    assert all(torch.isfinite(t).all() for t in (out, *gradients))


def test_no_block_at_all_gives_no_rows_and_zero_gradients() -> None:
    layout = BlockLayout((5,), torch.empty(0).long(), torch.empty(0).long(), 3)
    inputs = [torch.randn(n, 2, 8, requires_grad=True) for n in (0, 5, 5, 0, 0)]
    out = attend(inputs[0], (inputs[1], inputs[2]), (inputs[3], inputs[4]), layout=layout, visibility=Visibility())
    assert out.shape == (0, 2, 8)
    assert all(not g.any() for g in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_float32(dtype: torch.dtype) -> None:
    layout = layout_of((40,), [(0, 3), (0, 17), (0, 39)], 4)
    exact = [torch.randn(n, 2, 16, requires_grad=True) for n in (12, 40, 40, 12, 12)]
    rounded = [t.detach().to(dtype).requires_grad_() for t in exact]
    results = []
    for inputs in (exact, rounded):
        q, kc, vc, kb, vb = inputs
        out = attend(q, (kc, vc), (kb, vb), layout=layout, visibility=Visibility(window=20))
        results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for a, b in zip(*results, strict=True):
        assert b.dtype == dtype
        torch.testing.assert_close(a, b.float(), atol=0.05 * float(a.detach().abs().max()), rtol=0)
