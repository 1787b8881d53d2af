"""Does a dumped micro-batch again and says where it stops being finite.

Owns the comparison with the number that was seen. One forward and one backward pass with the weights, the anchors and
the settings of then; nothing is trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafter_trainer.client.head import load_head
from drafter_trainer.dump import Dump
from drafter_trainer.errors import UserError
from drafter_trainer.head import TargetHead
from drafter_trainer.loss import build_block_targets, drafter_loss
from drafter_trainer.model import Drafter
from drafter_trainer.types import TrainBatch

__all__ = ["Replay", "replay_dump"]

# Another number of threads, or another device, adds up in another order.
ROUNDING = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """What came out.

    Attributes:
        recorded_loss, loss: This micro-batch's sum then and now.
        exact: Whether they are the same number (two NaN are).
        reproduced: Whether they are the same to rounding, and what wasn't finite then isn't now.
        bad_features: Values of the features that are not finite.
        first_bad_feature: Where the first of them is, in words; empty when there's none.
        first_bad_module: The first part of the drafter whose output isn't finite; empty when there's none.
        grad_norm: Of this micro-batch's gradient alone.
        bad_gradients: Parameters whose gradient isn't finite.
    """

    recorded_loss: float
    loss: float
    exact: bool
    reproduced: bool
    bad_features: int
    first_bad_feature: str
    first_bad_module: str
    grad_norm: float
    bad_gradients: list[str]

    def to_json(self) -> dict[str, Any]:
        """As JSON values; numbers that JSON has no word for as text."""
        values = dataclasses.asdict(self)
        return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def replay_dump(dump: Dump, *, weights: dict[str, Tensor] | None = None, device: torch.device) -> Replay:
    """Runs it.

    Args:
        dump: What to do again.
        weights: In place of the dump's own.
        device: Where.

    Raises:
        UserError: Neither has the drafter's weights, or the head is missing.
    """
    head = load_dumped_head(dump, device)
    drafter = Drafter(dump.config)
    drafter.load_state_dict(own_weights(dump) if weights is None else weights)
    drafter.to(device)
    with first_bad(drafter) as found:
        loss_sum = _loss_sum(dump, drafter, head, device)
    scale = max(dump.facts["weight_sum"], torch.finfo(torch.float32).tiny)
    (loss_sum / scale).backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    bad_gradients = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    loss = float(loss_sum.detach())
    bad_features = int((~dump.batch.features_TC.isfinite()).sum())
    kind = dump.facts["culprit"]["kind"]
    still_bad = bool({"features": bad_features, "loss": not math.isfinite(loss), "gradient": bad_gradients}[kind])
    return Replay(
        recorded_loss=dump.loss_sum,
        loss=loss,
        exact=same_number(loss, dump.loss_sum),
        reproduced=still_bad and same_number(loss, dump.loss_sum, tolerance=ROUNDING),
        bad_features=bad_features,
        first_bad_feature=describe_first(dump.batch, dump) if bad_features else "",
        first_bad_module=found[0] if found else "",
        grad_norm=float(nn.utils.get_total_norm(list(gradients.values()))),
        bad_gradients=bad_gradients,
    )


def _loss_sum(dump: Dump, drafter: Drafter, head: TargetHead, device: torch.device) -> Tensor:
    """The forward pass as the run made it."""
    targets = build_block_targets(
        dump.batch.micro, dump.anchors, block_size=dump.config.block_size, gamma=dump.facts["gamma"]
    )
    with torch.autocast(device.type, dtype=dump.compute_dtype, enabled=dump.compute_dtype != torch.float32):
        return drafter_loss(
            drafter,
            head,
            dump.batch,
            dump.anchors,
            targets,
            dpace_alpha=dump.facts["dpace_alpha"],
            sampler=dump.sampler,
            distillation=dump.distillation,
            chunk_rows=dump.facts["chunk_rows"],
        ).loss_sum


def load_dumped_head(dump: Dump, device: torch.device) -> TargetHead:
    """The head the batch was trained with, as the loss used it."""
    if not dump.head_path.is_file():
        raise UserError("DUMP", dump.directory, f"{dump.head_path.name} is missing; copy the run's heads/ file there")
    head = load_head(dump.head_path, dump.batch.target_version)
    return head.with_norm_offset(dump.facts["final_norm_offset"]).to(device, dump.compute_dtype)


def own_weights(dump: Dump) -> dict[str, Tensor]:
    """The dump's weights."""
    if dump.weights is None:
        fix = (
            "holds no weights (each rank had a part of them, and the run ended before they were put together); "
            "name a checkpoint near its step with --checkpoint"
        )
        raise UserError("DUMP", dump.directory, fix)
    return dump.weights


@contextlib.contextmanager
def first_bad(drafter: nn.Module) -> Iterator[list[str]]:
    """Collects the names of modules whose outputs are not finite, in the order in which they ran."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not output.isfinite().all():
                found.append(name)

        return look

    hooks = [m.register_forward_hook(watch(name)) for name, m in drafter.named_modules() if name]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def describe_first(batch: TrainBatch, dump: Dump) -> str:
    """Where the first feature that isn't finite is."""
    token, column = (~batch.features_TC.isfinite()).nonzero()[0].tolist()
    tap, element = divmod(column, dump.config.hidden_size)
    document, within = 0, token
    while within >= batch.micro.lengths[document]:
        within -= batch.micro.lengths[document]
        document += 1
    return (
        f"layer {dump.config.target_layer_ids[tap]} of the target, token {within} of sample "
        f"{batch.micro.sample_ids[document]}, element {element}"
    )


def same_number(one: float, other: float, *, tolerance: float = 0.0) -> bool:
    """Whether two numbers are the same; NaN is the same as NaN."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or math.isclose(one, other, rel_tol=tolerance)


def checkpoint_weights(directory: Path) -> dict[str, Tensor]:
    """The drafter's weights of a checkpoint.

    Raises:
        UserError: There's none.
    """
    from drafter_trainer.checkpoint import read_checkpoint  # noqa: PLC0415

    if not (directory / "manifest.json").is_file():
        raise UserError("--checkpoint", directory, "is no checkpoint; give a directory run.dir/checkpoints/step-N")
    return read_checkpoint(directory).model
