"""JSON Lines to a prepared dataset: streaming, in memory that doesn't grow with the file.

Owns the pass over the source, what is counted on the way, and the decision whether a prepared directory is still good:
its recipe (digest of the source, of every tokenizer file, and the settings) must be the same.

It must never leave a half-written directory, and never let two processes prepare the same one: a lock file beside it is
held while preparing, and the kernel releases it when its holder dies.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from drafter_trainer.config import TrainerConfig
from drafter_trainer.dataset import FORMAT_VERSION, DatasetMeta, DatasetWriter, DropCount, TokenDataset, is_prepared
from drafter_trainer.errors import UserError
from drafter_trainer.tokenise import CHUNK_ROWS, PrepareSettings, tokenise_rows
from drafter_trainer.tokenizer import TokenizerFacts, file_digest, load_tokenizer, tokenizer_digests

__all__ = [
    "PrepareSettings",
    "Progress",
    "check_longest_sample",
    "open_configured_dataset",
    "open_dataset",
    "prepare",
    "prepare_settings",
]

logger = logging.getLogger(__name__)

_LOCK_POLL_S = 0.2
# Roles are data: a file that has nonsense there must not make the summary grow with it.
_MAX_REASONS = 64


@dataclass(frozen=True)
class Progress:
    """How far preparation is."""

    rows: int
    samples: int
    bytes_done: int
    bytes_total: int


def prepare_settings(config: TrainerConfig) -> PrepareSettings:
    """The part of the data section that decides samples."""
    values: dict[str, Any] = {field.name: getattr(config.data, field.name) for field in fields(PrepareSettings)}
    return PrepareSettings(**values | {"max_length_tokens": config.max_length_tokens})


def open_configured_dataset(
    config: TrainerConfig, *, on_progress: Callable[[Progress], None] = lambda _: None
) -> TokenDataset:
    """`open_dataset` with the settings of the data section."""
    data = config.data
    return open_dataset(
        data.path,
        tokenizer=data.tokenizer,
        settings=prepare_settings(config),
        prepared_dir=data.prepared_dir,
        num_workers=data.num_workers,
        max_dropped_ratio=data.max_dropped_ratio,
        wait_timeout_s=data.wait_timeout_s,
        on_progress=on_progress,
    )


def open_dataset(
    source: Path | None,
    *,
    tokenizer: Path | None,
    settings: PrepareSettings,
    prepared_dir: Path | None = None,
    num_workers: int = 1,
    max_dropped_ratio: float = 1.0,
    wait_timeout_s: float = 3600.0,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> TokenDataset:
    """The dataset of `source`: opened if it is prepared and still good, prepared otherwise.

    Args:
        source: JSON Lines, or a prepared directory, which is then taken as it is.
        tokenizer: The target's directory. With a prepared directory it's optional, and checked if given.
        settings: For preparing; a prepared directory has its own.
        prepared_dir: Where to prepare; by default `<source>.prepared`.
        num_workers: Processes that tokenise.
        max_dropped_ratio: Which part of the rows may be no conversations; more is refused once all were read.
        wait_timeout_s: How long to wait for another process that prepares the same.
        on_progress: Called now and then while preparing.

    Raises:
        UserError: Anything wrong with what was given, a source without a usable row included.
    """
    source = _existing(source)
    if source.is_dir():
        return _open_prepared(source, tokenizer)
    recipe = _recipe(source, tokenizer, settings)
    directory = prepared_dir or source.with_name(f"{source.name}.prepared")
    with _locked(directory, wait_timeout_s):
        if is_prepared(directory):
            changed = _differences(_recorded_recipe(directory), recipe)
            if not changed:
                return TokenDataset(directory)
            logger.warning("%s is stale (%s): preparing again", directory, "; ".join(changed))
        assert tokenizer is not None, "_recipe refuses to go on without one"
        prepare(
            source,
            directory,
            recipe=recipe,
            tokenizer=tokenizer,
            settings=settings,
            num_workers=num_workers,
            max_dropped_ratio=max_dropped_ratio,
            on_progress=on_progress,
        )
    return TokenDataset(directory)


def _existing(source: Path | None) -> Path:
    """Refuses a source that is not given or not there."""
    if source is None:
        raise UserError("data.path", None, "needed; give JSON Lines of conversations or a prepared directory")
    if not source.exists():
        raise UserError("data.path", source, "no such file; give JSON Lines of conversations or a prepared directory")
    return source


def check_longest_sample(dataset: TokenDataset, *, max_tokens: int) -> None:
    """Refuses a batch size (`batch.max_tokens`) that some sample exceeds.

    Raises:
        UserError: Names both lengths.
    """
    longest = dataset.meta.longest_tokens
    if longest > max_tokens:
        fix = f"the longest sample has {longest} tokens; give at least that, or prepare again"
        raise UserError("batch.max_tokens", max_tokens, fix)


def prepare(
    source: Path,
    directory: Path,
    *,
    recipe: Mapping[str, Any],
    tokenizer: Path,
    settings: PrepareSettings,
    num_workers: int = 1,
    max_dropped_ratio: float = 1.0,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> DatasetMeta:
    """Tokenises `source` into `directory`, whatever is there now. See `open_dataset` for the arguments."""
    facts = TokenizerFacts.of(load_tokenizer(tokenizer))
    bytes_total = source.stat().st_size
    dropped: dict[str, DropCount] = {}
    rows = truncated = malformed = 0
    with DatasetWriter(directory) as writer, source.open("rb") as stream:
        for outcome in tokenise_rows(stream, tokenizer, settings, num_workers):
            rows = outcome.row + 1
            truncated += outcome.truncated
            malformed += outcome.malformed
            for sample in outcome.samples:
                writer.add(sample.input_ids, sample.loss_mask, row=outcome.row)
            for reason, example in outcome.dropped:
                key = reason if reason in dropped or len(dropped) < _MAX_REASONS else "other reasons"
                dropped.setdefault(key, DropCount(first_row=outcome.row, example=example)).count += 1
            if rows % CHUNK_ROWS == 0:
                on_progress(Progress(rows, writer.samples, stream.tell(), bytes_total))
        on_progress(Progress(rows, writer.samples, bytes_total, bytes_total))
        _log_dropped(dropped, rows)
        if writer.samples == 0:
            raise UserError(
                "data.path",
                source,
                f"no usable sample in {rows} rows{_summary(dropped)}; give conversations with answers",
            )
        if malformed > max_dropped_ratio * rows:
            fix = f"{malformed} of {rows} rows are no conversations{_summary(dropped)}; mend them, or raise this"
            raise UserError("data.max_dropped_ratio", max_dropped_ratio, fix)
        return writer.finish(recipe=recipe, tokenizer=facts, rows=rows, truncated=truncated, dropped=dropped)


def _open_prepared(directory: Path, tokenizer: Path | None) -> TokenDataset:
    dataset = TokenDataset(directory)
    if tokenizer is not None:
        now = tokenizer_digests(tokenizer)
        changed = _differences({"tokenizer": dataset.meta.recipe.get("tokenizer")}, {"tokenizer": now})
        if changed:
            raise UserError(
                "data.tokenizer",
                tokenizer,
                f"isn't what {directory} was made with ({'; '.join(changed)}); prepare again",
            )
    return dataset


def _recipe(source: Path, tokenizer: Path | None, settings: PrepareSettings) -> dict[str, Any]:
    if tokenizer is None:
        raise UserError("data.tokenizer", None, "needed to turn conversations into tokens; give the target's directory")
    return {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer_digests(tokenizer),
        "settings": asdict(settings),
        "source": file_digest(source),
    }


def _recorded_recipe(directory: Path) -> dict[str, Any]:
    """The recipe on record; empty, hence different, where the directory can't be read any more."""
    try:
        return TokenDataset(directory).meta.recipe
    except UserError:
        return {}


def _differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What changed, in words."""
    changed: list[str] = []
    for key, value in now.items():
        old = recorded.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            names = [name for name in sorted({*value, *old}) if value.get(name) != old.get(name)]
            changed += [f"{key}: {name} changed" for name in names]
        elif old != value:
            changed.append(f"{key} changed")
    return changed


@contextmanager
def _locked(directory: Path, timeout_s: float) -> Iterator[None]:
    lock_path = directory.with_name(f".{directory.name}.lock")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_path.open("w")
    except OSError as error:
        raise UserError(
            "data.prepared_dir", directory, f"can't be written ({error.strerror}); give another directory"
        ) from error
    with lock:
        deadline, told = time.monotonic() + timeout_s, False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise UserError(
                        "data.wait_timeout_s", timeout_s, f"another process still prepares {directory}; wait longer"
                    ) from None
                if not told:
                    logger.info("waiting for another process that prepares %s", directory)
                    told = True
                time.sleep(_LOCK_POLL_S)
        yield


def _log_dropped(dropped: Mapping[str, DropCount], rows: int) -> None:
    for reason, count in dropped.items():
        example = f": {count.example}" if count.example else ""
        logger.warning(
            "dropped %d (of %d rows): %s; first in row %d%s", count.count, rows, reason, count.first_row + 1, example
        )


def _summary(dropped: Mapping[str, DropCount]) -> str:
    parts = [f"{count.count} x {reason}" for reason, count in dropped.items()]
    return f" ({', '.join(parts)})" if parts else ""
