"""A checkpoint directory as files: what can be known, and refused, before torch is imported.

It reads config.json and the headers of the safetensors files. It must never import torch or transformers (the front
uses it) nor open any other weight format: pickles can run code.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from target_server.errors import UserError

__all__ = ["StoredTensor", "check_checkpoint", "stored_tensors", "weight_files"]

_FIELD = "model.path"
_INDEX = "model.safetensors.index.json"
# The format's own limit on its JSON header.
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes are.

    Attributes:
        name: as in the file.
        dtype: safetensors' name of the element type, e.g. "BF16".
        shape: sizes, outermost first.
        file: the file.
        start: first byte within the file.
        end: byte after the last.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


def check_checkpoint(path: Path | None) -> dict[str, Any]:
    """Refuses what can't be served, without reading a weight.

    Returns:
        The directory's config.json.

    Raises:
        UserError: no such directory, no or bad config.json, no or incomplete safetensors.
    """
    if path is None:
        raise UserError(_FIELD, "-", "not given; give a local Hugging Face directory")
    if not path.is_dir():
        raise UserError(_FIELD, path, "no such directory; give a local Hugging Face directory")
    config = _read_json(path / "config.json", path)
    if not config.get("model_type"):
        raise UserError(_FIELD, path, "config.json has no model_type; give a transformers checkpoint")
    for file in weight_files(path):
        _read_header(file)
    return config


def weight_files(path: Path) -> list[Path]:
    """Returns the safetensors files that make up a checkpoint, sorted by name.

    Raises:
        UserError: there are none, or the index names one that is missing.
    """
    index = path / _INDEX
    if index.is_file():
        names = sorted(set(_read_json(index, path).get("weight_map", {}).values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise UserError(_FIELD, path, f"{_INDEX} names {missing[0]}, which is missing; copy all shards")
        files = [path / name for name in names]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(_FIELD, path, "holds no *.safetensors; convert the checkpoint (other formats can run code)")
    return files


def stored_tensors(path: Path) -> list[StoredTensor]:
    """Returns every tensor of a checkpoint, sorted by name: the same list however it is sharded.

    Raises:
        UserError: a file is damaged, or two files hold a tensor of the same name.
    """
    found: dict[str, StoredTensor] = {}
    for file in weight_files(path):
        header, data_start = _read_header(file)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if name in found:
                raise UserError(_FIELD, path, f"{file.name} and {found[name].file.name} both hold {name}; remove one")
            start, end = entry["data_offsets"]
            found[name] = StoredTensor(
                name, entry["dtype"], tuple(entry["shape"]), file, data_start + start, data_start + end
            )
    return [found[name] for name in sorted(found)]


def _read_json(file: Path, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(_FIELD, path, f"holds no {file.name}; give a transformers checkpoint") from error
    except (OSError, ValueError) as error:
        raise UserError(_FIELD, path, f"{file.name} can't be read as JSON; copy it again") from error
    if not isinstance(content, dict):
        raise UserError(_FIELD, path, f"{file.name} is not a JSON object; copy it again")
    return content


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Returns a safetensors file's header and where its data starts; the data must reach to the file's end."""
    damaged = UserError(_FIELD, file, "is cut short or not a safetensors file; copy it again")
    try:
        with file.open("rb") as stream:
            prefix = stream.read(8)
            (size,) = struct.unpack("<Q", prefix)
            if size > _MAX_HEADER_BYTES:
                raise damaged
            header = json.loads(stream.read(size))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise damaged from error
    if file.stat().st_size != 8 + size + max(ends, default=0):
        raise damaged
    return header, 8 + size
