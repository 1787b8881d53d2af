"""What a step adds up over its micro-batches and ranks, and which of them held something that isn't finite.

Owns the sums, their exchange as one row of doubles, and the three ways in which a micro-batch can be bad: the target
marked its features (or they turn out not to be finite), its loss isn't finite, or its gradient isn't.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from drafter_trainer.feed import FedBatch
from drafter_trainer.following import pack_counts, unpack_counts
from drafter_trainer.loss import LossOutput
from drafter_trainer.types import Version

__all__ = ["BadKind", "Culprit", "StepSums"]

BadKind = Literal["features", "loss", "gradient"]
BAD_KINDS: tuple[BadKind, ...] = ("features", "loss", "gradient")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Culprit:
    """A micro-batch that held something that isn't finite, for people."""

    rank: int
    position: int
    sample_ids: tuple[int, ...]
    replica_index: int
    version: int
    kind: BadKind
    detail: str

    def __str__(self) -> str:
        samples = ", ".join(map(str, self.sample_ids[:8])) + (", …" if len(self.sample_ids) > 8 else "")
        return (
            f"plan position {self.position} (samples {samples}; rank {self.rank}, replica {self.replica_index}, "
            f"target version {self.version}): {self.detail}"
        )

    def to_json(self) -> str:
        """As text that travels between ranks."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Culprit:
        """The inverse of ``to_json``."""
        values = json.loads(text)
        return cls(**{**values, "sample_ids": tuple(values["sample_ids"])})


@dataclasses.dataclass
class StepSums:
    """Sums over this rank's micro-batches of one step; exchanged as one row of doubles."""

    block_size: int
    loss: float = 0.0
    bad: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(BAD_KINDS, 0))
    """Micro-batches by what wasn't finite in them; each counts once, by the first of the three."""
    tokens: int = 0
    prefix: float = 0.0
    blocks: int = 0
    wait_s: float = 0.0
    epoch: int = 0
    correct: list[float] = dataclasses.field(default_factory=list)
    valid: list[float] = dataclasses.field(default_factory=list)
    asked_again: int = 0
    versions: Counter[Version] = dataclasses.field(default_factory=Counter)
    """Micro-batches by the target version that made them."""
    given_up: bool = False
    """Whether a stop was asked for and a batch didn't come, so that the step must not be made."""

    def __post_init__(self) -> None:
        self.correct = self.correct or [0.0] * (self.block_size - 1)
        self.valid = self.valid or [0.0] * (self.block_size - 1)

    def add(self, fed: FedBatch, output: LossOutput, gradient_size: Tensor) -> BadKind | None:
        """Counts a batch in. Reads the device once.

        Args:
            fed: The batch.
            output: Its loss.
            gradient_size: A scalar that is finite when the gradients so far are.

        Returns:
            What is not finite in it, if anything.
        """
        correct_AK, valid_AK = output.correct_AK[:, 1:], output.valid_AK[:, 1:]
        prefix_A = (correct_AK & valid_AK).to(torch.int64).cumprod(1).sum(1)
        supervised_A = valid_AK.any(1)
        counts = torch.stack([(correct_AK & valid_AK).sum(0), valid_AK.sum(0)]).double()
        totals = torch.stack([(1 + prefix_A[supervised_A]).sum(), supervised_A.sum()]).double()
        loss_sum = output.loss_sum.detach().double()
        size = gradient_size.to(loss_sum.device).double()
        loss, size_read, prefix, blocks, *by_slot = torch.cat(
            [loss_sum[None], size[None], totals, counts.flatten()]
        ).tolist()
        slots = self.block_size - 1
        self.loss += loss
        self.prefix += prefix
        self.blocks += int(blocks)
        self.correct = [a + b for a, b in zip(self.correct, by_slot[:slots], strict=True)]
        self.valid = [a + b for a, b in zip(self.valid, by_slot[slots:], strict=True)]
        self.tokens += sum(fed.batch.micro.lengths)
        self.epoch = max(self.epoch, fed.batch.micro.epoch)
        self.versions[fed.batch.target_version] += 1
        return self._judge(fed, loss, size_read)

    def _judge(self, fed: FedBatch, loss: float, gradient_size: float) -> BadKind | None:
        kind: BadKind | None = None
        if not fed.finite:
            kind = "features"
        elif not math.isfinite(loss):
            kind = "loss" if bool(fed.batch.features_TC.isfinite().all()) else "features"
        elif not math.isfinite(gradient_size) and not any(self.bad.values()):  # else it may be an earlier batch's
            kind = "gradient" if bool(fed.batch.features_TC.isfinite().all()) else "features"
        if kind is not None:
            self.bad[kind] += 1
        return kind

    def row(self, *, version_entries: int) -> list[float]:
        """The sums as numbers to exchange; equally many on every rank, with room for so many versions."""
        lasting = [self.wait_s, float(self.epoch), float(self.given_up)]
        bad = [float(self.bad[kind]) for kind in BAD_KINDS]
        plain = [self.loss, float(self.tokens), self.prefix, float(self.blocks), float(self.asked_again)]
        versions = pack_counts(self.versions, entries=version_entries)
        return [*lasting, *bad, *plain, *self.correct, *self.valid, *versions]

    @classmethod
    def over_ranks(cls, rows: Sequence[Sequence[float]], block_size: int) -> StepSums:
        """The sums over all ranks, in rank order; the longest wait and the latest epoch of any; given up by any."""
        slots = block_size - 1
        stop = 11 + 2 * slots
        wait_s, epoch, given_up = (max(column) for column in zip(*(row[:3] for row in rows), strict=True))
        bad = [int(sum(column)) for column in zip(*(row[3:6] for row in rows), strict=True)]
        loss, tokens, prefix, blocks, again, *by_slot = (
            sum(column) for column in zip(*(row[6:stop] for row in rows), strict=True)
        )
        return cls(
            block_size=block_size,
            loss=loss,
            bad=dict(zip(BAD_KINDS, bad, strict=True)),
            tokens=int(tokens),
            prefix=prefix,
            blocks=int(blocks),
            wait_s=wait_s,
            epoch=int(epoch),
            correct=by_slot[:slots],
            valid=by_slot[slots:],
            asked_again=int(again),
            versions=sum((unpack_counts(row[stop:]) for row in rows), Counter()),
            given_up=bool(given_up),
        )
