"""Tiny random targets of every architecture that is promised, from configs; no downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCAB_SIZE = 320

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _llama(transformers: Any, common: dict[str, Any]) -> Any:
    return transformers.LlamaConfig(**common, tie_word_embeddings=True)


def _qwen3(transformers: Any, common: dict[str, Any]) -> Any:
    return transformers.Qwen3Config(**common)


def _qwen3_moe(transformers: Any, common: dict[str, Any]) -> Any:
    return transformers.Qwen3MoeConfig(
        **common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1
    )


def _gemma3(transformers: Any, common: dict[str, Any]) -> Any:
    # A window far below the sequences of the tests.
    kinds = ["sliding_attention", "full_attention"] * (common["num_hidden_layers"] // 2)
    return transformers.Gemma3TextConfig(
        **common, sliding_window=8, layer_types=kinds, final_logit_softcapping=30.0, tie_word_embeddings=True
    )


def _gpt_oss(transformers: Any, common: dict[str, Any]) -> Any:
    return transformers.GptOssConfig(
        **common,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )


def _qwen3_5(transformers: Any, common: dict[str, Any]) -> Any:
    return transformers.Qwen3_5TextConfig(
        **common,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )


def _glm4(transformers: Any, common: dict[str, Any]) -> Any:
    return transformers.Glm4Config(**common)


def _deepseek_v3(transformers: Any, common: dict[str, Any]) -> Any:
    own = {name: value for name, value in common.items() if name not in ("head_dim", "num_key_value_heads")}
    return transformers.DeepseekV3Config(
        **own,
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


_CONFIGS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
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


def random_target(architecture: str, *, num_layers: int, seed: int, scale: float, dtype: torch.dtype) -> Any:
    """A transformers model of an architecture with random weights.

    Args:
        architecture: One of ARCHITECTURES.
        num_layers: Even.
        seed: Of the weights.
        scale: Of the matrices, over the usual draw: every block then changes the residual stream visibly, and answers
            are not constant. Not of the embedding: with a tied head it would make every token answer itself.
        dtype: Of the weights.
    """
    import transformers  # noqa: PLC0415 - takes seconds

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = _CONFIGS[architecture](transformers, _COMMON | {"num_hidden_layers": num_layers})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed_tokens" not in name:
                parameter.mul_(scale)
    return model.to(dtype)
