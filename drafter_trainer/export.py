"""Writes a drafter as serving engines load it, and reads such a directory back.

Owns the published layout: `config.json` and `model.safetensors` with the published parameter names, no embedding, no
head, no rotary buffer. Where engines look for a key in different places it is written in all of them, because a reader
that does not find one guesses without an error (blocks of another size, taps of other layers). Must never write weights
that are not finite, and never leave half a directory under the final name.

Readers and what they need:

    z-lab's code, PyPI `dflash`    block_size at the top, the other two in dflash_config, rope_theta
    newer checkpoints, converters  block_size in dflash_config too; input_embedding_scale
    SGLang                         mask_token_id, target_layer_ids, num_target_layers at the top are read as well
    transformers 4.57 and 5        rope_theta and rope_scaling; rope_parameters
    AutoModel                      auto_map and the file it names: here one import of the PyPI package `dflash`
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter_trainer.checkpoint import sync_directory, sync_file, write_json
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.errors import CheckpointError, TrainerError, UserError
from drafter_trainer.model import Drafter

__all__ = ["export_drafter", "load_drafter", "published_config", "read_trained_for"]

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
ARCHITECTURE = "DFlashDraftModel"
TRAINED_FOR = "trained_for"
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float16: "float16"}

_AUTO_MODEL_FILE = "dflash.py"
_AUTO_MODEL_CODE = '''"""Names the class for AutoModel (trust_remote_code=True); needs `pip install dflash`."""

from dflash.model import DFlashDraftModel

__all__ = ["DFlashDraftModel"]
'''


def published_config(config: DrafterConfig, *, dtype: torch.dtype, embedding_scale: float = 1.0) -> dict[str, Any]:
    """Return the contents of `config.json` for weights of `dtype`, every key in every place that readers look.

    Args:
        config: The drafter's shape.
        dtype: Type of the weights.
        embedding_scale: The target's factor on its embedding rows (Gemma): readers take the bare table.
    """
    published = {
        **config.to_json(),
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "dtype": DTYPE_NAMES[dtype],
    }
    if embedding_scale != 1.0:
        published["dflash_config"]["input_embedding_scale"] = embedding_scale
    return published


def export_drafter(
    config: DrafterConfig,
    weights: Mapping[str, Tensor],
    directory: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    embedding_scale: float = 1.0,
    trained_for: Mapping[str, Any] | None = None,
) -> Path:
    """Write a drafter for serving.

    Args:
        config: The drafter's shape.
        weights: `Drafter.state_dict()`, or a checkpoint's model tensors; any float dtype.
        directory: Made here. An earlier export is replaced; anything else in it is refused.
        dtype: Type of the written weights: bfloat16, float16 or float32.
        embedding_scale: `TargetHead.embedding_scale` of the target.
        trained_for: Which target the weights were last trained on, as JSON values; readers ignore the key.

    Returns:
        `directory`.

    Raises:
        UserError: `directory` holds something else.
        TrainerError: Weights do not fit the config, or are not finite in `dtype`.
    """
    _check_free(directory)
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in weights.items()}
    _check_tensors(config, tensors)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        published = published_config(config, dtype=dtype, embedding_scale=embedding_scale)
        if trained_for is not None:
            published[TRAINED_FOR] = dict(trained_for)
        write_json(partial / CONFIG_FILE, published)
        (partial / _AUTO_MODEL_FILE).write_text(_AUTO_MODEL_CODE, encoding="utf-8")
        save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        for path in partial.iterdir():
            path.chmod(0o644)
            sync_file(path)
        partial.chmod(0o755)
        _replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def read_trained_for(directory: Path) -> dict[str, Any] | None:
    """Which target an exported drafter was trained for; None where its config doesn't say."""
    found = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8")).get(TRAINED_FOR)
    return dict(found) if isinstance(found, dict) else None


def load_drafter(directory: Path, *, dtype: torch.dtype | None = None) -> Drafter:
    """Load an exported or published drafter, in eval mode and without gradients.

    Args:
        directory: Holds `config.json` and `model.safetensors`.
        dtype: Convert weights to this type; by default they stay as written.

    Raises:
        CheckpointError: A file is missing, torn, or of another kind of drafter.
    """
    try:
        config = DrafterConfig.from_json(json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8")))
        tensors = load_file(directory / WEIGHTS_FILE)
        _check_tensors(config, tensors)
    except (OSError, ValueError, SafetensorError, TrainerError) as error:
        raise CheckpointError(f"{directory} is no drafter: {error}") from error
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict(tensors, assign=True)
    # Rotary frequencies are no buffers, and were made on the meta device.
    drafter.rotary = type(drafter.rotary)(config)
    return drafter.to(dtype=dtype or tensors["fc.weight"].dtype).eval().requires_grad_(False)


def _check_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    with torch.device("meta"):
        wanted = {name: tuple(p.shape) for name, p in Drafter(config).state_dict().items()}
    given = {name: tuple(t.shape) for name, t in tensors.items()}
    wrong = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
    if wrong:
        shapes = f"{wrong[0]} is {given.get(wrong[0])}, not {wanted.get(wrong[0])}"
        raise TrainerError(f"{len(wrong)} tensors do not fit the drafter's config; {shapes}")
    bad = [name for name, t in tensors.items() if not t.isfinite().all()]
    if bad:
        raise TrainerError(f"weights are not finite: {', '.join(bad[:3])}{' …' if len(bad) > 3 else ''}")


def _check_free(directory: Path) -> None:
    if directory.is_dir():
        names = {path.name for path in directory.iterdir()}
        if names and not (names <= {CONFIG_FILE, WEIGHTS_FILE, _AUTO_MODEL_FILE} and _is_export(directory)):
            raise UserError("output", directory, "holds other files; give a new or empty directory")
    elif directory.exists():
        raise UserError("output", directory, "is a file; give a directory")


def _is_export(directory: Path) -> bool:
    try:
        published = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(published, dict) and published.get("architectures") == [ARCHITECTURE]


def _replace(partial: Path, directory: Path) -> None:
    sync_directory(partial)
    if directory.is_dir():
        shutil.rmtree(directory)
    os.replace(partial, directory)
    sync_directory(directory.parent)
