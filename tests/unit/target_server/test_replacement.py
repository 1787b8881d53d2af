"""Which configs mean the same target. What files are refused for is shown on a running server (test_swap.py)."""

from __future__ import annotations

import pytest

from target_server.replacement import config_differences

CONFIG = {
    "model_type": "llama",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "layer_types": ["full_attention", "sliding_attention"],
    "eos_token_id": 2,
    "transformers_version": "5.0.0",
    "dtype": "float32",
    "head_dim": None,
}


def test_what_does_not_change_the_features_may_differ() -> None:
    other = {**CONFIG, "eos_token_id": [2, 7], "transformers_version": "5.3.0", "use_cache": False, "dtype": "bfloat16"}
    del other["head_dim"]
    assert list(config_differences(other, CONFIG)) == []


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ("rope_parameters.rope_theta", 5e5, 1e4)),
        ({"rope_parameters": None}, ("rope_parameters", None, CONFIG["rope_parameters"])),
        ({"layer_types": ["full_attention"] * 2}, ("layer_types", ["full_attention"] * 2, CONFIG["layer_types"])),
        ({"attention_bias": True}, ("attention_bias", True, None)),
    ],
)
def test_what_changes_them_is_named_with_both_values(
    change: dict[str, object], difference: tuple[str, object, object]
) -> None:
    assert list(config_differences({**CONFIG, **change}, CONFIG)) == [difference]
