"""The endless order of training: which samples make up the micro-batch at each position.

Owns order and accounting. A plan is a pure function of (dataset fingerprint, seed, batch settings); it doesn't know
ranks, servers or time. One integer says where a run is. Rank r of R takes positions r, r + R, ...

How it is built, epoch by epoch, in memory that doesn't grow with the dataset:

    1. A keyed permutation orders the epoch's samples; any stretch of it can be computed alone.
    2. That order is cut into windows of `shuffle_window_samples`.
    3. Inside a window samples are sorted by length (ties keep the shuffled order) and cut greedily into micro-batches
       of at most `max_tokens` tokens and `max_sequences` sequences: the target then pads little.
    4. The window's micro-batches are shuffled.

An epoch's last window may be smaller, and every window's last micro-batch; no micro-batch spans two epochs. All
randomness is integer hashing written here: a library's generator may change its stream between versions, a resumed run
must not.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from drafter_trainer.types import MicroBatch

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

# Enough for the round function below to leave no visible order (tests measure it); 4 is the textbook minimum.
_FEISTEL_ROUNDS = 6
# Windows kept built: the current one, and neighbours for ranks and requests that run ahead.
_WINDOWS_KEPT = 4


class SampleSource(Protocol):
    """What a plan needs of a dataset; `TokenDataset` is one."""

    @property
    def fingerprint(self) -> str:
        """Digest of everything that decides the samples."""

    def __len__(self) -> int: ...

    def lengths(self, sample_ids: Int64Array) -> Int64Array:
        """Tokens of each of these samples, int64."""

    def sample(self, sample_id: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Token ids and loss mask of one sample, both of its length."""


@dataclass(frozen=True)
class PlanSettings:
    """The batch settings a plan depends on."""

    seed: int
    max_tokens: int
    max_sequences: int
    shuffle_window_samples: int


@dataclass(frozen=True)
class PlanEntry:
    """One position of the plan, without tokens."""

    position: int
    epoch: int
    sample_ids: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all sequences together."""
        return sum(self.lengths)


@dataclass(frozen=True)
class _Window:
    sample_ids: Int64Array
    """Sorted by length."""
    cuts: list[int]
    """Borders of the micro-batches in `sample_ids`."""
    order: list[int]
    """Which of them is trained first, second, ..."""

    def __len__(self) -> int:
        return len(self.order)

    def micro_batch(self, index: int) -> Int64Array:
        cut = self.order[index]
        return self.sample_ids[self.cuts[cut] : self.cuts[cut + 1]]


class Plan:
    """Positions to micro-batches; random access, no state that matters.

    Not for use from two threads at a time; it pickles, so a process can have its own.
    """

    def __init__(self, source: SampleSource, settings: PlanSettings) -> None:
        if len(source) == 0:
            raise ValueError("a plan needs at least one sample")
        self.source = source
        self.settings = settings
        self._windows: dict[tuple[int, int], _Window] = {}
        # Per epoch: micro-batches before each of its windows, as far as counted. Grows by one integer a window.
        self._counted: list[list[int]] = []

    @property
    def identity(self) -> dict[str, Any]:
        """What the order depends on. Equal identities give equal plans; a checkpoint holds it."""
        return {"dataset": self.source.fingerprint, **vars(self.settings)}

    def micro_batch(self, position: int) -> MicroBatch:
        """The micro-batch at `position` >= 0, tokens read from the source."""
        # Counting an order (steps, --print-plan) needs no torch; only the tensors do.
        import torch  # noqa: PLC0415

        entry = self.entry(position)
        samples = [self.source.sample(sample_id) for sample_id in entry.sample_ids]
        return MicroBatch(
            position=position,
            epoch=entry.epoch,
            sample_ids=entry.sample_ids,
            lengths=entry.lengths,
            input_ids_T=torch.from_numpy(np.concatenate([ids for ids, _ in samples]).astype(np.int64)),
            loss_mask_T=torch.from_numpy(np.concatenate([mask for _, mask in samples]).astype(np.bool_)),
        )

    def entry(self, position: int) -> PlanEntry:
        """Which samples are at `position` >= 0."""
        if position < 0:
            raise ValueError(f"position {position} is negative")
        epoch, within = 0, position
        while within >= (count := self._count_up_to(epoch, within)):
            within -= count
            epoch += 1
        starts = self._counted[epoch]
        window = bisect_right(starts, within) - 1
        sample_ids = self._window(epoch, window).micro_batch(within - starts[window])
        lengths = self.source.lengths(sample_ids)
        return PlanEntry(position, epoch, tuple(sample_ids.tolist()), tuple(lengths.tolist()))

    def entries(self, start: int = 0, *, step: int = 1) -> Iterator[PlanEntry]:
        """Positions start, start + step, ... without end."""
        position = start
        while True:
            yield self.entry(position)
            position += step

    def micro_batches_in(self, epochs: int) -> int:
        """Micro-batches in the first `epochs` epochs: the position at which the next one begins."""
        return sum(self._count_all(epoch) for epoch in range(epochs))

    def steps_in(self, epochs: int, *, micro_batches_per_step: int) -> int:
        """Optimizer steps that cover the first `epochs` epochs; the last step may be partial."""
        return -(-self.micro_batches_in(epochs) // micro_batches_per_step)

    def steps_per_epoch(self, *, micro_batches_per_step: int) -> int:
        """Steps that cover the first epoch. Later ones may differ by a few, as other samples share a window."""
        return self.steps_in(1, micro_batches_per_step=micro_batches_per_step)

    @property
    def _windows_per_epoch(self) -> int:
        return -(-len(self.source) // self.settings.shuffle_window_samples)

    def _count_all(self, epoch: int) -> int:
        return self._count_up_to(epoch, within=None)

    def _count_up_to(self, epoch: int, within: int | None) -> int:
        """Counts the epoch's windows until `within` lies in one (None: all of them); returns the count so far."""
        while len(self._counted) <= epoch:
            self._counted.append([0])
        starts = self._counted[epoch]
        while len(starts) <= self._windows_per_epoch and (within is None or starts[-1] <= within):
            starts.append(starts[-1] + len(self._window(epoch, len(starts) - 1)))
        return starts[-1]

    def _window(self, epoch: int, window: int) -> _Window:
        built = self._windows.get((epoch, window))
        if built is None:
            built = self._build_window(epoch, window)
            while len(self._windows) >= _WINDOWS_KEPT:
                del self._windows[next(iter(self._windows))]
            self._windows[epoch, window] = built
        return built

    def _build_window(self, epoch: int, window: int) -> _Window:
        size = self.settings.shuffle_window_samples
        ranks = np.arange(window * size, min((window + 1) * size, len(self.source)), dtype=np.int64)
        sample_ids = permute(ranks, count=len(self.source), key=self._key("samples", epoch))
        lengths = self.source.lengths(sample_ids)
        by_length = np.argsort(lengths, kind="stable")
        cuts = cut_by_tokens(
            lengths[by_length], max_tokens=self.settings.max_tokens, max_sequences=self.settings.max_sequences
        )
        order = hashed_order(len(cuts) - 1, key=self._key("window", epoch, window))
        return _Window(sample_ids[by_length], cuts, order)

    def _key(self, *parts: object) -> int:
        text = "\0".join(str(part) for part in (self.source.fingerprint, self.settings.seed, *parts))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def cut_by_tokens(lengths: Int64Array, *, max_tokens: int, max_sequences: int) -> list[int]:
    """Where to cut a row of lengths greedily: each piece has at most `max_tokens` tokens and `max_sequences` items.

    Returns:
        Borders of the pieces, ascending, from 0 to the number of lengths.
    """
    # A plain list: this loop runs a hundred thousand times an epoch, and numpy's searchsorted costs 10 x bisect here.
    ends = np.cumsum(lengths).tolist()
    cuts = [0]
    start, done = 0, 0
    while start < len(ends):
        stop = min(bisect_right(ends, done + max_tokens, start), start + max_sequences)
        if stop == start:
            raise ValueError(f"a sample of {int(lengths[start])} tokens exceeds max_tokens = {max_tokens}")
        cuts.append(stop)
        start, done = stop, ends[stop - 1]
    return cuts


def hashed_order(count: int, *, key: int) -> list[int]:
    """A permutation of 0..count-1 drawn by `key`, held in memory."""
    scores = _mix(np.arange(count, dtype=np.uint64) ^ np.uint64(key))
    order: list[int] = np.argsort(scores, kind="stable").tolist()
    return order


def permute(indices: Int64Array, *, count: int, key: int) -> Int64Array:
    """Images of `indices` under a permutation of 0..count-1 drawn by `key`, without holding the permutation.

    A Feistel network permutes the smallest even-bit domain that holds `count`; values that land outside are walked on
    until they fall inside, at most 4 times on average.
    """
    half_bits = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    values = indices.astype(np.uint64)
    outside = np.ones(len(values), dtype=np.bool_)
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits=half_bits, key=key)
        outside = values >= np.uint64(count)
    return values.astype(np.int64)


def _feistel(values: UInt64Array, *, half_bits: int, key: int) -> UInt64Array:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for round_index in range(_FEISTEL_ROUNDS):
        round_key = np.uint64((key + round_index * 0x9E3779B97F4A7C15) % 2**64)
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << shift) | right


def _mix(values: UInt64Array) -> UInt64Array:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
