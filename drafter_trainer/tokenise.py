"""JSON Lines to samples, row by row, on one process or several.

Owns what becomes of a row: its samples, cut to length and checked, or the reason why there are none. A row never
raises: whatever it holds is counted. Order is that of the source, with any number of workers, and a bounded number of
rows is on the way.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from drafter_trainer.conversations import MALFORMED, DroppedError, DropReason, parse_row
from drafter_trainer.templates import ChatTokenizer, TokenizedSample
from drafter_trainer.tokenizer import load_tokenizer

__all__ = ["CHUNK_ROWS", "PrepareSettings", "RowOutcome", "RowTokenizer", "tokenise_rows"]

# Large enough that handing a chunk to a process costs nothing beside tokenising it, small enough for steady progress.
CHUNK_ROWS = 128
_CHUNKS_AHEAD_PER_WORKER = 4
_MAX_EXAMPLE_CHARS = 160


@dataclass(frozen=True)
class PrepareSettings:
    """What decides the samples besides source and tokenizer, as in the config's data section."""

    max_length_tokens: int
    overlong: str = "truncate"
    min_supervised_tokens: int = 2
    rewritten_history: str = "split"
    template_options: Mapping[str, Any] = field(default_factory=dict)
    role_aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass
class RowOutcome:
    """What became of one row."""

    row: int
    samples: list[TokenizedSample] = field(default_factory=list)
    truncated: int = 0
    malformed: bool = False
    """Whether the row is no conversation, whatever the settings."""
    dropped: list[tuple[str, str]] = field(default_factory=list)
    """Reason and example."""

    def drop(self, error: DroppedError) -> None:
        """Notes a row or sample that isn't trained on. Unknown roles are told apart: each may want an alias."""
        self.malformed = self.malformed or error.reason in MALFORMED
        detail = " ".join(error.detail.split())[:_MAX_EXAMPLE_CHARS]
        reason = f"{error.reason}: {detail}" if error.reason is DropReason.UNKNOWN_ROLE else str(error.reason)
        self.dropped.append((reason, detail))


class RowTokenizer:
    """One row to its samples: parse, render, tokenise, cut, check."""

    def __init__(self, tokenizer: Path, settings: PrepareSettings) -> None:
        self._settings = settings
        self._chat = ChatTokenizer(
            load_tokenizer(tokenizer),
            options=settings.template_options,
            split_rewritten=settings.rewritten_history == "split",
        )

    def __call__(self, row: int, line: bytes) -> RowOutcome:
        """What becomes of the row; never raises for what a row holds."""
        outcome = RowOutcome(row)
        try:
            conversation = parse_row(line, role_aliases=self._settings.role_aliases)
            samples = self._chat.tokenize(conversation)
        except DroppedError as error:
            outcome.drop(error)
            return outcome
        for sample in samples:
            try:
                fitted = self._fit(sample)
            except DroppedError as error:
                outcome.drop(error)
            else:
                outcome.samples.append(fitted)
                outcome.truncated += fitted is not sample
        return outcome

    def _fit(self, sample: TokenizedSample) -> TokenizedSample:
        limit, length = self._settings.max_length_tokens, len(sample.input_ids)
        fitted = sample
        if length > limit:
            if self._settings.overlong == "drop":
                raise DroppedError(DropReason.TOO_LONG, f"{length} tokens")
            fitted = TokenizedSample(sample.input_ids[:limit], sample.loss_mask[:limit])
        supervised = sum(fitted.loss_mask)
        if supervised < self._settings.min_supervised_tokens:
            # Said apart: with supervision beyond the limit, more of it would not help.
            late = sum(sample.loss_mask) >= self._settings.min_supervised_tokens
            if late:
                raise DroppedError(DropReason.ANSWER_TOO_LATE, f"token {sample.loss_mask.index(True)} of {length}")
            raise DroppedError(DropReason.TOO_FEW_SUPERVISED, f"{supervised} of {len(fitted.loss_mask)} tokens")
        if not any(a and b for a, b in pairwise(fitted.loss_mask)):
            raise DroppedError(DropReason.NO_ADJACENT_SUPERVISED, f"{supervised} supervised tokens")
        return fitted


def tokenise_rows(
    stream: Iterable[bytes], tokenizer: Path, settings: PrepareSettings, num_workers: int
) -> Iterator[RowOutcome]:
    """Outcomes in the order of rows. With several workers, a bounded number of chunks is on the way."""
    chunks = _chunked(enumerate(stream))
    if num_workers == 1:
        tokenise_row = RowTokenizer(tokenizer, settings)
        for chunk in chunks:
            yield from (tokenise_row(row, line) for row, line in chunk)
        return
    # Spawned: a fork would copy the locks of whatever threads the tokenizer or torch have started.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(tokenizer, settings)) as pool:
        pending: deque[Future[list[RowOutcome]]] = deque()
        for chunk in chunks:
            pending.append(pool.submit(_work, chunk))
            if len(pending) >= num_workers * _CHUNKS_AHEAD_PER_WORKER:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()


# A pool's tasks can't carry the tokenizer: each worker process builds its own, once.
_worker: list[RowTokenizer] = []


def _start_worker(tokenizer: Path, settings: PrepareSettings) -> None:
    _worker.append(RowTokenizer(tokenizer, settings))


def _work(chunk: list[tuple[int, bytes]]) -> list[RowOutcome]:
    return [_worker[0](row, line) for row, line in chunk]


def _chunked(rows: Iterable[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    chunk: list[tuple[int, bytes]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == CHUNK_ROWS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
