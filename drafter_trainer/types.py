"""What crosses the trainer's rooms: a planned micro-batch, and the same with its features.

Owns two records and nothing else; they are never changed after they are made. T packed tokens, L taps, D target hidden,
C = L*D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    # Whoever only plans or prepares needs no torch, which takes seconds to load.
    from torch import Tensor


class Version(NamedTuple):
    """One version of the target's weights."""

    number: int
    """Only grows while a server lives."""
    digest: str
    """Digest of the weights; equal digests mean equal weights."""


@dataclass(frozen=True)
class MicroBatch:
    """What the plan says to train at one position: sequences packed one after the other, no padding."""

    position: int
    """Place in the endless plan, from 0."""
    epoch: int
    """From 0. A micro-batch never spans two epochs."""
    sample_ids: tuple[int, ...]
    """Index of each sequence in the prepared dataset."""
    lengths: tuple[int, ...]
    """Tokens of each sequence; their sum is T."""
    input_ids_T: Tensor
    """int64 [T]."""
    loss_mask_T: Tensor
    """bool [T], true on supervised tokens."""


@dataclass(frozen=True)
class TrainBatch:
    """A micro-batch with the target's features for it, as received and checked."""

    micro: MicroBatch
    features_TC: Tensor
    """[T, L*D] in the wire's dtype, taps in the order of `target_layer_ids`."""
    target_version: Version
    """The one version that all of these features come from."""
    replica_index: int
    """Which replica made them; for metrics and messages only."""
    last_TD: Tensor | None = None
    """Output of the target's last block, before its final norm, where distillation wants it."""
