"""The target's own greedy answers, to compare with and to walk along.

Owns batched plain decoding through transformers' `generate` (left-padded), which is several times cheaper a token
than one row at a time. Its answers are references, not the last word: padding and batching round differently, so a
comparison that fails must be repeated with a single row before it means anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

__all__ = ["batched_answers", "eos_ids_of"]


def eos_ids_of(model: Any) -> tuple[int, ...]:
    """Every token that ends an answer of this model: its generation config's, else its config's; may be empty."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    return ()


@torch.inference_mode()
def batched_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    batch_size: int = 8,
) -> list[tuple[int, ...]]:
    """Greedy answers, an ending eos included, in the prompts' order."""
    answers: list[tuple[int, ...]] = [()] * len(prompts)
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(eos_ids) or None,
        pad_token_id=eos_ids[0] if eos_ids else 0,
    )
    device = model.get_input_embeddings().weight.device
    for batch in _batches(prompts, batch_size):
        ids, seen = _left_padded([prompts[i] for i in batch])
        output = model.generate(ids.to(device), attention_mask=seen.to(device), generation_config=settings)
        for index, row in zip(batch, output[:, ids.shape[1] :].tolist(), strict=True):
            end = next((i + 1 for i, token in enumerate(row) if token in eos_ids), len(row))
            answers[index] = tuple(row[:end])
    return answers


def _batches(prompts: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Indices of prompts, alike lengths together so that little is padding."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    seen = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        seen[row, width - len(prompt) :] = 1
    return ids, seen
