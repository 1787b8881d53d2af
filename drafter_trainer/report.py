"""What an evaluation found, for people and for machines.

Owns the aggregation over prompts and sources, and the names of the JSON fields that tools read. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from drafter_trainer.acceptance import Acceptance, Round, summarise
from drafter_trainer.divergence import Divergence

__all__ = ["AcceptanceReport", "Comparison", "SourceRow", "Speed", "build_report"]


@dataclass(frozen=True)
class Comparison:
    """One prompt decoded with blocks, beside its plain answer.

    Attributes:
        rounds: Verification rounds.
        identical: Whether all tokens are equal.
        divergence: The first difference; None where there is none to measure.
    """

    rounds: tuple[Round, ...]
    identical: bool
    divergence: Divergence | None = None

    @property
    def is_tie(self) -> bool:
        """Whether the answers part at equal logits, within rounding."""
        return self.divergence is not None and self.divergence.is_tie


@dataclass(frozen=True)
class Speed:
    """Decoding speeds of the timed prompts, tokens a second by prompt index.

    Attributes:
        block_size: Block length that was timed.
        plain: One token a forward.
        blocks: With the drafter.
        comparisons: The timed answers, compared like the others.
    """

    block_size: int
    plain: Mapping[int, float]
    blocks: Mapping[int, float]
    comparisons: tuple[Comparison, ...]

    @property
    def accept_len(self) -> float:
        """Acceptance length of the timed blocks, micro."""
        return summarise([c.rounds for c in self.comparisons], block_size=self.block_size).micro


@dataclass(frozen=True)
class SourceRow:
    """The figures of one source's prompts; speeds are None where none of them was timed."""

    source: str
    prompts: int
    accept_len: float
    identical: int
    ties: int
    tok_s_plain: float | None
    tok_s_speculative: float | None


@dataclass(frozen=True)
class AcceptanceReport:
    """The figures of all prompts.

    Attributes:
        prompts: How many were decoded.
        dtype: What target and head computed in.
        block_size: Block length of the acceptance figures, anchor included.
        accept_len: Tokens emitted by rounds ÷ rounds, over all prompts.
        accept_len_macro: Mean of the prompts' own.
        accept_len_simulated: The same as `accept_len`, from walking the references without the target.
        acc_at: By draft slot: P(accepted | all before it accepted).
        identical: Prompts whose block-decoded answer equals the plain one in every token.
        ties: Prompts whose answers part where the target's logits are equal within rounding.
        mismatches: The rest, those of the timed answers included; anything but 0 is an error of ours.
        tok_s_plain: Median decoding speed, tokens a second; None where not measured.
        tok_s_speculative: The same with blocks of `speed_block_size`.
        speed_block_size: Block length that was timed.
        speed_accept_len: Acceptance length at it.
        largest_tie_ulps: Widest gap among the ties, in units in the last place.
        by_source: The same by source of the prompts.
    """

    prompts: int
    dtype: str
    block_size: int
    accept_len: float
    accept_len_macro: float
    accept_len_simulated: float
    acc_at: tuple[float | None, ...]
    identical: int
    ties: int
    mismatches: int
    tok_s_plain: float | None
    tok_s_speculative: float | None
    speed_block_size: int | None
    speed_accept_len: float | None
    largest_tie_ulps: float
    by_source: tuple[SourceRow, ...]

    @property
    def speedup(self) -> float | None:
        """Block decoding's speed ÷ plain decoding's."""
        if not self.tok_s_plain or self.tok_s_speculative is None:
            return None
        return self.tok_s_speculative / self.tok_s_plain

    def to_json(self) -> dict[str, Any]:
        """Return every field and the speedup, ready for `json.dumps`."""
        return {**asdict(self), "speedup": self.speedup}


def build_report(
    comparisons: Sequence[Comparison],
    sources: Sequence[str],
    *,
    simulated: Acceptance,
    speed: Speed | None,
    block_size: int,
    dtype: str,
) -> AcceptanceReport:
    """Aggregate; `comparisons` and `sources` have one entry a prompt, in the order of the prompts' indices."""
    total = summarise([c.rounds for c in comparisons], block_size=block_size)
    identical, ties = _count(comparisons)
    plain, blocks = _medians(speed, range(len(sources)))
    compared = [*comparisons, *(speed.comparisons if speed else ())]
    gaps = [c.divergence.gap / c.divergence.ulp for c in compared if c.divergence is not None and c.is_tie]
    return AcceptanceReport(
        prompts=len(comparisons),
        dtype=dtype,
        block_size=block_size,
        accept_len=total.micro,
        accept_len_macro=total.macro,
        accept_len_simulated=simulated.micro,
        acc_at=total.by_slot,
        identical=identical,
        ties=ties,
        mismatches=sum(not (c.identical or c.is_tie) for c in compared),
        tok_s_plain=plain,
        tok_s_speculative=blocks,
        speed_block_size=speed.block_size if speed else None,
        speed_accept_len=speed.accept_len if speed else None,
        largest_tie_ulps=max(gaps, default=0.0),
        by_source=tuple(
            _source_row(source, [i for i, s in enumerate(sources) if s == source], comparisons, speed, block_size)
            for source in sorted(set(sources))
        ),
    )


def _source_row(
    source: str, indices: Sequence[int], comparisons: Sequence[Comparison], speed: Speed | None, block_size: int
) -> SourceRow:
    chosen = [comparisons[i] for i in indices]
    identical, ties = _count(chosen)
    plain, blocks = _medians(speed, indices)
    return SourceRow(
        source=source,
        prompts=len(chosen),
        accept_len=summarise([c.rounds for c in chosen], block_size=block_size).micro,
        identical=identical,
        ties=ties,
        tok_s_plain=plain,
        tok_s_speculative=blocks,
    )


def _count(comparisons: Sequence[Comparison]) -> tuple[int, int]:
    return sum(c.identical for c in comparisons), sum(c.is_tie for c in comparisons)


def _medians(speed: Speed | None, indices: Sequence[int]) -> tuple[float | None, float | None]:
    timed = [i for i in indices if speed is not None and i in speed.plain]
    if speed is None or not timed:
        return None, None
    return median(speed.plain[i] for i in timed), median(speed.blocks[i] for i in timed)
