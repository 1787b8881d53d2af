"""Sequences without padding to padded batches and back to rows: pure index arithmetic plus the two input tensors.

Letters: B sequences of one forward, S longest of them, T packed tokens.

Padding is on the right, so a valid row never attends to it, and a packed row t of sequence b is row (b, t - start_b)
of the padded output.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["ForwardPart", "pad_part", "plan_parts"]

# Any row of the embedding will do; padding is masked.
_PAD_ID = 0


@dataclass(frozen=True, slots=True)
class ForwardPart:
    """The sequences that one forward runs.

    Attributes:
        starts: first packed row of each sequence.
        lengths: tokens of each sequence.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def padded_token_count(self) -> int:
        """Tokens that the forward computes, padding included."""
        return len(self.lengths) * max(self.lengths)


def plan_parts(lengths: Sequence[int], max_padded_token_count: int) -> list[ForwardPart]:
    """Divides a batch so that no forward pads to more than the limit; one part when it fits.

    Longest first, so that the sequences of a part are alike and little is padded. A single sequence is always taken.

    Args:
        lengths: tokens of each sequence, each at least 1, packed one after the other.
        max_padded_token_count: most tokens of one forward, padding included.
    """
    starts = []
    total = 0
    for length in lengths:
        starts.append(total)
        total += length
    whole = ForwardPart(tuple(starts), tuple(lengths))
    if whole.padded_token_count <= max_padded_token_count:
        return [whole]
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    parts = []
    while order:
        count = max(1, max_padded_token_count // lengths[order[0]])
        chosen, order = sorted(order[:count]), order[count:]
        parts.append(ForwardPart(tuple(starts[i] for i in chosen), tuple(lengths[i] for i in chosen)))
    return parts


def pad_part(token_ids: array[int], part: ForwardPart) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the inputs of one forward.

    Args:
        token_ids: packed ids of the whole batch, 4 bytes each.
        part: which sequences of it.

    Returns:
        ids_BS: int64, right-padded. mask_BS: int64, 1 where a token is.
    """
    ids_T = torch.frombuffer(token_ids, dtype=torch.int32)
    shape = (len(part.lengths), max(part.lengths))
    ids_BS = torch.full(shape, _PAD_ID, dtype=torch.int64)
    mask_BS = torch.zeros(shape, dtype=torch.int64)
    for row, (start, length) in enumerate(zip(part.starts, part.lengths, strict=True)):
        ids_BS[row, :length] = ids_T[start : start + length]
        mask_BS[row, :length] = 1
    return ids_BS, mask_BS
