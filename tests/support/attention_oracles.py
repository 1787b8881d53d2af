"""Two more ways to attend, obvious ones: SDPA under the dense mask, and a loop over anchors that follows the rules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter_trainer.attention_rules import BlockLayout, Visibility
from tests.support.dense_reference import dense_mask

__all__ = ["Inputs", "assert_equals_oracles", "attend_by_sdpa", "attend_per_anchor", "layout_of", "random_inputs"]

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def layout_of(lengths: tuple[int, ...], blocks: list[tuple[int, int]], block_size: int) -> BlockLayout:
    """The layout of blocks given as (document, position)."""
    document, position = (torch.tensor(part, dtype=torch.int64) for part in zip(*blocks, strict=True))
    return BlockLayout(lengths, document, position, block_size)


def random_inputs(
    layout: BlockLayout, *, heads: int = 4, key_heads: int = 2, head_dim: int = 16, device: str = "cpu"
) -> Inputs:
    """Queries, keys and values of the context, keys and values of the blocks; all want gradients."""
    queries, tokens = len(layout.position_A) * layout.block_size, sum(layout.lengths)
    rows = ((queries, heads), (tokens, key_heads), (tokens, key_heads), (queries, key_heads), (queries, key_heads))
    q, kc, vc, kb, vb = (torch.randn(*shape, head_dim).to(device).requires_grad_() for shape in rows)
    return q, kc, vc, kb, vb


def attend_by_sdpa(inputs: Inputs, layout: BlockLayout, visibility: Visibility) -> Tensor:
    """One dense mask over context and blocks."""
    q, kc, vc, kb, vb = inputs
    blocks = list(zip(layout.document_A.tolist(), layout.position_A.tolist(), strict=True))
    mask = dense_mask(
        layout.lengths, blocks, block_size=layout.block_size, window=visibility.window, causal=visibility.causal
    ).to(q.device)
    key, value = torch.cat([kc, kb]).transpose(0, 1), torch.cat([vc, vb]).transpose(0, 1)
    shared = q.shape[1] // key.shape[0]
    key, value = key.repeat_interleave(shared, 0), value.repeat_interleave(shared, 0)
    return F.scaled_dot_product_attention(q.transpose(0, 1), key, value, attn_mask=mask).transpose(0, 1)


def attend_per_anchor(inputs: Inputs, layout: BlockLayout, visibility: Visibility) -> Tensor:
    """Every query by itself: gathers the keys that the rules let it see, and nothing is masked."""
    q, kc, vc, kb, vb = inputs
    size, window = layout.block_size, visibility.window
    out = []
    for number, (document, anchor) in enumerate(
        zip(layout.document_A.tolist(), layout.position_A.tolist(), strict=True)
    ):
        start = sum(layout.lengths[:document])
        for slot in range(size):
            low = 0 if window is None else max(0, anchor + slot - window + 1)  # rule 2
            seen = range(start + min(low, anchor), start + anchor)  # rule 1
            first = 0 if window is None else max(0, slot - window + 1)
            last = slot + 1 if visibility.causal else size  # rule 3
            own = range(number * size + first, number * size + last)
            key = torch.cat([kc[seen.start : seen.stop], kb[own.start : own.stop]])
            value = torch.cat([vc[seen.start : seen.stop], vb[own.start : own.stop]])
            out.append(_one_query(q[number * size + slot], key, value))
    return torch.stack(out)


def assert_equals_oracles(output: Tensor, inputs: Inputs, layout: BlockLayout, visibility: Visibility) -> None:
    """Holds an output, and its gradients for all inputs, against both."""
    upstream = torch.randn_like(output)
    gradients = torch.autograd.grad(output, inputs, upstream)
    for oracle in (attend_by_sdpa, attend_per_anchor):
        expected = oracle(inputs, layout, visibility)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        for a, b in zip(gradients, torch.autograd.grad(expected, inputs, upstream), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5 * max(1.0, float(b.abs().max())), rtol=1e-5)


def _one_query(q_NH: Tensor, key_SMH: Tensor, value_SMH: Tensor) -> Tensor:
    shared = q_NH.shape[0] // key_SMH.shape[1]
    key, value = key_SMH.repeat_interleave(shared, 1), value_SMH.repeat_interleave(shared, 1)
    p = (torch.einsum("nh,snh->ns", q_NH, key) / q_NH.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("ns,snh->nh", p, value)
