"""One trainer rank that throws away what it receives: the product's own client, without a trainer."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.options import BenchError
from drafter_trainer.client.delivery import Delivery
from drafter_trainer.client.terms import Patience, StreamTerms
from drafter_trainer.errors import TrainerError

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
    """Asks for batches and gives every slot back unread.

    Attributes:
        delivery: the client.
    """

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self._asked = 0

    def fetch(self, works: Sequence[Work]) -> float:
        """Asks for these batches, as many at a time as the ring has slots, and takes them all.

        Nothing is under way before or after, so time and CPU measured around it belong to these batches.

        Returns:
            Seconds.
        """
        began_s = time.perf_counter()
        waiting = iter(works)
        for _ in works:
            for work in itertools.islice(waiting, self.delivery.free_slots):
                self._submit(work)
            self._take()
        return time.perf_counter() - began_s

    def arrivals_until(self, end_s: float, work: Work) -> list[float]:
        """Keeps the whole ring asked for; returns when each batch came, up to this point of the monotonic clock."""
        times_s: list[float] = []
        while not times_s or times_s[-1] < end_s:
            while self.delivery.free_slots:
                self._submit(work)
            self._take()
            times_s.append(time.monotonic())
        return times_s

    def _submit(self, work: Work) -> None:
        self.delivery.submit(position=self._asked, lengths=work.lengths, token_ids=work.token_ids)
        self._asked += 1

    def _take(self) -> None:
        self.delivery.release(self.delivery.take())


@contextmanager
def discarding_rank(front: str, terms: StreamTerms, first: Work) -> Iterator[DiscardingRank]:
    """Runs a rank's client for the time of a block; `first` has been received when it begins.

    Raises:
        BenchError: the client gave up.
    """
    try:
        with Delivery([front], terms=terms, patience=Patience()) as delivery:
            rank = DiscardingRank(delivery)
            rank.fetch([first])
            yield rank
    except TrainerError as error:
        raise BenchError(str(error)) from error
