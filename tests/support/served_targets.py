"""Tiny random targets of every architecture the server promises, as checkpoint directories; no downloads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 320
LAYERS = 6

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _llama(transformers: Any) -> Any:
    return transformers.LlamaConfig(**_COMMON, tie_word_embeddings=True)


def _qwen3(transformers: Any) -> Any:
    return transformers.Qwen3Config(**_COMMON)


def _qwen3_moe(transformers: Any) -> Any:
    return transformers.Qwen3MoeConfig(
        **_COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1
    )


def _gemma3(transformers: Any) -> Any:
    # A window far below the sequences of the tests.
    kinds = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    return transformers.Gemma3TextConfig(
        **_COMMON, sliding_window=8, layer_types=kinds, final_logit_softcapping=30.0, tie_word_embeddings=True
    )


def _gpt_oss(transformers: Any) -> Any:
    return transformers.GptOssConfig(
        **_COMMON,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )


def _qwen3_5(transformers: Any) -> Any:
    return transformers.Qwen3_5TextConfig(
        **_COMMON,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )


def _glm4(transformers: Any) -> Any:
    return transformers.Glm4Config(**_COMMON)


def _deepseek_v3(transformers: Any) -> Any:
    common = {name: value for name, value in _COMMON.items() if name not in ("head_dim", "num_key_value_heads")}
    return transformers.DeepseekV3Config(
        **common,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    )


_CONFIGS: dict[str, Callable[[Any], Any]] = {
    "qwen3": _qwen3,
    "llama": _llama,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "qwen3_moe": _qwen3_moe,
    "qwen3_5": _qwen3_5,
    "glm4": _glm4,
    "deepseek_v3": _deepseek_v3,
}
ARCHITECTURES = tuple(_CONFIGS)


def write_target(directory: Path, architecture: str, *, dtype: torch.dtype = torch.float32, seed: int = 3) -> Path:
    """Writes a random checkpoint of an architecture into a new directory and returns it."""
    import transformers  # noqa: PLC0415 - takes seconds

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(_CONFIGS[architecture](transformers))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide enough that every block changes the residual stream visibly.
            if parameter.dim() > 1 and "embed_tokens" not in name:
                parameter.mul_(4.0)
    model.to(dtype).save_pretrained(directory)
    return directory


def some_ids(length: int, *, seed: int = 0) -> list[int]:
    """Random token ids."""
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
