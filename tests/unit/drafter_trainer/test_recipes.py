"""Twenty steps of every recipe on SmolLM2's own features: finite all the way, and lower at the end.

The whole grid takes minutes where bf16 is emulated and runs in `make soak`; `make test` has two cases of it, which see
both losses, both optimizers and both types.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from drafter_trainer.anchors import draw_anchors
from drafter_trainer.devices import resolve_compute_dtype
from drafter_trainer.loss import build_block_targets, drafter_loss
from drafter_trainer.model import Drafter
from drafter_trainer.optim import OptimSettings, build_optimizer
from tests.support.smollm2_features import load_smollm2_batch, smollm2_config
from tests.support.soak import SOAKS

STEPS = 20
CPU = torch.device("cpu")
Recipe = tuple[int, str, str, str]
GRID: list[Recipe] = list(itertools.product((1, 2, 5), ("ce", "dpace"), ("adamw", "muon"), ("fp32", "bf16")))
SHORT: list[Recipe] = [(1, "ce", "muon", "bf16"), (2, "dpace", "adamw", "fp32")]


@pytest.mark.parametrize(("layers", "loss", "algorithm", "dtype"), GRID if SOAKS else SHORT, ids=str)
def test_twenty_steps_are_finite_and_lower_the_loss(layers: int, loss: str, algorithm: str, dtype: str) -> None:
    """The cross-entropy is compared, not D-PACE's own loss, which grows as its weights do."""
    head, batch = load_smollm2_batch()
    config = smollm2_config(layers)
    drafter = Drafter(config)
    drafter.initialise(head, torch.Generator().manual_seed(0))
    settings = OptimSettings(
        algorithm=algorithm,  # type: ignore[arg-type]
        lr=1e-3,
        total_steps=STEPS,
        muon_dtype=resolve_compute_dtype("auto", CPU),
    )
    optimizer = build_optimizer(drafter, settings)
    anchors = draw_anchors(batch.micro, num_anchors=4, seed=0)
    gamma, alpha = (3.0, None) if loss == "ce" else (None, 0.5)
    targets = build_block_targets(batch.micro, anchors, block_size=config.block_size, gamma=gamma)
    entropies = []
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
            output = drafter_loss(drafter, head, batch, anchors, targets, dpace_alpha=alpha)
        (output.loss_sum / output.weight_sum).backward()  # type: ignore[no-untyped-call]
        assert not optimizer.step().skipped
        entropies.append(float(output.cross_entropy_AK.sum() / output.valid_AK.sum()))
    assert all(math.isfinite(entropy) for entropy in entropies)
    assert entropies[-1] < 0.9 * entropies[0], entropies
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in drafter.parameters())
