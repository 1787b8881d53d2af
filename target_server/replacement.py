"""Whether a checkpoint can replace the one served: everything that files say without torch.

What a trainer has learned with must go on to hold: shapes, vocabulary, tokenizer, element types and every number of the
config that changes what the model computes. So the stored tensors must be the same by name, shape and type, and the
configs equal but for `_FREE_KEYS`. Only config.json, tokenizer files and safetensors headers are read; values are the
replicas' to check. Each refusal names field, found and expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from target_wire.errors import Code, Reason, WireError

from target_server.checkpoint import check_checkpoint, stored_tensors, weight_files
from target_server.errors import UserError
from target_server.versions import tokenizer_digest

__all__ = ["ServedShape", "check_replacement", "config_differences", "refusal", "resolve_checkpoint"]

# What says nothing about what the weights compute. The element types are compared tensor by tensor.
_FREE_KEYS = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "torch_dtype",
        "dtype",
        "_commit_hash",
    }
)
# Compared first and one by one, so that the message names what matters before what follows from it.
_SHAPE_KEYS = ("model_type", "architectures", "hidden_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings")
_PICKLED_WEIGHTS = ("pytorch_model*.bin", "consolidated*.pt", "consolidated*.pth")
_ANY_PICKLE = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True)
class ServedShape:
    """What a replacement is compared with; it stays the same through every swap.

    Attributes:
        config: the served checkpoint's config.json.
        tensors: element type and shape of every stored tensor.
        tokenizer_digest: see `versions.tokenizer_digest`.
    """

    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    tokenizer_digest: str

    @classmethod
    def of(cls, path: Path) -> ServedShape:
        """Reads a checkpoint's.

        Raises:
            UserError: its files are damaged.
        """
        tensors = {tensor.name: (tensor.dtype, tensor.shape) for tensor in stored_tensors(path)}
        return cls(check_checkpoint(path), tensors, tokenizer_digest(path))


def refusal(field: str, found: object, expected: object) -> WireError:
    """Returns the refusal of a checkpoint for one field."""
    detail = f"checkpoint: {field}: found {found}, expected {expected}"
    return WireError(Code.FAILED_PRECONDITION, Reason.SWAP_REFUSED, detail)


def resolve_checkpoint(given: str, root: Path) -> Path:
    """Returns the directory that is meant, links followed.

    Raises:
        WireError: SWAP_REFUSED: it lies outside of the root or is no directory.
    """
    if not given or "\0" in given:
        raise refusal("path", repr(given), "a directory")
    try:
        path = (root / given).resolve()
    except (OSError, RuntimeError) as error:
        raise refusal("path", given, "a directory that can be resolved") from error
    if not path.is_relative_to(root) or path == root:
        raise refusal("path", path, f"a directory below swap.checkpoint_root {root}")
    if not path.is_dir():
        raise refusal("path", path, "a directory that exists")
    return path


def check_replacement(path: Path, served: ServedShape, root: Path) -> None:
    """Compares a checkpoint with what is served.

    Args:
        path: the checkpoint, as `resolve_checkpoint` returned it.
        served: what is served.
        root: no file outside of it is opened.

    Raises:
        WireError: SWAP_REFUSED.
    """
    try:
        _check_inside(path.iterdir(), root)
        _check_no_pickles(path)
        _check_inside(weight_files(path), root)
        found = ServedShape.of(path)
    except UserError as error:
        raise _of_user_error(error) from error
    except OSError as error:
        raise refusal("files", f"{error.filename}: {error.strerror}", "files that can be read") from error
    _check_config(found.config, served.config)
    _check_tensors(found.tensors, served.tensors)
    if found.tokenizer_digest != served.tokenizer_digest:
        raise refusal(
            "tokenizer",
            found.tokenizer_digest or "no tokenizer files",
            f"{served.tokenizer_digest or 'none'}, the digest of the files served; copy those",
        )


def _of_user_error(error: UserError) -> WireError:
    return WireError(Code.FAILED_PRECONDITION, Reason.SWAP_REFUSED, f"checkpoint: {error.value}: {error.fix}")


def _check_no_pickles(path: Path) -> None:
    """Other pickles (an optimizer's) may lie there: they are never opened."""
    patterns = _PICKLED_WEIGHTS if any(path.glob("*.safetensors")) else _ANY_PICKLE
    pickles = sorted(file.name for pattern in patterns for file in path.glob(pattern))
    if pickles:
        raise refusal("weights", f"the pickle {pickles[0]}, which can run code", "safetensors only; convert it")


def _check_inside(files: Iterable[Path], root: Path) -> None:
    """Refuses links, and names in an index, that lead elsewhere."""
    for file in files:
        if not file.resolve().is_relative_to(root):
            raise refusal(file.name, f"a way to {file.resolve()}", f"files below swap.checkpoint_root {root}")


def _check_config(found: dict[str, Any], expected: dict[str, Any]) -> None:
    inner_found, inner_expected = (config.get("text_config") or config for config in (found, expected))
    for key in _SHAPE_KEYS:
        for one, other in ((found, expected), (inner_found, inner_expected)):
            if one.get(key) != other.get(key):
                raise refusal(f"config.json {key}", one.get(key), other.get(key))


def config_differences(found: Any, expected: Any, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    """Yields dotted name, found and expected of everything that differs, `_FREE_KEYS` left out.

    The configs are to be transformers' own (`to_dict`): in files of other releases the same fact may have another name.
    """
    if not (isinstance(found, dict) and isinstance(expected, dict)):
        if found != expected:
            yield prefix.rstrip("."), found, expected
        return
    for key in sorted({*found, *expected} - _FREE_KEYS, key=str):
        yield from config_differences(found.get(key), expected.get(key), f"{prefix}{key}.")


def _check_tensors(
    found: dict[str, tuple[str, tuple[int, ...]]], expected: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    for names, one, other in (
        (sorted(expected.keys() - found.keys()), "missing", "present"),
        (sorted(found.keys() - expected.keys()), "present", "absent, as in the checkpoint served"),
    ):
        if names:
            raise refusal(_and_more(names), one, other)
    for index, describe in ((1, list), (0, lambda name: _DTYPE_NAMES.get(name, name))):
        names = [name for name in sorted(expected) if found[name][index] != expected[name][index]]
        if names:
            kind = "dtype" if index == 0 else "shape"
            first = names[0]
            raise refusal(
                f"{kind} of {_and_more(names)}", describe(found[first][index]), describe(expected[first][index])
            )


def _and_more(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
