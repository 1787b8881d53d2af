"""Counts what block decoding accepted, whether it was real or simulated.

Owns the definition of acceptance length, so that training metrics, evaluation and reports can't differ: tokens
emitted by verification rounds ÷ verification rounds, the bonus token of each round included, over all sequences
(micro), and the mean of the sequences' own (macro). The token that comes out of the prefill is no round's and is not
counted.

Pure arithmetic on counts: no tensors, no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Acceptance", "Round", "choose_block_length", "expected_emitted", "summarise"]


class Round(NamedTuple):
    """One verification round; it emitted `accepted` + 1 tokens.

    The last round of a sequence counts only what was emitted: a draft behind the end of the answer was never wanted, so
    it is neither drafted nor accepted here.
    """

    drafted: int
    """Drafts that could have been accepted."""
    accepted: int
    """Drafts that were: the longest correct prefix."""

    @property
    def emitted(self) -> int:
        """Tokens this round added to the answer: the accepted drafts and the target's own next token."""
        return self.accepted + 1


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over sequences.

    Attributes:
        micro: Emitted ÷ rounds over all sequences; 0.0 without a round.
        macro: Mean over sequences (with at least one round) of emitted ÷ rounds.
        emitted, rounds: The counts.
        by_slot: By draft slot 1, 2, …: P(accepted | all before it accepted); None where no round got that far.
    """

    micro: float
    macro: float
    emitted: int
    rounds: int
    by_slot: tuple[float | None, ...]


def summarise(rounds_by_sequence: Sequence[Sequence[Round]], *, block_size: int) -> Acceptance:
    """Summarise the rounds of several sequences decoded with blocks of `block_size` (anchor included)."""
    tried, passed = [0] * (block_size - 1), [0] * (block_size - 1)
    means, emitted, count = [], 0, 0
    for rounds in rounds_by_sequence:
        if not rounds:
            continue
        tokens = sum(r.emitted for r in rounds)
        emitted, count = emitted + tokens, count + len(rounds)
        means.append(tokens / len(rounds))
        for drafted, accepted in rounds:
            for slot in range(min(accepted + 1, drafted)):
                tried[slot] += 1
                passed[slot] += slot < accepted
    return Acceptance(
        micro=emitted / count if count else 0.0,
        macro=sum(means) / len(means) if means else 0.0,
        emitted=emitted,
        rounds=count,
        by_slot=tuple(p / t if t else None for p, t in zip(passed, tried, strict=True)),
    )


def expected_emitted(by_slot: Sequence[float | None], block_size: int) -> float:
    """Tokens a round of `block_size` (anchor included) is expected to emit, given conditional acceptance by slot.

    A slot nobody reached counts as never accepted.
    """
    total, reach = 1.0, 1.0
    for probability in by_slot[: block_size - 1]:
        reach *= probability or 0.0
        total += reach
    return total


def choose_block_length(round_s: Mapping[int, float], by_slot: Sequence[float | None]) -> tuple[int, float]:
    """Choose the block length that emits most tokens a second.

    Args:
        round_s: Seconds that a whole round takes (draft, verification, bookkeeping) by block length, anchor included;
            length 1 is plain decoding.
        by_slot: Conditional acceptance by slot, as `Acceptance.by_slot`. Measured at the trained block size; a shorter
            block accepts about as much in the slots it has (DFlash, section on block sizes).

    Returns:
        The length and its expected tokens a second. The shorter of equals.
    """
    if not round_s:
        raise ValueError("no block length to choose from")
    speed = {length: expected_emitted(by_slot, length) / seconds for length, seconds in round_s.items()}
    best = max(sorted(speed), key=speed.__getitem__)
    return best, speed[best]
