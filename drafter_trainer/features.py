"""Which of the target's states a run asks for, and where each lies in a received row.

Owns the split of a row into the drafter's context (its taps, in their order) and the target's last block, which only
distillation reads: it is asked for as one more tap, unless the drafter taps it anyway, and is kept out of the context.

Shapes: T packed tokens, W taps asked for * D, C the drafter's taps * D, D target hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["FeatureLayout"]


@dataclass(frozen=True)
class FeatureLayout:
    """The taps that are asked for.

    Attributes:
        context_taps: The drafter's, in its order.
        hidden_size: D.
        last_block: The target's last block, where its output is wanted; else None.
    """

    context_taps: tuple[int, ...]
    hidden_size: int
    last_block: int | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """What the target is asked for, in the order in which it answers."""
        if self.last_block is None or self.last_block in self.context_taps:
            return self.context_taps
        return (*self.context_taps, self.last_block)

    @property
    def width(self) -> int:
        """W, elements of one token's row."""
        return len(self.taps) * self.hidden_size

    def split(self, features_TW: Tensor) -> tuple[Tensor, Tensor | None]:
        """The context [T, C] and the last block's output [T, D], before the final norm; views of `features_TW`."""
        context_TC = features_TW[:, : len(self.context_taps) * self.hidden_size]
        if self.last_block is None:
            return context_TC, None
        start = self.taps.index(self.last_block) * self.hidden_size
        return context_TC, features_TW[:, start : start + self.hidden_size]
