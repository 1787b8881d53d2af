"""Which keys a block query may see, and where documents and blocks lie in packed rows.

Owns the visibility rules: every kernel and the tests' oracle are held against this page. The queries are block tokens
only; context tokens exist as keys and values. With documents packed one after another:

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

Shapes: T packed context tokens, A anchors, K block, Q = A*K block tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from drafter_trainer.anchors import Anchors

__all__ = ["BlockLayout", "Visibility"]


@dataclass(frozen=True)
class Visibility:
    """What a layer's queries may see, beside rules 1 and 4.

    Attributes:
        window: W of rules 2 and 3; None for full attention.
        causal: Whether later slots of a query's own block are hidden from it (rule 3).
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True)
class BlockLayout:
    """Where documents and blocks lie. Anchors are sorted by document and then by position.

    Attributes:
        lengths: Context tokens of each document; their sum is T.
        document_A: int64, CPU: the document of each anchor.
        position_A: int64, CPU: the anchor's position in its document, from 0 to the document's length.
        block_size: K.
        memo: What kernels derive from this layout, kept so that layers share it.
    """

    lengths: tuple[int, ...]
    document_A: Tensor
    position_A: Tensor
    block_size: int
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

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
    def anchor_positions(self) -> list[int]:
        """`position_A` as a list."""
        positions: list[int] = self.position_A.tolist()
        return positions

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
