"""A step engine on tiny random batches, without feed, server or files."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.feed import FedBatch
from drafter_trainer.head import TargetHead
from drafter_trainer.optim import OptimSettings, build_optimizer
from drafter_trainer.parallel import Ranks, SharedDrafter
from drafter_trainer.step import StepEngine
from drafter_trainer.step_records import BadBatch, StepOutcome, StepSettings
from drafter_trainer.types import MicroBatch, TrainBatch, Version
from tests.support.drafters import random_drafter, random_head, random_micro, tiny_config

CONFIG: DrafterConfig = tiny_config()
SETTINGS = StepSettings(
    seed=3,
    num_anchors=6,
    block_size=CONFIG.block_size,
    gamma=4.0,
    dpace_alpha=None,
    chunk_rows=16,
    sampler=None,
    compute_dtype=torch.float32,
    device=torch.device("cpu"),
    accumulation=3,
)
SERVED, OTHER = Version(1, "d"), Version(2, "e")


class Batches:
    """Stands in for a feed."""

    def __init__(self, batches: list[FedBatch]) -> None:
        self._batches = iter(batches)

    @contextlib.contextmanager
    def next_batch(self) -> Iterator[FedBatch]:
        yield next(self._batches)

    def take_wait_s(self) -> float:
        return 0.25

    def take_asked_again(self) -> int:
        return 0


class OneHead:
    def __init__(self) -> None:
        tensors = {"embed_tokens": random_head().embed_tokens_VD, "final_norm": torch.ones(CONFIG.hidden_size)}
        self.value = TargetHead(tensors, tied=True)

    def head(self, version: Version) -> TargetHead:
        return self.value


def micro_batch(position: int, lengths: tuple[int, ...], *, supervised: float = 0.8) -> MicroBatch:
    micro = random_micro(lengths, seed=position, supervised=supervised)
    ids = tuple(10 * position + i for i in range(len(lengths)))
    return dataclasses.replace(micro, position=position, sample_ids=ids)


def fed_batch(micro: MicroBatch, *, finite: bool = True, scale: float = 1.0, version: Version = SERVED) -> FedBatch:
    width = len(CONFIG.target_layer_ids) * CONFIG.hidden_size
    generator = torch.Generator().manual_seed(micro.position)
    features_TC = torch.randn(sum(micro.lengths), width, generator=generator) * scale
    return FedBatch(TrainBatch(micro, features_TC, version, 0), finite)


def run_step(
    batches: list[FedBatch],
    *,
    engine: StepEngine | None = None,
    step: int = 1,
    ranks: Ranks | None = None,
    settings: StepSettings = SETTINGS,
    on_bad: Callable[[BadBatch], None] = lambda bad: None,
) -> tuple[StepOutcome, StepEngine]:
    drafter = random_drafter(CONFIG) if engine is None else engine.drafter
    optimizer = (
        build_optimizer(drafter, OptimSettings(lr=1e-3, total_steps=10, max_grad_norm=None))
        if engine is None
        else engine.optimizer
    )
    engine = StepEngine(
        SharedDrafter(drafter, ranks or Ranks()) if engine is None else engine.shared,
        optimizer=optimizer,
        feed=Batches(batches),  # type: ignore[arg-type]
        heads=OneHead(),
        settings=settings,
        on_bad=on_bad,
    )
    outcome = engine.step(step, [fed.batch.micro for fed in batches], simulate=True)
    return outcome, engine


def state_of(engine: StepEngine) -> dict[str, Any]:
    return copy.deepcopy({"model": engine.drafter.state_dict(), "optimizer": engine.optimizer.state_dict()})


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right
