"""The drafter's shape for a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from target_wire.v1 import target_pb2 as pb

from drafter_trainer.config import DrafterSection
from drafter_trainer.drafter_shape import read_model_config, resolve_drafter_config
from drafter_trainer.errors import UserError

TARGET = pb.TargetModel(hidden_size=576, layer_count=30, vocab_size=49152, tie_word_embeddings=True)
MODEL_CONFIG = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "rope_theta": 1e5,
}


def resolve(model_config: dict[str, Any] | None = None, *, mask_token_id: int = 16, **section: Any) -> Any:
    return resolve_drafter_config(
        DrafterSection(**section), TARGET, mask_token_id=mask_token_id, model_config=model_config or {}
    )


def test_what_is_not_given_follows_the_target() -> None:
    config = resolve(MODEL_CONFIG, num_layers=2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.intermediate_size, config.rope_theta) == (1536, 1e5)
    assert config.target_layer_ids == (1, 27)
    assert config.tie_word_embeddings


def test_what_is_given_wins() -> None:
    config = resolve(MODEL_CONFIG, num_attention_heads=4, num_key_value_heads=2, head_dim=32, rope_theta=7.0)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert config.rope_theta == 7.0


@pytest.mark.parametrize(
    "change",
    [
        {"kv_lora_rank": 512},
        {"partial_rotary_factor": 0.25},
        {"rope_parameters": {"mrope_section": [1, 2], "rope_theta": 1e7}},
        {"hidden_size": 1024},
    ],
)
def test_a_geometry_that_a_drafter_cannot_copy_is_replaced_by_its_own(change: dict[str, Any]) -> None:  # case 50
    config = resolve({**MODEL_CONFIG, **change})
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.intermediate_size == 3 * 576


def test_a_sliding_window_leaves_the_last_layers_full() -> None:
    config = resolve(sliding_window=128, num_layers=3, full_attention_layers=1, target_layer_ids=(1, 2, 3))
    assert config.layer_types == ("sliding_attention", "sliding_attention", "full_attention")


@pytest.mark.parametrize(
    ("section", "mask_token_id", "field"),
    [
        ({"target_layer_ids": (0, 30)}, 16, "drafter.target_layer_ids"),
        ({"target_layer_ids": (3, 3)}, 16, "drafter.target_layer_ids"),
        ({}, 49152, "drafter.mask_token_id"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, 16, "drafter"),
    ],
)
def test_a_setting_that_does_not_fit_the_target_is_the_users(
    section: dict[str, Any], mask_token_id: int, field: str
) -> None:  # cases 27, 28, 51
    with pytest.raises(UserError) as caught:
        resolve(mask_token_id=mask_token_id, **section)
    assert caught.value.field == field


def test_the_text_part_of_a_multimodal_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vl", "text_config": {"hidden_size": 7}}))
    assert read_model_config(tmp_path) == {"hidden_size": 7}
    assert read_model_config(tmp_path / "missing") == {}
    assert read_model_config(None) == {}
