"""Tiny drafters, heads and batches for tests of the model and loss."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.head import TargetHead
from drafter_trainer.model import Drafter
from drafter_trainer.types import MicroBatch, TrainBatch, Version

VOCAB, HIDDEN, MASK_ID = 97, 24, 96


def tiny_config(**changes: Any) -> DrafterConfig:
    """Two layers, two taps, head geometry that is not the hidden size's."""
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_target_layers": 8,
        "target_layer_ids": (1, 5),
        "mask_token_id": MASK_ID,
        "block_size": 4,
        "vocab_size": VOCAB,
    }
    return DrafterConfig(**{**values, **changes})


def random_drafter(config: DrafterConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Drafter:
    """A drafter in which every parameter matters: nothing is zero, no gain is one."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(config)
    with torch.no_grad():
        for p in drafter.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2 * noise if p.dim() == 1 else noise * p.shape[1] ** -0.5)
    return drafter.to(dtype)


def random_head(*, vocab: int = VOCAB, hidden: int = HIDDEN, seed: int = 1, **facts: Any) -> TargetHead:
    """A tied head."""
    rows = torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(seed))
    return TargetHead({"embed_tokens": rows}, tied=True, **facts)


def random_micro(lengths: tuple[int, ...], *, seed: int = 2, supervised: float = 0.8, epoch: int = 0) -> MicroBatch:
    """Documents of random tokens and loss mask."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return MicroBatch(
        position=0,
        epoch=epoch,
        sample_ids=tuple(range(10, 10 + len(lengths))),
        lengths=lengths,
        input_ids_T=torch.randint(0, MASK_ID, (total,), generator=generator),
        loss_mask_T=torch.rand(total, generator=generator) < supervised,
    )


def random_batch(micro: MicroBatch, config: DrafterConfig, *, seed: int = 3) -> TrainBatch:
    """`micro` with random features."""
    width = len(config.target_layer_ids) * config.hidden_size
    features = torch.randn(int(micro.input_ids_T.numel()), width, generator=torch.Generator().manual_seed(seed))
    return TrainBatch(micro, features, Version(1, "0" * 32), 0)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Lengths of documents and sorted (document, anchor) blocks; some documents without any."""
    lengths = tuple(draw(st.lists(st.integers(1, 30), min_size=1, max_size=4)))
    places = [(d, a) for d, length in enumerate(lengths) for a in range(length)]
    blocks = draw(st.lists(st.sampled_from(places), min_size=1, max_size=12, unique=True))
    return lengths, sorted(blocks)


def blocks_of(document_A: Tensor, position_A: Tensor) -> list[tuple[int, int]]:
    """Anchors as (document, position) pairs."""
    return list(zip(document_A.tolist(), position_A.tolist(), strict=True))
