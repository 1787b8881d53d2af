"""The book of outstanding requests: who has which, what failed how often, what may be sent next. Pure arithmetic.

Rules (tests cite the numbers):
  1. The first unassigned request in plan order goes first; one that waits out its back-off doesn't hold up the others.
  2. It goes to the replica with the fewest outstanding bytes, at most ``depth`` requests each, and not to the replica
     that failed it last while there is another. Among equals it's the one asked longest ago, and those never asked in
     an order of this rank's own: if every rank began with the first of many replicas, all would queue there.
  3. A failed attempt puts the request back with a doubled wait; ``max_attempts`` failures end the run.
  4. Losing a replica is a failed attempt of each request that it held.

Knows no sockets, no clock (times are passed in) and no torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterable

from drafter_trainer.client.terms import Patience


@dataclasses.dataclass(kw_only=True)
class Request:
    """One micro-batch on its way. ``sequence`` numbers submissions and is the request id on the wire."""

    sequence: int
    position: int
    slot: int
    lengths: tuple[int, ...]
    token_ids: bytes
    """int32, little-endian, the sequences one after the other."""
    payload_bytes: int
    holder: str | None = None
    avoid: str | None = None
    not_before_s: float = 0.0
    reasons: list[str] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return sum(self.lengths)


class ExhaustedError(Exception):
    """A request has failed as often as it may."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"position {request.position} failed {len(request.reasons)} times")
        self.request = request


class RequestBook:
    """Outstanding requests of one rank, over all replicas.

    Args:
        patience: Attempts and back-off.
        depth: Most requests of one replica at a time.
        rank_name: Sets this rank's own order of replicas; the same name gives the same order.
    """

    def __init__(self, patience: Patience, *, depth: int, rank_name: str = "") -> None:
        self._patience = patience
        self._depth = depth
        self._rank_name = rank_name
        self._turns = itertools.count(1)
        self._last_turns: dict[str, int] = {}
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Takes in a request; sequences ascend, save for one that is asked for again."""
        assert request.sequence not in self._requests
        in_order = not self._requests or next(reversed(self._requests)) < request.sequence
        self._requests[request.sequence] = request
        if not in_order:
            self._requests = dict(sorted(self._requests.items()))

    def held_by(self, replica: str) -> list[Request]:
        """What a replica owes, in plan order."""
        return [request for request in self._requests.values() if request.holder == replica]

    def choose(self, replicas: Iterable[str], *, now_s: float) -> tuple[Request, str] | None:
        """The next request to send and where to (rules 1 and 2), now assigned; None when there is nothing to send."""
        loads = {replica: [request.payload_bytes for request in self.held_by(replica)] for replica in replicas}
        open_loads = {replica: sum(sizes) for replica, sizes in loads.items() if len(sizes) < self._depth}
        if not open_loads:
            return None
        for request in self._requests.values():
            if request.holder is not None or request.not_before_s > now_s:
                continue
            eligible = {name: load for name, load in open_loads.items() if name != request.avoid or len(loads) == 1}
            if eligible:
                request.holder = min(eligible, key=lambda name: (eligible[name], *self._turn(name)))
                self._last_turns[request.holder] = next(self._turns)
                return request, request.holder
        return None

    def _turn(self, replica: str) -> tuple[int, int]:
        """Orders replicas of equal load."""
        return self._last_turns.get(replica, 0), zlib.crc32(f"{self._rank_name} {replica}".encode())

    def wait_s(self, *, now_s: float) -> float | None:
        """Time until the first back-off ends; None when no request waits for one."""
        waits = [r.not_before_s - now_s for r in self._requests.values() if r.holder is None]
        return min((wait_s for wait_s in waits if wait_s > 0), default=None)

    def find(self, sequence: int, *, holder: str) -> Request | None:
        """The request, if this replica owes it."""
        request = self._requests.get(sequence)
        return request if request is not None and request.holder == holder else None

    def complete(self, request: Request) -> None:
        """The batch has arrived whole."""
        del self._requests[request.sequence]

    def fail(self, request: Request, reason: str, *, now_s: float) -> None:
        """One attempt has failed (rule 3).

        Raises:
            ExhaustedError: It was the last one.
        """
        request.reasons.append(f"{request.holder}: {reason}")
        request.avoid, request.holder = request.holder, None
        if len(request.reasons) >= self._patience.max_attempts:
            raise ExhaustedError(request)
        request.not_before_s = now_s + self._patience.backoff_s(len(request.reasons))

    def lose(self, replica: str, reason: str, *, now_s: float) -> int:
        """A replica is gone (rule 4); returns how many requests it held."""
        self._last_turns.pop(replica, None)
        held = self.held_by(replica)
        for request in held:
            self.fail(request, reason, now_s=now_s)
        return len(held)

    def check_integrity(self) -> None:
        """Asserts the invariants: sequences ascend, nobody holds more than allowed."""
        sequences = list(self._requests)
        assert sequences == sorted(sequences)
        holders = [r.holder for r in self._requests.values() if r.holder is not None]
        assert all(holders.count(name) <= self._depth for name in set(holders))
