"""Twenty steps of every recipe on one small batch: finite all the way, and lower at the end."""

from __future__ import annotations

import math

import pytest
import torch

from drafter_trainer.anchors import draw_anchors
from drafter_trainer.loss import build_block_targets, drafter_loss
from drafter_trainer.model import Drafter
from drafter_trainer.optim import Algorithm, OptimSettings, build_optimizer
from tests.support.drafters import random_batch, random_head, random_micro, tiny_config

STEPS = 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
@pytest.mark.parametrize("loss", ["ce", "dpace"])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_twenty_steps_are_finite_and_lower_the_loss(
    layers: int, loss: str, algorithm: Algorithm, dtype: torch.dtype
) -> None:
    """The cross-entropy is compared, not D-PACE's own loss, which grows as its weights do."""
    config = tiny_config(num_hidden_layers=layers)
    head, batch = random_head(), random_batch(random_micro((24, 17)), config)
    drafter = Drafter(config)
    drafter.initialise(head, torch.Generator().manual_seed(0))
    settings = OptimSettings(algorithm=algorithm, lr=1e-2, total_steps=STEPS, muon_dtype=dtype)
    optimizer = build_optimizer(drafter, settings)
    anchors = draw_anchors(batch.micro, num_anchors=8, seed=0)
    targets = build_block_targets(batch.micro, anchors, block_size=4, gamma=4.0 if loss == "ce" else None)
    entropies = []
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            output = drafter_loss(drafter, head, batch, anchors, targets, dpace_alpha=0.5 if loss == "dpace" else None)
        (output.loss_sum / output.weight_sum).backward()  # type: ignore[no-untyped-call]
        assert not optimizer.step().skipped
        entropies.append(float(output.cross_entropy_AK.sum() / output.valid_AK.sum()))
    assert all(math.isfinite(entropy) for entropy in entropies)
    assert entropies[-1] < 0.9 * entropies[0]
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in drafter.parameters())
