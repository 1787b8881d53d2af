"""One reading of the weights finds their digest and everything that must not be served."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from target_wire.errors import Reason, WireError

from target_server import reading
from target_server.reading import read_weights
from target_server.versions import files_mark, weights_digest

TENSORS = {
    "a": torch.arange(9000.0).view(90, 100),
    "b": torch.ones(7, dtype=torch.bfloat16),
    "c": torch.full((3, 3), 2.0, dtype=torch.float16),
    "d": torch.arange(5),
    "e": torch.zeros(0),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint", {})


def write(directory: Path, changes: dict[str, torch.Tensor]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({**TENSORS, **changes}, directory / "model.safetensors")
    return directory


def read(path: Path, stop: threading.Event | None = None) -> reading.ReadWeights:
    return read_weights(path, lambda _read, _total: None, stop or threading.Event())


@pytest.mark.parametrize("chunk", [64, 4 << 20])
def test_digest_is_that_of_a_start(chunk: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_CHUNK_BYTES", chunk)
    found = read(checkpoint)
    assert (found.digest, found.mark) == (weights_digest(checkpoint), files_mark(checkpoint))
    assert found.total_bytes == sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_value_that_is_not_finite_is_refused_by_name(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    # I4
    tensor = torch.ones(3001, dtype=dtype)
    tensor[-1] = value
    with pytest.raises(WireError, match="checkpoint: z: found a NaN or an infinity, expected finite values") as refused:
        read(write(tmp_path / "bad", {"z": tensor}))
    assert refused.value.reason is Reason.SWAP_REFUSED


def test_largest_and_smallest_values_are_finite(tmp_path: Path) -> None:
    limits = [torch.finfo(torch.bfloat16).max, -torch.finfo(torch.bfloat16).max, 1e-40, -0.0]
    read(write(tmp_path / "edge", {"z": torch.tensor(limits, dtype=torch.bfloat16)}))


def test_file_cut_short_while_it_is_read_is_refused(checkpoint: Path) -> None:
    # I8, case 105
    file = checkpoint / "model.safetensors"

    def cut(read_bytes: int, _total: int) -> None:
        if read_bytes == 0:
            file.write_bytes(file.read_bytes()[:20_000])

    with pytest.raises(WireError, match="found an end within a"):
        read_weights(checkpoint, cut, threading.Event())


def test_file_changed_while_it_is_read_is_refused(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"

    def rewrite(read_bytes: int, total_bytes: int) -> None:
        if read_bytes == total_bytes:
            file.touch()

    with pytest.raises(WireError, match="changed while they were read"):
        read_weights(checkpoint, rewrite, threading.Event())


def test_unreadable_file_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_stream: object, _chunk: object, _tensor: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reading, "_fill", fail)
    with pytest.raises(WireError, match="Input/output error, expected files that can be read"):
        read(checkpoint)


def test_reading_ends_when_told(checkpoint: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(WireError) as ended:
        read(checkpoint, stop)
    assert ended.value.reason is Reason.CANCELLED


def test_progress_goes_from_nothing_to_everything(checkpoint: Path) -> None:
    said: list[tuple[int, int]] = []
    read_weights(checkpoint, lambda *sizes: said.append(sizes), threading.Event())
    total = sum(tensor.nbytes for tensor in TENSORS.values())
    assert said[0] == (0, total)
    assert said[-1] == (total, total)
    assert said == sorted(said)
