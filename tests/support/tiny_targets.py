"""Random targets in memory, and random drafters for them: what decoding is tested with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from drafter_trainer.head import TargetHead
from drafter_trainer.model import Drafter, DrafterConfig
from tests.support.random_targets import VOCAB_SIZE, random_target

MASK_ID = VOCAB_SIZE - 1
LAYERS = 4
# Every kind that decoding meets. gemma3's and gpt_oss's windows are far below the prompts: rejected rows must come back
# after leaving them.
ARCHITECTURES = ("qwen3", "llama", "gemma3", "gpt_oss", "qwen3_5")


@cache
def tiny_target(architecture: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """One shared, frozen target; never change its weights."""
    model = random_target(architecture, num_layers=LAYERS, seed=13, scale=6.0, dtype=dtype)
    return model.eval().requires_grad_(False)


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
