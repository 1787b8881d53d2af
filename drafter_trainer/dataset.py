"""Tokenised samples on disk: one flat file a column, memory-mapped.

Owns the format and its checks. Opening costs the same for a thousand samples and a hundred million; only what is read
is paged in. A directory is written beside its place and renamed when complete, so a half-written one is never opened.

    tokens.bin     int32 [T]      all samples, one after the other
    loss_mask.bin  uint8 [T]      1 on supervised tokens
    offsets.bin    int64 [N+1]    where each sample begins; the last is T
    rows.bin       int64 [N]      source row of each sample, from 0, to find it again
    meta.json                     counts, what was dropped and why, and:
      fingerprint    digest of all samples: equal fingerprints train the same
      recipe         what they were made from: a difference means the directory is stale
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from drafter_trainer.errors import UserError
from drafter_trainer.tokenizer import TokenizerFacts

__all__ = ["DatasetMeta", "DatasetWriter", "DropCount", "TokenDataset", "is_prepared", "read_meta"]

# Raise when the files change meaning; older directories are then prepared again.
FORMAT_VERSION = 1

_META = "meta.json"
_COLUMNS: dict[str, np.dtype[Any]] = {
    "tokens.bin": np.dtype("<i4"),
    "loss_mask.bin": np.dtype("u1"),
    "offsets.bin": np.dtype("<i8"),
    "rows.bin": np.dtype("<i8"),
}


@dataclass
class DropCount:
    """How often one reason occurred."""

    count: int = 0
    first_row: int = 0
    """From 0."""
    example: str = ""
    """What the first one was about, if more can be said."""


@dataclass(frozen=True)
class DatasetMeta:
    """What meta.json holds."""

    format_version: int
    fingerprint: str
    recipe: dict[str, Any]
    tokenizer: TokenizerFacts
    rows: int
    """Rows of the source, dropped ones included."""
    samples: int
    tokens: int
    supervised_tokens: int
    longest_tokens: int
    largest_token_id: int
    truncated: int
    """Samples that were cut to the longest allowed."""
    dropped: dict[str, DropCount]
    """By reason."""

    def to_json(self) -> str:
        """As it is written."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> DatasetMeta:
        """As it was written; raises ValueError, TypeError or KeyError for anything else."""
        fields = json.loads(text)
        fields["tokenizer"] = TokenizerFacts(**fields["tokenizer"])
        fields["dropped"] = {reason: DropCount(**count) for reason, count in fields["dropped"].items()}
        return cls(**fields)


# Tokens counted at one time: bounds memory whatever the dataset's size.
_COUNTED_AT_ONCE = 1 << 20


class TokenDataset:
    """A prepared dataset, read only. Pickles as its path, so each process maps it anew."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.meta = read_meta(directory)
        self._tokens = self._map("tokens.bin", self.meta.tokens)
        self._loss_mask = self._map("loss_mask.bin", self.meta.tokens)
        self._offsets = self._map("offsets.bin", self.meta.samples + 1)
        self._rows = self._map("rows.bin", self.meta.samples)

    def __reduce__(self) -> tuple[type[TokenDataset], tuple[Path]]:
        """Rebuilds from the path."""
        return (TokenDataset, (self.directory,))

    def __len__(self) -> int:
        """Samples."""
        return self.meta.samples

    @property
    def fingerprint(self) -> str:
        """Digest of all samples."""
        return self.meta.fingerprint

    def lengths(self, sample_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of each of these samples, int64."""
        lengths: npt.NDArray[np.int64] = self._offsets[sample_ids + 1] - self._offsets[sample_ids]
        return lengths

    def sample(self, sample_id: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Token ids int32 and loss mask bool of one sample; views into the files."""
        span = slice(int(self._offsets[sample_id]), int(self._offsets[sample_id + 1]))
        return self._tokens[span], self._loss_mask[span].view(np.bool_)

    def frequent_tokens(self, count: int) -> npt.NDArray[np.int64]:
        """The `count` tokens that are supervised most often, or as many as there are; ascending. Reads all samples."""
        counts = np.zeros(self.meta.largest_token_id + 1, dtype=np.int64)
        for start in range(0, self.meta.tokens, _COUNTED_AT_ONCE):
            part = slice(start, start + _COUNTED_AT_ONCE)
            supervised = self._tokens[part][self._loss_mask[part].view(np.bool_)]
            counts += np.bincount(supervised, minlength=len(counts))
        by_count = np.argsort(-counts, kind="stable")[: min(count, int((counts > 0).sum()))]
        return np.sort(by_count)

    def source_row(self, sample_id: int) -> int:
        """Row of the source, from 0, that a sample was made from."""
        return int(self._rows[sample_id])

    def _map(self, name: str, count: int) -> npt.NDArray[Any]:
        file, dtype = self.directory / name, _COLUMNS[name]
        size = file.stat().st_size if file.exists() else 0
        if size != count * dtype.itemsize:
            raise UserError(
                "data.path", file, f"has {size} bytes where {count * dtype.itemsize} are expected; prepare it again"
            )
        # As a plain array: numpy's memmap class makes every slice slower and holds the file the same way.
        return np.asarray(np.memmap(file, dtype=dtype, mode="r"))


def is_prepared(path: Path) -> bool:
    """Whether `path` is a directory that preparation completed."""
    return (path / _META).is_file()


def read_meta(directory: Path) -> DatasetMeta:
    """The meta data of a prepared directory.

    Raises:
        UserError: There is none, or it was written by another version.
    """
    try:
        text = (directory / _META).read_text()
        if json.loads(text).get("format_version") != FORMAT_VERSION:
            raise UserError("data.path", directory, f"isn't of format {FORMAT_VERSION}; prepare it again")
        return DatasetMeta.from_json(text)
    except OSError as error:
        raise UserError("data.path", directory, f"no prepared dataset ({error.strerror}); run prepare first") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError("data.path", directory / _META, "is damaged; prepare it again") from error


class DatasetWriter:
    """Writes samples one by one; the directory appears when `finish` is called, or not at all.

    A context manager: leaving it without `finish` removes everything written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.parent.mkdir(parents=True, exist_ok=True)
        self._partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        self._files: dict[str, BinaryIO] = {name: (self._partial / name).open("wb") for name in _COLUMNS}
        self._digest = hashlib.blake2b(digest_size=16)
        self.samples = self.tokens = self.supervised_tokens = self.longest_tokens = 0
        self.largest_token_id = -1
        self._write("offsets.bin", [0])

    def __enter__(self) -> DatasetWriter:
        """Nothing to do: opened on construction."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Removes what isn't finished."""
        self._close()
        shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, token_ids: list[int], loss_mask: list[bool], *, row: int) -> None:
        """Appends one sample made from source row `row`."""
        tokens = self._write("tokens.bin", token_ids)
        mask = self._write("loss_mask.bin", loss_mask)
        self._write("rows.bin", [row])
        self.samples += 1
        self.tokens += len(token_ids)
        offsets = self._write("offsets.bin", [self.tokens])
        for column in (offsets, tokens, mask):
            self._digest.update(column.tobytes())
        self.supervised_tokens += int(mask.sum())
        self.longest_tokens = max(self.longest_tokens, len(token_ids))
        self.largest_token_id = max(self.largest_token_id, int(tokens.max()))

    def finish(
        self,
        *,
        recipe: Mapping[str, Any],
        tokenizer: TokenizerFacts,
        rows: int,
        truncated: int,
        dropped: Mapping[str, DropCount],
    ) -> DatasetMeta:
        """Completes the directory and moves it to its place, over an older one if there is one."""
        meta = DatasetMeta(
            format_version=FORMAT_VERSION,
            fingerprint=self._digest.hexdigest(),
            recipe=dict(recipe),
            tokenizer=tokenizer,
            rows=rows,
            samples=self.samples,
            tokens=self.tokens,
            supervised_tokens=self.supervised_tokens,
            longest_tokens=self.longest_tokens,
            largest_token_id=self.largest_token_id,
            truncated=truncated,
            dropped=dict(dropped),
        )
        self._close()
        (self._partial / _META).write_text(meta.to_json())
        for file in self._partial.iterdir():
            _sync(file)
        self._partial.chmod(0o755)
        self._replace()
        return meta

    def _replace(self) -> None:
        """A directory can't be renamed over a full one: the old one steps aside first. Its readers keep their maps."""
        if self.directory.exists():
            aside = Path(tempfile.mkdtemp(prefix=f".{self.directory.name}.old.", dir=self.directory.parent))
            self.directory.rename(aside / "old")
            self._partial.rename(self.directory)
            shutil.rmtree(aside)
        else:
            self._partial.rename(self.directory)
        _sync(self.directory.parent)

    def _write(self, name: str, values: list[Any]) -> npt.NDArray[Any]:
        column = np.asarray(values, dtype=_COLUMNS[name])
        self._files[name].write(column.tobytes())
        return column

    def _close(self) -> None:
        for file in self._files.values():
            file.close()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
