"""The published config, in every layout that readers and writers use."""

from __future__ import annotations

import json
from typing import Any

import pytest

from drafter_trainer.drafter_config import DrafterConfig, default_target_layer_ids
from tests.support.drafters import tiny_config

SLIDING = "sliding_attention"


@pytest.mark.parametrize(
    ("layers", "taps", "published"),
    [
        (24, 5, (1, 6, 11, 16, 21)),
        (28, 5, (1, 7, 13, 19, 25)),
        (32, 5, (1, 8, 15, 22, 29)),
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (48, 5, (1, 12, 23, 34, 45)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 3, (1, 17, 33)),
        (36, 8, (1, 6, 10, 15, 19, 24, 28, 33)),
        (30, 1, (15,)),
    ],
)
def test_default_taps_are_the_published_ones(layers: int, taps: int, published: tuple[int, ...]) -> None:
    assert default_target_layer_ids(layers, taps) == published


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": (SLIDING, "full_attention"), "sliding_window": 2048, "is_causal": False},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "partial_rotary_factor": 0.5, "rope_theta": 5e5},
        {"bos_token_id": 1, "eos_token_id": [2, 3], "tie_word_embeddings": True, "dtype": "float32"},
        {"extra": {"loss_decay_gamma": 7.0}},
    ],
    ids=str,
)
def test_config_survives_a_round_trip_through_json(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    assert DrafterConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_both_layouts_of_every_moved_key_are_written() -> None:  # cases 93, 95
    written = tiny_config(rope_theta=5e5, rope_scaling={"rope_type": "linear", "factor": 2.0}).to_json()
    assert written["block_size"] == written["dflash_config"]["block_size"] == 4
    assert written["dflash_config"]["target_layer_ids"] == [1, 5]
    assert written["dflash_config"]["mask_token_id"] == 96
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 5e5
    assert written["rope_parameters"]["factor"] == written["rope_scaling"]["factor"] == 2.0
    assert written["num_target_layers"] == 8


def moved(config: dict[str, Any], layout: str) -> dict[str, Any]:
    """The same config as other writers lay it out."""
    inner = config.pop("dflash_config")
    if layout == "z-lab":  # block size at the top, transformers 4
        del config["rope_parameters"]
        return {**config, "dflash_config": {k: v for k, v in inner.items() if k != "block_size"}}
    if layout == "inner":  # all under dflash_config, transformers 5
        for key in ("block_size", "rope_theta", "rope_scaling"):
            del config[key]
        return {**config, "dflash_config": inner}
    return {**config, **inner}  # all at the top


@pytest.mark.parametrize("layout", ["z-lab", "inner", "top"])
def test_every_known_layout_is_read(layout: str) -> None:  # case 93
    config = tiny_config(rope_theta=5e5)
    assert DrafterConfig.from_json(moved(config.to_json(), layout)) == config


@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id", "block_size", "num_target_layers"])
def test_a_missing_key_is_named_and_never_guessed(key: str) -> None:  # case 95
    config = tiny_config().to_json()
    config.pop(key, None)
    config["dflash_config"].pop(key, None)
    with pytest.raises(ValueError, match=key):
        DrafterConfig.from_json(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 97}, "mask_token_id 97"),  # case 28
        ({"target_layer_ids": (1, 8)}, r"\[8\]"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"block_size": 1}, "block_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"layer_types": ("full_attention",)}, "layer_types"),
        ({"layer_types": ("full_attention", "linear_attention")}, "linear_attention"),
        ({"layer_types": (SLIDING, SLIDING)}, "sliding_window"),
    ],
    ids=str,
)
def test_an_impossible_shape_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("is_causal", "sliding", "full"), [(None, True, False), (False, False, False), (True, True, True)]
)
def test_sliding_layers_are_causal_in_the_block_unless_told_otherwise(
    is_causal: bool | None, sliding: bool, full: bool
) -> None:
    config = tiny_config(layer_types=(SLIDING, "full_attention"), sliding_window=8, is_causal=is_causal)
    assert (config.causal_of(0), config.causal_of(1)) == (sliding, full)
    assert (config.window_of(0), config.window_of(1)) == (8, None)
