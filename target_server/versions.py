"""Which weights are served: a version is a number that only grows and a digest of the weights.

The digest is over every stored tensor's name, element type, shape and bytes, in the order of the names: the same
weights have the same digest however they are sharded and on whatever server. It must not depend on torch, so that a
process without a model can compute it. Hashing releases the interpreter's lock, so it runs beside a model's loading.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from target_wire.v1 import target_pb2

from target_server.checkpoint import StoredTensor, stored_tensors, weight_files

__all__ = ["DigestOfTensors", "Version", "VersionRecord", "files_mark", "tokenizer_digest", "weights_digest"]

_DIGEST_BYTES = 16
# What decides how text becomes token ids: vocabulary, merges, special tokens, chat template.
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


@dataclass(frozen=True, slots=True)
class Version:
    """Which weights made a batch.

    Attributes:
        number: 1 for the first checkpoint a server loads; grows by one with each swap.
        digest: of the weights, lower-case hex of 32 digits.
    """

    number: int
    digest: str

    def to_message(self) -> target_pb2.TargetVersion:
        """Returns the message of the contract."""
        return target_pb2.TargetVersion(number=self.number, digest=self.digest)


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A version and the files that it came from.

    Attributes:
        number: see Version; 0 while unknown.
        digest: of the weights; empty while unknown.
        checkpoint: the directory, absolute.
        mark: what tells whether its files were changed since (`files_mark`); empty while unknown.
    """

    number: int
    digest: str
    checkpoint: Path
    mark: str = ""

    @property
    def version(self) -> Version:
        """The version alone."""
        return Version(self.number, self.digest)

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {
            "number": self.number,
            "digest": self.digest,
            "checkpoint": str(self.checkpoint),
            "mark": self.mark,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> VersionRecord:
        """Returns what `to_json` was made of.

        Raises:
            ValueError: it is something else.
        """
        try:
            number, texts = content["number"], [content[name] for name in ("digest", "checkpoint", "mark")]
        except (KeyError, TypeError) as error:
            raise ValueError("no version record") from error
        if not isinstance(number, int) or not all(isinstance(text, str) for text in texts):
            raise ValueError("no version record")
        return cls(number, texts[0], Path(texts[1]), texts[2])


def files_mark(path: Path) -> str:
    """Returns a digest of names, sizes and times of a checkpoint's weight files: it changes when they are rewritten.

    Raises:
        UserError: files are missing.
    """
    whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for file in weight_files(path):
        stat = file.stat()
        whole.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return whole.hexdigest()


class DigestOfTensors:
    """Puts the digest of a checkpoint together from its tensors' own digests, in any order."""

    def __init__(self) -> None:
        self._digests: dict[str, tuple[StoredTensor, bytes]] = {}

    def add(self, tensor: StoredTensor, digest: bytes) -> None:
        """Takes one tensor's digest (blake2b of 16 bytes over its bytes)."""
        self._digests[tensor.name] = (tensor, digest)

    def hexdigest(self) -> str:
        """Returns the digest of all tensors taken."""
        whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for name in sorted(self._digests):
            tensor, digest = self._digests[name]
            whole.update(_line(tensor))
            whole.update(digest)
        return whole.hexdigest()


def weights_digest(path: Path) -> str:
    """Returns the digest of a checkpoint's weights (about 1 GB/s a core, up to 8 cores).

    Raises:
        UserError: the directory's safetensors are missing, damaged or contradictory.
    """
    tensors = stored_tensors(path)
    by_file = [list(group) for _, group in groupby(sorted(tensors, key=lambda t: (t.file, t.start)), lambda t: t.file)]
    whole = DigestOfTensors()
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="digest") as pool:
        for group in by_file:
            with group[0].file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                view = memoryview(content)
                hashed = pool.map(_bytes_digest, (view[tensor.start : tensor.end] for tensor in group))
                for tensor, digest in zip(group, hashed, strict=True):
                    whole.add(tensor, digest)
                view.release()
    return whole.hexdigest()


def tokenizer_digest(path: Path) -> str:
    """Returns the digest of the tokenizer files beside a checkpoint; empty when there are none."""
    files = [path / name for name in _TOKENIZER_FILES if (path / name).is_file()]
    if not files:
        return ""
    whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for file in files:
        whole.update(f"{file.name}\0".encode())
        whole.update(hashlib.blake2b(file.read_bytes(), digest_size=_DIGEST_BYTES).digest())
    return whole.hexdigest()


def _bytes_digest(view: memoryview) -> bytes:
    try:
        return hashlib.blake2b(view, digest_size=_DIGEST_BYTES).digest()
    finally:
        view.release()


def _line(tensor: StoredTensor) -> bytes:
    return f"{tensor.name}\0{tensor.dtype}\0{','.join(map(str, tensor.shape))}\0".encode()
