from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

from drafter_trainer.model import Drafter, DrafterConfig
from drafter_trainer.target_layers import TargetLayersError, copy_target_layers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def save_target(directory: Path, config, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)  # gains other than 1
    model.save_pretrained(directory, **options)
    return model


def build_drafter(**changes) -> Drafter:
    sizes = {**SIZES, "num_hidden_layers": 2, **changes}
    return Drafter(DrafterConfig(**sizes, block_size=4, mask_token_id=95, num_target_layers=4, target_layer_ids=(0, 1)))


@pytest.mark.parametrize(("config", "shards"), [(LlamaConfig, "1GB"), (Qwen3Config, "40KB")])
def test_layers_are_the_targets_last_ones(tmp_path: Path, config, shards: str) -> None:
    target = save_target(tmp_path, config(**SIZES), max_shard_size=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "40KB")
    drafter = build_drafter()
    copy_target_layers(drafter, tmp_path)
    for layer, block in zip(drafter.layers, target.model.layers[2:], strict=True):
        for name, weight in layer.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                continue
            assert torch.equal(weight, block.get_parameter(name)), name
    assert torch.equal(drafter.hidden_norm.weight, target.model.layers[2].input_layernorm.weight)
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)
    if config is Qwen3Config:
        own = target.model.layers[3].self_attn.q_norm.weight
        assert torch.equal(drafter.layers[1].self_attn.q_norm.weight, own)


def test_context_keys_are_those_of_the_copied_block_when_the_tap_is_its_input(tmp_path: Path) -> None:
    target = save_target(tmp_path, LlamaConfig(**SIZES))
    drafter = build_drafter()
    copy_target_layers(drafter, tmp_path)
    tap_TE, other_TE = torch.randn(7, 32), torch.randn(7, 32)
    with torch.no_grad():
        fused = drafter.fuse(torch.cat([other_TE, tap_TE], 1))
        block = target.model.layers[2]
        value = block.self_attn.v_proj(block.input_layernorm(tap_TE))
        assert torch.allclose(drafter.layers[0].self_attn.v_proj(fused), value, atol=1e-6)


def test_query_and_key_sizes_start_as_a_white_input_gives_them(tmp_path: Path) -> None:
    target = save_target(tmp_path, LlamaConfig(**SIZES))
    drafter = build_drafter()
    copy_target_layers(drafter, tmp_path)
    x = torch.randn(20_000, 32)
    block = target.model.layers[3]
    with torch.no_grad():
        query = block.self_attn.q_proj(x * block.input_layernorm.weight).view(-1, 4, 8)
    expected = query.square().mean((0, 1)).sqrt()
    assert torch.allclose(drafter.layers[1].self_attn.q_norm.weight, expected, rtol=0.05)


@pytest.mark.parametrize(
    ("config", "changes", "says"),
    [
        (Gemma3TextConfig(**SIZES), {}, "model_type is 'gemma3_text'"),
        (LlamaConfig(**{**SIZES, "intermediate_size": 48}), {}, r"mlp.gate_proj is \[48, 32\] in the target"),
        (LlamaConfig(**SIZES), {"num_hidden_layers": 5}, "4 blocks for 5 drafter layers"),
    ],
)
def test_refuses_what_does_not_fit(tmp_path: Path, config, changes: dict, says: str) -> None:
    save_target(tmp_path, config)
    with pytest.raises(TargetLayersError, match=says):
        copy_target_layers(build_drafter(**changes), tmp_path)


def test_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TargetLayersError, match=r"config.json can't be read"):
        copy_target_layers(build_drafter(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 4}))
    with pytest.raises(TargetLayersError, match=r"model.safetensors can't be read"):
        copy_target_layers(build_drafter(), tmp_path)
