"""Keeps received features on the host, so that later epochs need no target.

A `BatchSource` around another one: a batch whose every sequence is kept, from one target version, is put together here
and never requested; any other goes to the inner source and is kept, row by row, when it arrives. On a machine where the
target is the slow side, an epoch is then paid for once.

Owns bytes, bounded by `max_bytes`: when it is full, new sequences are simply not kept (epochs come round, so evicting
the oldest would evict what is needed next). Must never mix versions in a batch, keep anything not finite, or change the
order. Off by default, since it trades one guarantee: a sequence's features are then those of the batch it first came
in, and a resumed run fetches them in other batches, where the target's products may round otherwise in the last bit.

Only features of the version served now are kept and put together: once another one is known to be served (its first
batch begins to arrive, or its front says so), everything is forgotten and asked for anew. What was put together before
counts as outstanding and is trained, with its own version's head, as a batch on its way would be.

Used by one thread, like the source it wraps.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drafter_trainer.feed import BatchSource, ReceivedSlot
from drafter_trainer.types import Version

__all__ = ["CachedSource", "KeptSlot"]

_TOKEN_BYTES = 4  # int32


@dataclass
class KeptSlot:
    """A batch put together from kept sequences."""

    position: int
    payload: memoryview
    version_number: int
    version_digest: str
    replica_index: int
    finite: bool = True


@dataclass(frozen=True)
class _Asked:
    position: int
    keys: tuple[bytes, ...]
    lengths: tuple[int, ...]


class CachedSource:
    """A batch source that remembers.

    Args:
        inner: Where unknown batches come from.
        row_bytes: Bytes of one token's features.
        max_bytes: Most bytes kept.
        max_outstanding: Batches that may be submitted and not released, kept ones included.
        served_version: Says which version is served now; None when nobody knows.
    """

    def __init__(
        self,
        inner: BatchSource,
        *,
        row_bytes: int,
        max_bytes: int,
        max_outstanding: int,
        served_version: Callable[[], Version | None],
    ) -> None:
        self._inner = inner
        self._row_bytes = row_bytes
        self._max_bytes = max_bytes
        self._max_outstanding = max_outstanding
        self._served_version = served_version
        self._version: Version | None = None
        self._kept: dict[bytes, bytes] = {}
        self._kept_bytes = 0
        self._queue: collections.deque[_Asked | KeptSlot] = collections.deque()
        self._taken = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes held now."""
        return self._kept_bytes

    @property
    def free_slots(self) -> int:
        """Requests that may be submitted now; whether they need the inner source is known only then."""
        return min(self._inner.free_slots, self._max_outstanding - len(self._queue) - self._taken)

    def submit(self, *, position: int, lengths: Sequence[int], token_ids: bytes) -> None:
        """Asks for the next batch; see `BatchSource`."""
        self._look_at_version()
        keys = _sequence_keys(lengths, token_ids)
        kept = self._put_together(position, keys)
        if kept is not None:
            self._queue.append(kept)
            return
        self._inner.submit(position=position, lengths=lengths, token_ids=token_ids)
        self._queue.append(_Asked(position, keys, tuple(lengths)))

    def take(self) -> ReceivedSlot:
        """The next batch in the order of submission; see `BatchSource`."""
        item = self._queue.popleft()
        self._taken += 1
        if isinstance(item, KeptSlot):
            return item
        slot: ReceivedSlot = self._inner.take()
        self._look_at_version()
        if slot.finite and self._version is not None and slot.version_digest == self._version.digest:
            self._keep(slot, item)
        return slot

    def release(self, slot: ReceivedSlot) -> None:
        """The slot may be reused."""
        self._taken -= 1
        if not isinstance(slot, KeptSlot):
            self._inner.release(slot)

    def take_asked_again(self) -> int:
        """See `BatchSource`."""
        return self._inner.take_asked_again()

    def _look_at_version(self) -> None:
        served = self._served_version()
        if served == self._version:
            return
        if self._version is not None and served is not None and served.digest != self._version.digest:
            self._kept.clear()
            self._kept_bytes = 0
        self._version = served

    def _put_together(self, position: int, keys: Sequence[bytes]) -> KeptSlot | None:
        if self._version is None or any(key not in self._kept for key in keys):
            return None
        payload = memoryview(bytearray().join(self._kept[key] for key in keys))
        return KeptSlot(position, payload, *self._version, replica_index=-1)

    def _keep(self, slot: ReceivedSlot, asked: _Asked) -> None:
        start = 0
        for key, length in zip(asked.keys, asked.lengths, strict=True):
            size = length * self._row_bytes
            if key not in self._kept and self._kept_bytes + size <= self._max_bytes:
                self._kept[key] = bytes(slot.payload[start : start + size])
                self._kept_bytes += size
            start += size


def _sequence_keys(lengths: Sequence[int], token_ids: bytes) -> tuple[bytes, ...]:
    """One key a sequence: causal attention makes its features a function of its tokens alone."""
    keys, start = [], 0
    for length in lengths:
        stop = start + length * _TOKEN_BYTES
        keys.append(hashlib.blake2b(token_ids[start:stop], digest_size=16).digest())
        start = stop
    return tuple(keys)
