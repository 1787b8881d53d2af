"""What decoding tests share: scripted drafters, batches of a target's own answers, and quick training on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafter_trainer.anchors import draw_anchors
from drafter_trainer.decode import BlockDrafter, decode_plain
from drafter_trainer.head import TargetHead
from drafter_trainer.loss import build_block_targets, drafter_loss
from drafter_trainer.model import Drafter
from drafter_trainer.optim import OptimSettings, build_optimizer
from drafter_trainer.target_runner import TargetRunner
from drafter_trainer.types import MicroBatch, TrainBatch, Version


class ScriptedDrafter(BlockDrafter):
    """Drafts the known answer, right in the first `right[i]` slots of round i and wrong behind them."""

    def __init__(self, drafter: Drafter, head: TargetHead, answer: Sequence[int], right: Sequence[int]) -> None:
        super().__init__(drafter, head)
        self._answer, self._right = list(answer), right
        self.restart()

    def restart(self) -> None:
        super().restart()
        self._emitted, self._round = 1, 0

    def draft(self, anchor_id: int) -> Tensor:
        super().draft(anchor_id)  # the real one runs too: its context must fit
        assert anchor_id == self._answer[self._emitted - 1]
        slots = self.block_size - 1
        coming = self._answer[self._emitted : self._emitted + slots]
        right = min(self._right[self._round % len(self._right)], slots)
        wrong = [(token + 1) % self.head.vocab_size for token in coming]
        drafts = [*coming[:right], *wrong[right:]]
        self._emitted += right + 1
        self._round += 1
        return torch.tensor([*drafts, *[0] * (slots - len(drafts))])


def pack_answers(
    target: Any, drafter: Drafter, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, epoch: int = 0
) -> TrainBatch:
    """Pack (prompt, answer) pairs with the features a forward of each gives."""
    runner = TargetRunner(target, target_layer_ids=drafter.config.target_layer_ids)
    documents = [torch.tensor([*prompt, *answer]) for prompt, answer in pairs]
    with torch.no_grad():
        features = torch.cat([runner.prefill(ids).features_RC for ids in documents])
    micro = MicroBatch(
        position=0,
        epoch=epoch,
        sample_ids=tuple(range(len(pairs))),
        lengths=tuple(len(ids) for ids in documents),
        input_ids_T=torch.cat(documents),
        loss_mask_T=torch.cat([torch.arange(len(p) + len(a)) >= len(p) for p, a in pairs]),
    )
    return TrainBatch(micro, features, Version(1, "test"), 0)


def own_answers(
    target: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Each prompt with the target's greedy answer."""
    runner = TargetRunner(target)
    return [(p, decode_plain(runner, p, max_new_tokens=max_new_tokens).token_ids) for p in prompts]


def train_drafter(drafter: Drafter, target: Any, batch: TrainBatch, *, steps: int, lr: float = 3e-3) -> float:
    """Train on one batch with new anchors each step, in place; returns the last step's loss."""
    head = TargetHead.from_model(target)
    drafter.train().requires_grad_(True)
    optimizer = build_optimizer(drafter, OptimSettings(lr=lr, total_steps=steps))
    loss = float("nan")
    for step in range(steps):
        micro = MicroBatch(**{**vars(batch.micro), "epoch": step})
        anchors = draw_anchors(micro, num_anchors=24, seed=1)
        targets = build_block_targets(micro, anchors, block_size=drafter.config.block_size, gamma=None)
        output = drafter_loss(
            drafter, head, TrainBatch(micro, batch.features_TC, batch.target_version, 0), anchors, targets
        )
        (output.loss_sum / output.weight_sum).backward()
        optimizer.step()
        loss = output.loss_sum.item() / output.weight_sum
    drafter.eval().requires_grad_(False)
    return loss
