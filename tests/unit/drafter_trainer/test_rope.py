"""Rotary tables against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from drafter_trainer.rope import RotaryTable, apply_rotary
from tests.support.drafters import random_drafter, tiny_config

POSITIONS = torch.tensor([0, 1, 2, 77, 4095, 39_999])


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=lambda s: s["rope_type"] if s else "default",
)
def test_rotation_equals_transformers(scaling: dict[str, Any] | None) -> None:  # cases 50, 93
    config = tiny_config(rope_scaling=scaling, rope_theta=5e5, head_dim=16)
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=config.hidden_size,
            num_attention_heads=4,
            head_dim=16,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_type": "default", **(scaling or {}), "rope_theta": 5e5},
        )
    )
    x = torch.randn(len(POSITIONS), 4, 16)
    cos, sin = theirs(x, POSITIONS[None])
    expected, _ = apply_rotary_pos_emb(x[None].transpose(1, 2), x[None].transpose(1, 2), cos, sin)
    ours = apply_rotary(x, RotaryTable(config)(POSITIONS))
    torch.testing.assert_close(ours, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_partial_rotation_leaves_the_rest() -> None:
    table = RotaryTable(tiny_config(partial_rotary_factor=0.5, head_dim=16))
    x = torch.randn(len(POSITIONS), 2, 16)
    out = apply_rotary(x, table(POSITIONS))
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert not torch.allclose(out[1:, :, :8], x[1:, :, :8])
    torch.testing.assert_close(out[..., :8].norm(dim=-1), x[..., :8].norm(dim=-1))


def test_frequencies_stay_float32_and_out_of_the_state_dict() -> None:
    drafter = random_drafter(tiny_config()).to(torch.bfloat16)
    assert drafter.rotary.inverse_frequency.dtype == torch.float32
    cos, _ = drafter.rotary(torch.tensor([257]))
    assert cos[0, 0].item() == pytest.approx(torch.tensor(257.0).cos().item(), abs=1e-6)
    assert not any("rotary" in name or "freq" in name for name in drafter.state_dict())


def test_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="spiral"):
        RotaryTable(tiny_config(rope_scaling={"rope_type": "spiral"}))
