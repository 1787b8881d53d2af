"""Whether a copy delivered what the device packed: a checksum from each side of it.

The device computes one right after packing, on the compute stream; the host computes it again from the slot once the
copy is done. Bytes that were written too late, read too early or overwritten in between make the two differ, and the
error names batch, replica and slot at once, instead of a NaN three hundred steps later. Integer arithmetic that wraps
around: exact, and the same on every device.
"""

from __future__ import annotations

from typing import Literal

import torch

__all__ = ["AuditPolicy", "checksum"]

# One batch in this many, where only samples are checked. On the host a check reads the batch once (about 5 GB/s).
_SAMPLE_EVERY = 16
_BLOCK_WORDS = 1024


class AuditPolicy:
    """Which batches are checked. Used by one thread."""

    def __init__(self, mode: Literal["off", "sampled", "always"]) -> None:
        self._every = {"off": 0, "sampled": _SAMPLE_EVERY, "always": 1}[mode]
        self._seen = 0

    def takes_next(self) -> bool:
        """Whether the next batch is checked; the first one always is, unless auditing is off."""
        taken = bool(self._every) and self._seen % self._every == 0
        self._seen += 1
        return taken


@torch.inference_mode()
def checksum(memory: torch.Tensor) -> torch.Tensor:
    """Returns a scalar int64 tensor on the memory's device.

    The sum of 8-byte words within each block, the blocks weighted by their position: it sees any changed word, and
    blocks that were moved or come from another batch.

    Args:
        memory: flat uint8, its size a multiple of 8.
    """
    words = memory.view(torch.int64)
    whole = words.numel() // _BLOCK_WORDS * _BLOCK_WORDS
    sums = words[:whole].view(-1, _BLOCK_WORDS).sum(1)
    weights = torch.arange(sums.numel(), device=memory.device) * 2 + 1
    return (sums * weights).sum() + words[whole:].sum() * (2 * sums.numel() + 1)
