"""One trainer rank that throws away what it receives: the product's own client, without a trainer."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from drafter_trainer.client.delivery import Delivery
from drafter_trainer.client.terms import Patience, StreamTerms

__all__ = ["DiscardingRank", "Work", "discarding_rank"]


@dataclass(frozen=True)
class Work:
    """One batch to ask for.

    Attributes:
        lengths: tokens of each sequence.
        token_ids: int32 little-endian, the sequences one after the other.
    """

    lengths: tuple[int, ...]
    token_ids: bytes

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> Work:
        """Returns the work of these token ids."""
        flat = [token for ids in sequences for token in ids]
        return cls(tuple(len(ids) for ids in sequences), struct.pack(f"<{len(flat)}i", *flat))

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)


class DiscardingRank:
    """Asks for batches, round and round a list of them, and gives every slot back unread.

    Attributes:
        delivery: the client.
    """

    def __init__(self, delivery: Delivery, works: Sequence[Work]) -> None:
        self.delivery = delivery
        self._works = works
        self._asked = self._taken = 0

    def fetch(self, count: int) -> float:
        """Asks for `count` batches, as many at a time as the ring has slots, and takes them all.

        Nothing is under way before or after, so time and CPU measured around it belong to these batches.

        Returns:
            Seconds.
        """
        began_s = time.perf_counter()
        for taken in range(count):
            while self.delivery.free_slots and self.outstanding < count - taken:
                self._submit()
            self._take()
        return time.perf_counter() - began_s

    def arrivals_until(self, end_s: float) -> list[float]:
        """Keeps the whole ring asked for; returns when each batch came, up to this point of the monotonic clock."""
        times_s: list[float] = []
        while not times_s or times_s[-1] < end_s:
            while self.delivery.free_slots:
                self._submit()
            self._take()
            times_s.append(time.monotonic())
        return times_s

    @property
    def outstanding(self) -> int:
        """Batches asked for and not taken."""
        return self._asked - self._taken

    def _submit(self) -> None:
        work = self._works[self._asked % len(self._works)]
        self.delivery.submit(position=self._asked, lengths=work.lengths, token_ids=work.token_ids)
        self._asked += 1

    def _take(self) -> None:
        self.delivery.release(self.delivery.take())
        self._taken += 1


@contextmanager
def discarding_rank(front: str, terms: StreamTerms, works: Sequence[Work]) -> Iterator[DiscardingRank]:
    """Runs a rank's client for the time of a block, its first batch received."""
    with Delivery([front], terms=terms, patience=Patience()) as delivery:
        rank = DiscardingRank(delivery, works)
        rank.fetch(1)
        yield rank
