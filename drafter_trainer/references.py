"""The target's own greedy answers, to compare with and to walk along.

Owns batched plain decoding through transformers' `generate` (left-padded), which is several times cheaper a token
than one row at a time. Its answers are references, not the last word: padding and batching round differently, so a
comparison that fails must be repeated with a single row before it means anything. The tapped blocks' outputs, which a
simulation of the drafter needs, are kept on the way: another forward over prompts and answers would cost as much again.

Shapes: R tokens of one sequence, C = taps * D.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from drafter_trainer.target_runner import decoder_blocks

__all__ = ["Reference", "batched_answers", "eos_ids_of"]


def eos_ids_of(model: Any) -> tuple[int, ...]:
    """Every token that ends an answer of this model: its generation config's, else its config's; may be empty."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    return ()


@dataclass(frozen=True)
class Reference:
    """A greedy answer, and the tapped states of prompt and answer.

    Attributes:
        token_ids: The answer, an ending eos included.
        features_RC: States of all tokens but the answer's last, which was never fed back; C is 0 without taps.
    """

    token_ids: tuple[int, ...]
    features_RC: Tensor


@torch.inference_mode()
def batched_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    batch_size: int = 16,
    target_layer_ids: Sequence[int] = (),
) -> list[Reference]:
    """Greedy answers in the prompts' order, with the states of the blocks `target_layer_ids`."""
    answers: dict[int, Reference] = {}
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(eos_ids) or None,
        pad_token_id=eos_ids[0] if eos_ids else 0,
    )
    device = model.get_input_embeddings().weight.device
    for batch in _batches(prompts, batch_size):
        ids, seen = _left_padded([prompts[i] for i in batch])
        with _tapped(model, target_layer_ids) as states:
            output = model.generate(ids.to(device), attention_mask=seen.to(device), generation_config=settings)
        features_BRC = torch.cat([torch.cat(steps, 1) for steps in states], 2) if states else ids.new_empty(0)
        width = ids.shape[1]
        for place, (index, row) in enumerate(zip(batch, output[:, width:].tolist(), strict=True)):
            end = next((i + 1 for i, token in enumerate(row) if token in eos_ids), len(row))
            span = slice(width - len(prompts[index]), width + end - 1)
            features_RC = features_BRC[place, span].clone() if states else ids.new_empty(span.stop - span.start, 0)
            answers[index] = Reference(tuple(row[:end]), features_RC)
    return [answers[index] for index in range(len(prompts))]


@contextmanager
def _tapped(model: Any, target_layer_ids: Sequence[int]) -> Iterator[list[list[Tensor]]]:
    """Collects, by tap, the outputs [batch, new tokens, D] of every forward in the block."""
    states: list[list[Tensor]] = [[] for _ in target_layer_ids]

    def keeper(kept: list[Tensor]) -> Any:
        return lambda _module, _inputs, output: kept.append(output[0] if isinstance(output, tuple) else output)

    blocks = decoder_blocks(model)
    hooks = [
        blocks[index].register_forward_hook(keeper(kept)) for index, kept in zip(target_layer_ids, states, strict=True)
    ]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


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
