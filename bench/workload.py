"""The batches of parts *stream* and *overlap*: conversations of mixed lengths as a trainer's plan cuts them.

Standard library only, so that every process makes the same ones from the same few numbers.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Workload"]


@dataclass(frozen=True)
class Workload:
    """Some batches, made anew by every process that needs them.

    Lengths are drawn log-uniformly, sorted within one window (as the plan does, so that little is padded), and cut into
    batches of nearly equal token counts.

    Attributes:
        batches: how many.
        batch_tokens: most tokens of a batch, padding included.
        shortest: tokens of the shortest sequence.
        longest: of the longest.
        vocab_size: ids are below it.
    """

    batches: int
    batch_tokens: int
    shortest: int
    longest: int
    vocab_size: int

    def sequences(self) -> list[list[list[int]]]:
        """Returns the token ids of each sequence of each batch."""
        generator = random.Random(20240607)
        lengths: list[int] = []
        while len(self._cut(sorted(lengths))) <= self.batches:
            lengths.append(round(self.shortest * (self.longest / self.shortest) ** generator.random()))
        return [
            [[generator.randrange(self.vocab_size) for _ in range(length)] for length in batch]
            for batch in self._cut(sorted(lengths))[: self.batches]
        ]

    def as_json(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return asdict(self)

    def _cut(self, lengths: list[int]) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for length in lengths:
            if batches[-1] and (len(batches[-1]) + 1) * length > self.batch_tokens:
                batches.append([])
            batches[-1].append(length)
        return batches
