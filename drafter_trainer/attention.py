"""Attention of block queries over the fused context and their own block.

Owns the choice of kernel and the kernel of the CPU; the rules are in `attention_rules`, the kernel that trains on CUDA
is in `attention_flex`. Must never form a matrix over context + blocks, and must never let a document or a block see
another.

The kernel here takes a few sorted anchors of one document at a time. Their visible context is a prefix of the
document's, so its keys are a slice, masked only behind the first anchor, and each block's own keys are a small batched
product beside it; one softmax runs over both. Only inputs and output are kept for the backward pass, which makes the
scores again, so memory is linear in tokens. Against `scaled_dot_product_attention` with masks on the same slices, in
fp32 on one AVX2 core with 9 heads of 64: forward and backward take 0.64 x the time at 4 x (130 tokens, 60 anchors,
block 8) and 1.0 x at (2048, 128, 16), where SDPA keeps a copy of the context's keys and values for each slice.

Shapes: T packed context tokens, A anchors, c anchors of a chunk, K block, Q = A*K block tokens, N query heads, M key
heads, G = N/M queries that share a key head, H head dim, n context keys of a chunk, R = c*K*G query rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafter_trainer.attention_flex import attend_flex
from drafter_trainer.attention_rules import BlockLayout, Visibility

__all__ = ["BlockLayout", "Visibility", "attend"]

# Block tokens handled at once. Fastest of 32 … 512 at both shapes of the module docstring.
CHUNK_TOKENS = 128

KeyValue = tuple[Tensor, Tensor]


def attend(
    query_QNH: Tensor, context_kv: KeyValue, block_kv: KeyValue, *, layout: BlockLayout, visibility: Visibility
) -> Tensor:
    """Attend from block tokens to their document's earlier context and their own block.

    Args:
        query_QNH: Queries of all block tokens, normed and rotated.
        context_kv: Keys and values of the packed context, each [T, M, H]; keys normed and rotated.
        block_kv: The same of the block tokens, each [Q, M, H].
        layout: Where documents and blocks lie.
        visibility: The layer's rules.

    Returns:
        [Q, N, H] in the queries' dtype. Softmax is in fp32 (fp64 for fp64 inputs), products in the inputs' dtype.
    """
    # Only training repeats shapes often enough to pay for flex's compilation; decoding meets a new length each round.
    if query_QNH.is_cuda and query_QNH.requires_grad and len(query_QNH):
        return attend_flex(query_QNH, context_kv, block_kv, layout=layout, visibility=visibility)
    out: Tensor = _BlockAttention.apply(query_QNH, *context_kv, *block_kv, _Rules(layout, visibility))  # type: ignore[no-untyped-call]
    return out


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor, rules: _Rules) -> Tensor:
        ctx.rules = rules
        out = torch.empty_like(query)
        with torch.autocast(query.device.type, enabled=False):
            context = _by_head(kc), _by_head(vc)
            for chunk in rules.chunks():
                _chunk_forward(out, query, context, (kb, vb), chunk)
        ctx.save_for_backward(query, kc, vc, kb, vb, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, kc, vc, kb, vb, out = ctx.saved_tensors
        gradients = _Gradients(query, kc, kb)
        context = _by_head(kc), _by_head(vc)
        # sum_j P_j (grad . v_j) = grad . out: what softmax's gradient subtracts from each row.
        delta = (grad.to(_accurate(grad)) * out).sum(-1, keepdim=True)
        for chunk in ctx.rules.chunks():
            _chunk_backward(gradients, (query, grad, delta), context, (kb, vb), chunk)
        context_grads = (part.transpose(0, 1) for part in gradients.context)
        return gradients.query, *context_grads, *gradients.block, None


@dataclass(frozen=True)
class _Rules:
    layout: BlockLayout
    visibility: Visibility

    def chunks(self) -> Iterator[_Chunk]:
        """Cut every document's anchors into chunks."""
        count = max(1, CHUNK_TOKENS // self.layout.block_size)
        for first_anchor, last_anchor, row in self.layout.groups:
            for first in range(first_anchor, last_anchor, count):
                yield self._chunk(first, min(first + count, last_anchor), row)

    def _chunk(self, first: int, last: int, row: int) -> _Chunk:
        positions, window = self.layout.anchor_positions[first:last], self.visibility.window
        low = 0 if window is None else max(0, positions[0] - window + 1)
        high = max(low, positions[-1])
        return _Chunk(
            positions=torch.tensor(positions),
            block_size=self.layout.block_size,
            queries=slice(first * self.layout.block_size, last * self.layout.block_size),
            rows=slice(row + low, row + high),
            low=low,
            visibility=self.visibility,
        )


@dataclass(frozen=True)
class _Chunk:
    """A few anchors of one document and the slice of its context that any of their queries sees."""

    positions: Tensor  # of the anchors
    block_size: int
    queries: slice  # of block tokens
    rows: slice  # of packed context
    low: int  # position of the first of them
    visibility: Visibility

    def hide(self, scores: Tensor, own_scores: Tensor) -> None:
        """Set what a query may not see to -inf, in [M, R, n] and [M, c, K*G, K]."""
        size, keys, window = self.block_size, scores.shape[-1], self.visibility.window
        first = 0 if window is not None else min(int(self.positions[0]) - self.low, keys)
        key = torch.arange(self.low + first, self.low + keys)
        anchor, slot = self.positions[:, None, None], torch.arange(size)[:, None]
        hidden = key >= anchor
        if window is not None:
            hidden = hidden | (anchor + slot - key >= window)
        if hidden.numel():
            _fill(scores.view(*own_scores.shape[:-1], keys)[..., first:], hidden, size)
        own_hidden = torch.zeros(size, size, dtype=torch.bool)
        if self.visibility.causal:
            own_hidden |= slot < torch.arange(size)
        if window is not None:
            own_hidden |= slot - torch.arange(size) >= window
        if own_hidden.any():
            _fill(own_scores, own_hidden[None], size)


def _fill(scores: Tensor, hidden: Tensor, size: int) -> None:
    """Write -inf to [M, c, K*G, keys] where [c or 1, K or 1, keys] is set."""
    torch.unflatten(scores, 2, (size, -1)).masked_fill_(hidden[:, :, None].to(scores.device), float("-inf"))


class _Gradients:
    """Gradients of the inputs, filled chunk by chunk: context ones [M, T, H], the others as their inputs are."""

    def __init__(self, query: Tensor, context: Tensor, block: Tensor) -> None:
        self.query = torch.empty_like(query)
        self.context = tuple(context.new_zeros(_by_head(context).shape) for _ in range(2))
        self.block = tuple(torch.empty_like(block) for _ in range(2))


def _chunk_forward(out: Tensor, query_QNH: Tensor, context: KeyValue, block: KeyValue, chunk: _Chunk) -> None:
    key, value = (part[:, chunk.rows] for part in context)
    own_key, own_value = (_own(part, chunk) for part in block)
    query = _grouped(query_QNH, chunk, key.shape[0]) * query_QNH.shape[-1] ** -0.5
    p, own_p = _probabilities(query, key, own_key, chunk)
    rows = p @ value
    _by_anchor(rows, own_p).add_(own_p @ own_value)
    _ungroup_into(out, rows, chunk)


def _chunk_backward(
    into: _Gradients, rows_QN: tuple[Tensor, Tensor, Tensor], context: KeyValue, block: KeyValue, chunk: _Chunk
) -> None:
    key, value = (part[:, chunk.rows] for part in context)
    own_key, own_value = (_own(part, chunk) for part in block)
    query, grad, delta = (_grouped(part, chunk, key.shape[0]) for part in rows_QN)
    scale = query.shape[-1] ** -0.5
    query = query * scale
    p, own_p = _probabilities(query, key, own_key, chunk)
    query_grad, *context_grads = _softmax_gradients(p, query, grad, delta, (key, value))
    own_query, own_grad, own_delta = (_by_anchor(part, own_p) for part in (query, grad, delta))
    own_query_grad, *own_grads = _softmax_gradients(own_p, own_query, own_grad, own_delta, (own_key, own_value))
    _by_anchor(query_grad, own_p).add_(own_query_grad)
    _ungroup_into(into.query, query_grad * scale, chunk)
    for part, gradient in zip(into.context, context_grads, strict=True):
        part[:, chunk.rows] += gradient
    for part, gradient in zip(into.block, own_grads, strict=True):
        part[chunk.queries] = gradient.permute(1, 2, 0, 3).flatten(0, 1)


def _probabilities(query: Tensor, key: Tensor, own_key: Tensor, chunk: _Chunk) -> tuple[Tensor, Tensor]:
    """Return the attention to context [M, R, n] and own block [M, c, K*G, K]: one softmax over both, in their dtype."""
    heads, rows, _ = query.shape
    keys, size = key.shape[1], chunk.block_size
    both = torch.empty(heads, rows, keys + size, dtype=_accurate(query), device=query.device)
    scores, own_scores = both[..., :keys], torch.unflatten(both[..., keys:], 1, (own_key.shape[1], -1))
    scores.copy_(query @ key.mT)
    own_scores.copy_(torch.unflatten(query, 1, (own_key.shape[1], -1)) @ own_key.mT)
    chunk.hide(scores, own_scores)
    torch.softmax(both, -1, out=both)
    return scores.to(query.dtype), own_scores.to(query.dtype)


def _softmax_gradients(
    p: Tensor, query: Tensor, grad: Tensor, delta: Tensor, kv: KeyValue
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the scaled query, the key and the value from part of a softmax row."""
    key, value = kv
    score_grad = ((grad @ value.mT) - delta).mul_(p).to(query.dtype)
    return score_grad @ key, score_grad.mT @ query, p.mT @ grad


def _accurate(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _by_head(rows_TMH: Tensor) -> Tensor:
    return rows_TMH.transpose(0, 1).contiguous()


def _own(rows_QMH: Tensor, chunk: _Chunk) -> Tensor:
    """Keys or values of the chunk's blocks, [M, c, K, H]."""
    return torch.unflatten(rows_QMH[chunk.queries], 0, (-1, chunk.block_size)).permute(2, 0, 1, 3).contiguous()


def _grouped(rows_QNH: Tensor, chunk: _Chunk, key_heads: int) -> Tensor:
    """Rows of the chunk's block tokens by key head, [M, R, H]; within it by anchor, slot and query head."""
    return torch.unflatten(rows_QNH[chunk.queries], 1, (key_heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)


def _ungroup_into(out_QNH: Tensor, rows_MRH: Tensor, chunk: _Chunk) -> None:
    """Undo `_grouped`."""
    tokens = chunk.queries.stop - chunk.queries.start
    out_QNH[chunk.queries] = torch.unflatten(rows_MRH, 1, (tokens, -1)).permute(1, 0, 2, 3).flatten(1, 2)


def _by_anchor(rows_MRH: Tensor, own: Tensor) -> Tensor:
    """View [M, R, H] as [M, c, K*G, H]."""
    return torch.unflatten(rows_MRH, 1, own.shape[1:3])
