"""Attention of block queries over the fused context and their own block.

Owns the visibility rules and the kernels that apply them. Must never form a square mask over context + blocks, and must
never let a document, or a block, see another.

The queries are block tokens only; context tokens exist as keys and values. With documents packed one after another:

```
            keys:   context of document 0      context of document 1      | own block only
                    0 1 2 .. a-1 | a ..        0 1 2 .. a-1 | a ..        | slot 0 .. K-1
 block (d=0, a)     visible      | hidden      hidden                     | visible
 block (d=1, a)     hidden                     visible      | hidden      | visible
```

A query in slot s of the block anchored at position a of document d has position q = a + s. It sees

1. a context key at position j of document d iff j < a. Strictly: when serving, the target has not run on the anchor
   token yet, so its hidden state does not exist. The comparison is by position; by block index it would leak the
   future wherever two anchors are closer than a block.
2. in a sliding layer, of those only the keys with q - j < W: the window of W keys counts the query's own position.
3. a key in slot t of its own block; in a causal layer iff t <= s; in a sliding layer iff also s - t < W.
4. nothing else.

Every query sees at least its own key (rule 3 with t = s, W >= 1), so no softmax row is empty and none can be NaN.

Shapes: T packed context tokens, A anchors, K block, Q = A*K block tokens, N query heads, M key heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from drafter_trainer.anchors import Anchors

__all__ = ["BlockLayout", "Visibility", "attend"]


@dataclass(frozen=True)
class Visibility:
    """What a layer's queries may see, beside rules 1 and 4.

    Attributes:
        window: W of rules 2 and 3; None for full attention.
        causal: Whether a query sees later slots of its own block (rule 3).
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True)
class BlockLayout:
    """Where documents and blocks lie. Anchors are sorted by document and then position.

    Attributes:
        lengths: Context tokens of each document; their sum is T.
        document_A: int64, CPU: the document of each anchor.
        position_A: int64, CPU: the anchor's position in its document; 0 <= position <= length.
        block_size: K.
    """

    lengths: tuple[int, ...]
    document_A: Tensor
    position_A: Tensor
    block_size: int

    @classmethod
    def from_anchors(cls, lengths: tuple[int, ...], anchors: Anchors, *, block_size: int) -> BlockLayout:
        """Lay out blocks of `block_size` tokens at `anchors` over documents of `lengths` tokens."""
        return cls(tuple(lengths), anchors.document_A, anchors.position_A, block_size)

    @cached_property
    def position_T(self) -> Tensor:
        """Position of every context token within its document, int64, CPU."""
        return torch.cat([torch.arange(length) for length in self.lengths]) if self.lengths else torch.empty(0).long()

    @cached_property
    def position_Q(self) -> Tensor:
        """Position of every block token within its document, int64, CPU."""
        return (self.position_A[:, None] + torch.arange(self.block_size)).flatten()

    @cached_property
    def groups(self) -> tuple[tuple[int, int, int], ...]:
        """(first anchor, last anchor + 1, first context row) of every document that has anchors."""
        counts = torch.bincount(self.document_A, minlength=len(self.lengths)).tolist()
        groups, anchor, row = [], 0, 0
        for count, length in zip(counts, self.lengths, strict=True):
            if count:
                groups.append((anchor, anchor + count, row))
            anchor, row = anchor + count, row + length
        return tuple(groups)


@dataclass(frozen=True)
class _Chunk:
    """Anchors [first, last) of one document and the context rows [start, stop) that any of their queries sees."""

    first: int
    last: int
    start: int
    stop: int
    row: int  # the document's first context row


def _chunks(layout: BlockLayout, window: int | None, chunk_anchors: int) -> Iterator[_Chunk]:
    positions = layout.position_A.tolist()
    for first_anchor, last_anchor, row in layout.groups:
        for first in range(first_anchor, last_anchor, chunk_anchors):
            last = min(first + chunk_anchors, last_anchor)
            low = 0 if window is None else max(0, positions[first] - window + 1)
            yield _Chunk(first, last, row + low, row + max(low, positions[last - 1]), row)


def _chunk_mask(layout: BlockLayout, chunk: _Chunk, visibility: Visibility, device: torch.device) -> Tensor:
    """Visibility of [context rows of the chunk; block tokens of the chunk] to its queries, bool [Q, keys]."""
    size, count = layout.block_size, chunk.last - chunk.first
    anchor = layout.position_A[chunk.first : chunk.last].to(device).repeat_interleave(size)[:, None]
    slot = torch.arange(size, device=device).repeat(count)
    context = torch.arange(chunk.start - chunk.row, chunk.stop - chunk.row, device=device)
    sees_context = context < anchor
    block = torch.arange(count, device=device).repeat_interleave(size)
    sees_block = block[:, None] == block
    if visibility.causal:
        sees_block &= slot <= slot[:, None]
    if visibility.window is not None:
        sees_context &= anchor + slot[:, None] - context < visibility.window
        sees_block &= slot[:, None] - slot < visibility.window
    return torch.cat([sees_context, sees_block], dim=1)


def attend(
    query_QNH: Tensor,
    context_kv: tuple[Tensor, Tensor],
    block_kv: tuple[Tensor, Tensor],
    *,
    layout: BlockLayout,
    visibility: Visibility,
    chunk_anchors: int = 16,
) -> Tensor:
    """Attend from block tokens to their document's earlier context and their own block.

    Args:
        query_QNH: Queries of all block tokens, normed and rotated.
        context_kv: Keys and values of the packed context, each [T, M, H]; keys normed and rotated.
        block_kv: The same of the block tokens, each [Q, M, H].
        layout: Where documents and blocks lie.
        visibility: The layer's rules.
        chunk_anchors: Anchors handled at once; bounds the scores held to chunk x K x N x (context + chunk x K).

    Returns:
        [Q, N, H] in the queries' dtype.
    """
    size = layout.block_size
    outputs = []
    for chunk in _chunks(layout, visibility.window, chunk_anchors):
        queries = slice(chunk.first * size, chunk.last * size)
        rows = slice(chunk.start, chunk.stop)
        key, value = (
            torch.cat([context[rows], block[queries]]).transpose(0, 1)[None]
            for context, block in zip(context_kv, block_kv, strict=True)
        )
        mask = _chunk_mask(layout, chunk, visibility, query_QNH.device)
        query = query_QNH[queries].transpose(0, 1)[None]
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs) if outputs else query_QNH * 0
