"""The drafter's shape for a target: what the user gave, else what the target has, else what published drafters do.

The contract tells width, depth and vocabulary. The attention's geometry is in the target's `config.json`, which lies
beside the tokenizer that the data was prepared with; when there's none, or the target's attention isn't one a drafter
can copy (latent attention, partial or multimodal rotary), the drafter gets a geometry of its own. It need not be the
target's.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from drafter_trainer.config import DrafterSection
from drafter_trainer.drafter_config import FULL, SLIDING, DrafterConfig, default_target_layer_ids
from drafter_trainer.errors import UserError
from drafter_trainer.warm_start import apply_settings

__all__ = ["TargetFacts", "read_model_config", "resolve_drafter_config"]

logger = logging.getLogger(__name__)

# Published drafters use heads of 128 and 8 key-value heads whatever the target has; small ones need smaller heads.
OWN_HEAD_DIM = 128
OWN_HEAD_DIM_SMALL = 64
OWN_KEY_VALUE_HEADS = 8
SMALL_HIDDEN_SIZE = 2048


class TargetFacts(Protocol):
    """What the contract tells about the target; ``target_wire.v1.TargetModel`` is one."""

    hidden_size: int
    layer_count: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_count: int


def resolve_drafter_config(
    section: DrafterSection,
    target: TargetFacts,
    *,
    mask_token_id: int,
    model_config: Mapping[str, Any],
    start: DrafterConfig | None = None,
) -> DrafterConfig:
    """The drafter's config.

    Args:
        section: The user's settings.
        target: The served target.
        mask_token_id: The row that stands for "to be drafted".
        model_config: The target's `config.json` (text part), or empty.
        start: The drafter that weights are taken from, whose shape then is in place of the target's.

    Raises:
        UserError: A setting that doesn't fit the target.
    """
    if start is not None:
        return continued_config(start, section, target, mask_token_id=mask_token_id)
    taps = section.target_layer_ids or default_target_layer_ids(target.layer_count, section.num_layers)
    check_taps(taps, target.layer_count)
    if mask_token_id >= target.vocab_size:
        fix = f"the target's embedding has {target.vocab_size} rows; give an untrained one of them"
        raise UserError("drafter.mask_token_id", mask_token_id, fix)
    geometry = attention_geometry(section, target, model_config)
    try:
        return DrafterConfig(
            hidden_size=target.hidden_size,
            num_hidden_layers=section.num_layers,
            num_target_layers=target.layer_count,
            target_layer_ids=tuple(taps),
            mask_token_id=mask_token_id,
            block_size=section.block_size,
            vocab_size=target.vocab_size,
            max_position_embeddings=target.max_position_count or 40960,
            rms_norm_eps=section.rms_norm_eps,
            layer_types=layer_types(section),
            sliding_window=section.sliding_window,
            bos_token_id=model_config.get("bos_token_id"),
            eos_token_id=model_config.get("eos_token_id"),
            tie_word_embeddings=target.tie_word_embeddings,
            **geometry,
        )
    except ValueError as error:
        raise UserError("drafter", "settings", str(error)) from error


def continued_config(
    start: DrafterConfig, section: DrafterSection, target: TargetFacts, *, mask_token_id: int
) -> DrafterConfig:
    """The shape of a drafter that trains on, for this target.

    Raises:
        UserError: It was made for another target, or a setting doesn't go with its weights.
    """
    for name, its, here in (
        ("wide", start.hidden_size, target.hidden_size),
        ("layers deep", start.num_target_layers, target.layer_count),
    ):
        if its != here:
            fix = f"it was made for a target {its} {name}, this one is {here}; give a drafter of this target"
            raise UserError("drafter.init_from", section.init_from, fix)
    windows = section.model_copy(update={"num_layers": start.num_hidden_layers})
    check_taps(section.target_layer_ids or start.target_layer_ids, target.layer_count)
    if mask_token_id >= target.vocab_size:
        fix = f"the target's embedding has {target.vocab_size} rows; give an untrained one of them"
        raise UserError("drafter.mask_token_id", mask_token_id, fix)
    try:
        start = dataclasses.replace(
            start,
            mask_token_id=mask_token_id,
            vocab_size=target.vocab_size,
            tie_word_embeddings=target.tie_word_embeddings,
        )
        return apply_settings(start, section, layer_types(windows))
    except ValueError as error:
        raise UserError("drafter", "settings", str(error)) from error


def check_taps(taps: tuple[int, ...], layer_count: int) -> None:
    """Refuses taps that the target doesn't have.

    Raises:
        UserError: One is out of range or named twice.
    """
    wrong = [tap for tap in taps if not 0 <= tap < layer_count]
    if wrong or len(set(taps)) != len(taps):
        fix = f"the target has blocks 0 to {layer_count - 1}; give different ones of these"
        raise UserError("drafter.target_layer_ids", ",".join(map(str, taps)), fix)


def attention_geometry(section: DrafterSection, target: TargetFacts, model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Heads, widths and rotary base: given, else the target's, else the drafter's own."""
    geometry = own_geometry(target.hidden_size)
    if model_config.get("hidden_size") == target.hidden_size:
        geometry.update(target_geometry(model_config))
    else:
        logger.info("no config.json of the target beside the tokenizer: the drafter gets a geometry of its own")
    given = {name: getattr(section, name) for name in geometry}
    return geometry | {name: value for name, value in given.items() if value is not None}


def own_geometry(hidden_size: int) -> dict[str, Any]:
    """A geometry for a target whose attention isn't known."""
    head_dim = min(OWN_HEAD_DIM_SMALL if hidden_size < SMALL_HIDDEN_SIZE else OWN_HEAD_DIM, hidden_size)
    heads = max(1, hidden_size // head_dim)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": max(n for n in range(1, OWN_KEY_VALUE_HEADS + 1) if heads % n == 0),
        "head_dim": head_dim,
        "intermediate_size": 3 * hidden_size,
        "rope_theta": 1e6,
    }


def target_geometry(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """What of the target's geometry a drafter can copy."""
    rope = {**(model_config.get("rope_parameters") or {}), **(model_config.get("rope_scaling") or {})}
    theta = rope.get("rope_theta") or model_config.get("rope_theta")
    copied: dict[str, Any] = {"rope_theta": float(theta)} if theta else {}
    heads = model_config.get("num_attention_heads")
    partial = rope.get("partial_rotary_factor") or model_config.get("partial_rotary_factor") or 1.0
    if not heads or "kv_lora_rank" in model_config or "mrope_section" in rope or partial != 1.0:
        return copied
    copied["num_attention_heads"] = heads
    copied["num_key_value_heads"] = model_config.get("num_key_value_heads") or heads
    copied["head_dim"] = model_config.get("head_dim") or model_config["hidden_size"] // heads
    if model_config.get("intermediate_size"):
        copied["intermediate_size"] = model_config["intermediate_size"]
    return copied


def layer_types(section: DrafterSection) -> tuple[str, ...]:
    """Sliding layers first, then the full ones; all full without a window."""
    if section.sliding_window is None:
        return ()
    full = min(section.full_attention_layers, section.num_layers)
    return (SLIDING,) * (section.num_layers - full) + (FULL,) * full


def read_model_config(directory: Path | None) -> dict[str, Any]:
    """The text part of a model directory's `config.json`; empty when there's none."""
    if directory is None or not (directory / "config.json").is_file():
        return {}
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return dict(config.get("text_config") or config)
