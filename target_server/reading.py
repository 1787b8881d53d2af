"""Reads a checkpoint's weights once, before they may be served: their digest, and whether every value is finite.

By plain reads of 4 MiB into one buffer: memory is bounded, and a file that is cut short or fails while it is read is
an error here, where a mapped one would end the process. It runs beside a serving replica's threads, so it takes one
thread, at a low priority, and hashing, reading and comparing all release the interpreter's lock. No torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from target_wire.errors import Code, Reason, WireError

from target_server.checkpoint import StoredTensor, stored_tensors
from target_server.errors import UserError
from target_server.replacement import refusal
from target_server.versions import DigestOfTensors, files_mark

__all__ = ["ReadWeights", "read_weights", "take_low_priority"]

_CHUNK_BYTES = 4 << 20
_DIGEST_BYTES = 16
_NICE = 10
# Bits of the exponent: a float is NaN or infinite when all of them are set. Integers and 8-bit floats are not checked.
_EXPONENTS: dict[str, tuple[str, int]] = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F800000),
    "F64": ("<u8", 0x7FF0000000000000),
}


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """What was found.

    Attributes:
        digest: of the weights, as `versions.weights_digest` computes it.
        mark: of the files (`versions.files_mark`), the same before and after they were read.
        total_bytes: how many bytes of weights there are.
    """

    digest: str
    mark: str
    total_bytes: int


def read_weights(path: Path, on_progress: Callable[[int, int], None], stop: threading.Event) -> ReadWeights:
    """Reads every tensor once. Blocks; about 0.5 GB/s.

    Args:
        path: the checkpoint.
        on_progress: takes bytes read and bytes in all, after each few MB.
        stop: ends the reading when set.

    Raises:
        WireError: SWAP_REFUSED: a file can't be read, is cut short, changes meanwhile, or holds a value that is not
            finite. CANCELLED: `stop` was set.
    """
    try:
        mark = files_mark(path)
        tensors = sorted(stored_tensors(path), key=lambda tensor: (tensor.file, tensor.start))
        total = sum(tensor.end - tensor.start for tensor in tensors)
        reader = _Reader(lambda done: on_progress(done, total), stop)
        on_progress(0, total)
        for file, group in groupby(tensors, lambda tensor: tensor.file):
            with file.open("rb", buffering=0) as stream:
                for tensor in group:
                    reader.read(stream, tensor)
        if files_mark(path) != mark:
            raise refusal("files", "changed while they were read", "files that nobody writes any more")
    except UserError as error:
        raise refusal("files", f"{error.value}: {error.fix}", "the files of a moment ago") from error
    except OSError as error:
        raise refusal("files", f"{error.filename or path}: {error.strerror}", "files that can be read") from error
    return ReadWeights(reader.digest.hexdigest(), mark, total)


def take_low_priority() -> None:
    """Lets every other thread of the machine go before the calling one, where the system can."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class _Reader:
    def __init__(self, on_progress: Callable[[int], None], stop: threading.Event) -> None:
        self.digest = DigestOfTensors()
        self._on_progress = on_progress
        self._stop = stop
        self._buffer = memoryview(bytearray(_CHUNK_BYTES))
        self._done_bytes = 0

    def read(self, stream: BinaryIO, tensor: StoredTensor) -> None:
        stream.seek(tensor.start)
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        left = tensor.end - tensor.start
        while left:
            if self._stop.is_set():
                raise WireError(Code.CANCELLED, Reason.CANCELLED, "the swap was given up")
            chunk = self._buffer[: min(left, _CHUNK_BYTES)]
            _fill(stream, chunk, tensor)
            digest.update(chunk)
            _check_finite(chunk, tensor)
            left -= len(chunk)
            self._done_bytes += len(chunk)
            self._on_progress(self._done_bytes)
        self.digest.add(tensor, digest.digest())


def _fill(stream: Any, chunk: memoryview, tensor: StoredTensor) -> None:
    filled = 0
    while filled < len(chunk):
        count = stream.readinto(chunk[filled:])
        if not count:
            raise refusal(tensor.file.name, f"an end within {tensor.name}", "a whole file; copy it again")
        filled += count


def _check_finite(chunk: memoryview, tensor: StoredTensor) -> None:
    if tensor.dtype not in _EXPONENTS:
        return
    kind, exponent = _EXPONENTS[tensor.dtype]
    words = np.frombuffer(chunk, dtype=kind)
    if bool(((words & exponent) == exponent).any()):
        raise refusal(tensor.name, "a NaN or an infinity", "finite values")
