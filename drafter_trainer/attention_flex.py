"""The block attention on CUDA: flex_attention over [context; block tokens] with a sparse block mask.

Owns the translation of `attention_rules` into a mask function and a table of tiles. Two facts force its form.
`create_block_mask` makes the dense queries x keys table when not compiled, and compiled it has reused a stale mask: so
the table is derived here, from each anchor's range of context rows, and the mask function only reads tensors. And a new
shape means a new compilation, seconds long, and past dynamo's limit of them a silent fall to the dense form: so context
and block tokens are each padded to a power of two. Micro-batches that the plan has filled then share a few shapes, and
after warm-up nothing is compiled. Padding costs copies only: the table has no tile of padded context, and of padded
blocks each sees itself alone.

The CPU has no backward pass for flex_attention (torch 2.13); there this serves as a forward-only twin for tests.

Shapes: T packed context tokens, A anchors, K block, Q = A*K block tokens, N query heads, M key heads, H head dim,
S = padded T + padded Q keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from drafter_trainer.attention_rules import BlockLayout, Visibility

__all__ = ["attend_flex"]

TILE = 128
NO_QUERY_DOCUMENT, NO_KEY_DOCUMENT = -1, -2
# Compiled forms of one code object that dynamo keeps: shapes of context x blocks x kinds of layer. Its own limit is 8.
COMPILED_FORMS = 64


def attend_flex(
    query_QNH: Tensor,
    context_kv: tuple[Tensor, Tensor],
    block_kv: tuple[Tensor, Tensor],
    *,
    layout: BlockLayout,
    visibility: Visibility,
) -> Tensor:
    """Attend as `attention.attend` does: same arguments, same result. There must be at least one block."""
    memo_key = visibility, query_QNH.device
    if memo_key not in layout.memo:
        layout.memo[memo_key] = _build_mask(layout, visibility, query_QNH.device)
    mask: _Mask = layout.memo[memo_key]
    queries = query_QNH.shape[0]
    key, value = (
        torch.cat([_padded(context, mask.context), _padded(block, mask.queries)]).transpose(0, 1)[None]
        for context, block in zip(context_kv, block_kv, strict=True)
    )
    query = _padded(query_QNH, mask.queries).transpose(0, 1)[None]
    attend = _compiled() if query.is_cuda else cast("Callable[..., Any]", flex_attention)
    out: Tensor = attend(query, key, value, block_mask=mask.blocks, enable_gqa=True)
    return out[0].transpose(0, 1)[:queries]


@dataclass(frozen=True)
class _Mask:
    blocks: BlockMask
    context: int  # padded T
    queries: int  # padded Q


@cache
def _compiled(backend: str = "inductor") -> Callable[..., Any]:
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, COMPILED_FORMS)
    limits.fail_on_recompile_limit_hit = True  # else it would go on with the dense form, and only be slow
    return torch.compile(flex_attention, dynamic=False, backend=backend)


def _bucket(size: int) -> int:
    """Round up to a power of two, to TILE at least."""
    return max(TILE, 1 << max(size - 1, 0).bit_length())


def _padded(rows: Tensor, size: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, 0, 0, size - rows.shape[0]))


def _build_mask(layout: BlockLayout, visibility: Visibility, device: torch.device) -> _Mask:
    size = layout.block_size
    context, queries = _bucket(sum(layout.lengths)), _bucket(len(layout.position_A) * size)
    partial, full = (_indices(table) for table in _tiles(layout, visibility, context, queries))
    blocks = BlockMask.from_kv_blocks(
        partial[0].to(device),
        partial[1].to(device),
        full[0].to(device),
        full[1].to(device),
        BLOCK_SIZE=TILE,
        mask_mod=_mask_mod(layout, visibility, (context, queries), device),
        seq_lengths=(queries, context + queries),
    )
    return _Mask(blocks, context, queries)


def _mask_mod(
    layout: BlockLayout, visibility: Visibility, sizes: tuple[int, int], device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    context, queries = sizes
    size, window, causal = layout.block_size, visibility.window, visibility.causal
    lengths = torch.tensor(layout.lengths)
    key_document = torch.arange(len(lengths)).repeat_interleave(lengths)
    # Queries and keys of padding belong to no document; padded queries still see their own (padded) block.
    key_document_S = _filled(key_document, context + queries, NO_KEY_DOCUMENT).to(device)
    key_position_S = _filled(layout.position_T, context + queries, 0).to(device)
    document_Q = _filled(layout.document_A.repeat_interleave(size), queries, NO_QUERY_DOCUMENT).to(device)
    anchor_Q = _filled(layout.position_A.repeat_interleave(size), queries, 0).to(device)

    def visible(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        slot, key_slot = q % size, (k - context) % size
        sees_context = (key_document_S[k] == document_Q[q]) & (key_position_S[k] < anchor_Q[q])
        sees_own = (k - context) // size == q // size
        if window is not None:
            sees_context = sees_context & (anchor_Q[q] + slot - key_position_S[k] < window)
            sees_own = sees_own & (slot - key_slot < window)
        if causal:
            sees_own = sees_own & (key_slot <= slot)
        return torch.where(k < context, sees_context, sees_own)

    return visible


def _tiles(layout: BlockLayout, visibility: Visibility, context: int, queries: int) -> tuple[Tensor, Tensor]:
    """Which tiles of keys each tile of queries needs in part and in full, two bool [queries / TILE, S / TILE]."""
    size = layout.block_size
    start = torch.tensor([0, *layout.lengths]).cumsum(0)[layout.document_A]
    window = visibility.window if visibility.window is not None else 1 << 40
    # Rows of context that any slot of a block sees, and that all its slots see, as [low, high).
    low = start + (layout.position_A - window + 1).clamp(min=0)
    all_low = start + (layout.position_A + size - window).clamp(min=0)
    high = start + layout.position_A
    first_block = torch.arange(0, queries, TILE) // size
    last_block = torch.arange(TILE - 1, queries, TILE) // size
    block = torch.arange(len(high))
    member = (block >= first_block[:, None]) & (block <= last_block[:, None])
    # A tile that holds padding sees nothing in full.
    whole = last_block < len(high)
    never = 1 << 40
    lowest, highest = low.where(member, never).amin(1), high.where(member, -1).amax(1)
    full_low = all_low.where(member, -1).amax(1).where(whole, never)
    full_high = high.where(member, never).amin(1)
    one_document = layout.document_A.where(member, -1).amax(1) == layout.document_A.where(member, never).amin(1)
    edge = torch.arange(0, context, TILE)
    touched = (edge < highest[:, None]) & (edge + TILE > lowest[:, None])
    full = (edge >= full_low[:, None]) & (edge + TILE <= full_high[:, None]) & one_document[:, None]
    own_edge = torch.arange(0, queries, TILE)
    own = (own_edge < (last_block[:, None] + 1) * size) & (own_edge + TILE > first_block[:, None] * size)
    return torch.cat([touched & ~full, own], 1), torch.cat([full, torch.zeros_like(own)], 1)


def _indices(table: Tensor) -> tuple[Tensor, Tensor]:
    """Count and list the set columns of each row, as [1, 1, rows] and [1, 1, rows, columns] of int32."""
    order = torch.argsort(table.to(torch.int8), dim=1, descending=True, stable=True)
    return table.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]


def _filled(values: Tensor, size: int, fill: int) -> Tensor:
    return F.pad(values, (0, size - values.numel()), value=fill)
