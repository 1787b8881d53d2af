"""Tiny random targets of every kind that decoding meets, from configs; no downloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from drafter_trainer.head import TargetHead
from drafter_trainer.model import Drafter, DrafterConfig

VOCAB_SIZE = 320
MASK_ID = VOCAB_SIZE - 1
LAYERS = 4

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415 - transformers takes seconds

    return Qwen3ForCausalLM(Qwen3Config(**_COMMON))


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    return LlamaForCausalLM(LlamaConfig(**_COMMON, tie_word_embeddings=True))


def _gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig  # noqa: PLC0415

    # A window far below the prompts used in tests: rejected rows must come back after leaving it.
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**_COMMON, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2)
    )


def _gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM  # noqa: PLC0415

    config = GptOssConfig(
        **_COMMON,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    return GptOssForCausalLM(config)


def _qwen35() -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig  # noqa: PLC0415

    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **_COMMON,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        )
    )


_BUILDERS: dict[str, Callable[[], Any]] = {
    "qwen3": _qwen3,
    "llama": _llama,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "qwen3_5": _qwen35,
}
ARCHITECTURES = tuple(_BUILDERS)


@cache
def tiny_target(architecture: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """One shared, frozen target; never change its weights. They are scaled up so that answers are not constant."""
    torch.manual_seed(11)
    model = _BUILDERS[architecture]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Not the embedding: with a tied head it would make every token answer itself.
            if parameter.dim() > 1 and "embed_tokens" not in name:
                parameter.mul_(6.0)
    return model.to(dtype).eval().requires_grad_(False)


def tiny_drafter(
    target: nn.Module,
    *,
    layers: int = 2,
    taps: Sequence[int] = (0, 2),
    block_size: int = 4,
    seed: int = 5,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Drafter:
    """A drafter for a tiny target whose every weight is random, so that nothing in it is a no-op."""
    hidden = target.config.get_text_config().hidden_size
    drafter = Drafter(
        DrafterConfig(
            hidden_size=hidden,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_target_layers=LAYERS,
            target_layer_ids=tuple(taps),
            mask_token_id=MASK_ID,
            block_size=block_size,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=512,
            rope_theta=1e4,
            **config,
        )
    )
    generator = torch.Generator().manual_seed(seed)
    drafter.initialise(TargetHead.from_model(target), generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.15 if parameter.dim() > 1 else 1.0 + 0.1 * noise)
    return drafter.to(dtype).eval().requires_grad_(False)


def some_prompt(length: int, *, seed: int = 0) -> list[int]:
    """Random ordinary token ids."""
    return torch.randint(3, VOCAB_SIZE - 8, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
