"""Starts from a drafter that exists: one exported here, one published in z-lab's layout, or a checkpoint of ours.

Owns what is taken over. The shape is the existing drafter's; a setting that the user gives wins where the weights allow
it (block size, mask token, which blocks are tapped, windows, rotary base) and is refused where they don't: nothing is
ignored. Reads safetensors, whole or sharded; embedding and head in it are left out, they are the target's.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter_trainer.config import DrafterSection
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["apply_settings", "read_start_config", "read_start_weights"]

# Settings that the weights decide.
FIXED = {
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
}
# Settings that any weights go with.
FREE = ("block_size", "mask_token_id", "rope_theta", "rms_norm_eps")
NOT_THE_DRAFTERS = ("embed_tokens.weight", "lm_head.weight")


def read_start_config(directory: Path) -> DrafterConfig:
    """The shape of the drafter in a directory.

    Raises:
        UserError: There's none, or it lacks what a drafter needs.
    """
    try:
        if (directory / "state.json").is_file():
            state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
            return DrafterConfig.from_json(state["facts"]["drafter_config"])
        return DrafterConfig.from_json(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        fix = "holds neither config.json nor state.json; give an exported or published drafter, or a checkpoint"
        raise UserError("drafter.init_from", directory, fix) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("drafter.init_from", directory, f"is no drafter ({error})") from error


def apply_settings(start: DrafterConfig, section: DrafterSection, layer_types: tuple[str, ...]) -> DrafterConfig:
    """The existing drafter's shape with the settings that were given.

    Args:
        start: The existing shape.
        section: The settings; only what was given counts, not defaults.
        layer_types: What the section's windows mean for its number of layers.

    Raises:
        UserError: A setting that its weights don't allow.
    """
    given = section.model_fields_set
    for name, published in FIXED.items():
        wanted, has = getattr(section, name), getattr(start, published)
        if name in given and wanted is not None and wanted != has:
            raise UserError(f"drafter.{name}", wanted, f"the drafter of drafter.init_from has {has}; leave it out")
    # None means "not given"; of a window it means that there's none.
    changes: dict[str, Any] = {name: getattr(section, name) for name in FREE if name in given}
    changes = {name: value for name, value in changes.items() if value is not None}
    if section.target_layer_ids is not None:
        count = len(start.target_layer_ids)
        if len(section.target_layer_ids) != count:
            taps = ",".join(map(str, section.target_layer_ids))
            raise UserError("drafter.target_layer_ids", taps, f"the drafter of drafter.init_from reads {count} of them")
        changes["target_layer_ids"] = section.target_layer_ids
    if given & {"sliding_window", "full_attention_layers"}:
        changes |= {"sliding_window": section.sliding_window, "layer_types": layer_types}
    return dataclasses.replace(start, **changes)


def read_start_weights(directory: Path) -> dict[str, Tensor]:
    """The drafter's weights in fp32; of a checkpoint with an average, the average.

    Raises:
        UserError: There are none, or they aren't finite.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - loads torch
    from safetensors.torch import load_file  # noqa: PLC0415

    index = directory / "model.safetensors.index.json"
    try:
        if (directory / "average.safetensors").is_file():
            files = ["average.safetensors"]
        elif index.is_file():
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            files = ["model.safetensors"]
        tensors = {name: t for file in files for name, t in load_file(directory / file).items()}
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        fix = f"no weights there ({error}); give the directory that holds model.safetensors"
        raise UserError("drafter.init_from", directory, fix) from error
    if "d2t" in tensors:
        raise UserError("drafter.init_from", directory, "has a vocabulary of its own (d2t), which isn't supported")
    kept = {
        name: tensor.float()
        for name, tensor in tensors.items()
        if name not in (*NOT_THE_DRAFTERS, "updates") and not name.endswith("inv_freq")
    }
    bad = [name for name, tensor in kept.items() if not tensor.isfinite().all()]
    if bad:
        raise UserError("drafter.init_from", directory, f"its {bad[0]} is not finite; give another one")
    return kept
