"""One forward and backward pass of the drafter, ours or the plain reference's, in a process of its own.

`python -m bench.step_run JSON` with the fields of `Work` prints one line of JSON with those of `Measured`. Peak memory
is the kernel's high-water mark above what weights, head and features take; it is that of the first, cold, pass. Time is
that of a second one: a run makes thousands of passes, and a first one is busy mapping memory.

The drafter has two layers as wide as SmolLM2-135M, and its head. Weights are fp32, and so are products.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from drafter_trainer.anchors import Anchors, draw_anchors
from drafter_trainer.drafter_config import DrafterConfig, default_target_layer_ids
from drafter_trainer.head import TargetHead
from drafter_trainer.loss import BlockTargets, build_block_targets, drafter_loss
from drafter_trainer.model import Drafter
from drafter_trainer.types import MicroBatch, TrainBatch, Version
from tests.support.dense_reference import dense_hidden, dense_loss

__all__ = ["Measured", "Work", "measure"]

GAMMA = 4.0


@dataclasses.dataclass(frozen=True)
class Work:
    """What to run.

    Attributes:
        kind: The product's step or the plain reference.
        sequences, tokens: B sequences of S tokens each, all supervised.
        anchors: In each sequence.
        block_size: K.
        vocab_size: Rows of the head.
        threads: CPU threads; 0 for as many as torch takes.
    """

    kind: Literal["product", "reference"]
    sequences: int
    tokens: int
    anchors: int
    block_size: int
    vocab_size: int = 49152
    threads: int = 0


@dataclasses.dataclass(frozen=True)
class Measured:
    """What came of it.

    Attributes:
        seconds: Forward and backward, warm.
        peak_bytes: Most memory above what was there before the first pass.
        loss: Mean weighted cross-entropy.
        grad_norm: Norm of all gradients.
    """

    seconds: float
    peak_bytes: int
    loss: float
    grad_norm: float


@dataclasses.dataclass(frozen=True)
class _Setup:
    drafter: Drafter
    head: TargetHead
    batch: TrainBatch
    anchors: Anchors
    targets: BlockTargets


def measure(work: Work) -> Measured:
    """Runs two passes in this process, which should have done nothing else."""
    if work.threads:
        torch.set_num_threads(work.threads)
    setup = _build(work)
    forward: Callable[[_Setup], Tensor] = {"product": _product_loss, "reference": _reference_loss}[work.kind]
    _reset_peak()
    before = _memory("VmRSS")
    _pass(setup, forward)
    peak_bytes = _memory("VmHWM") - before
    loss, seconds = _pass(setup, forward)
    gradients = [p.grad for p in setup.drafter.parameters() if p.grad is not None]
    return Measured(seconds, peak_bytes, loss, float(torch.nn.utils.get_total_norm(gradients)))


def _build(work: Work) -> _Setup:
    config = DrafterConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        num_target_layers=30,
        target_layer_ids=default_target_layer_ids(30, 5),
        mask_token_id=work.vocab_size - 1,
        block_size=work.block_size,
        vocab_size=work.vocab_size,
    )
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(work.vocab_size, config.hidden_size, generator=generator)
    head = TargetHead({"embed_tokens": rows * 0.05}, tied=True)
    total = work.sequences * work.tokens
    micro = MicroBatch(
        position=0,
        epoch=0,
        sample_ids=tuple(range(work.sequences)),
        lengths=(work.tokens,) * work.sequences,
        input_ids_T=torch.randint(0, work.vocab_size - 1, (total,), generator=generator),
        loss_mask_T=torch.ones(total, dtype=torch.bool),
    )
    features_TC = torch.randn(total, 5 * config.hidden_size, generator=generator)
    anchors = draw_anchors(micro, num_anchors=work.anchors, seed=0)
    drafter = Drafter(config)
    drafter.initialise(head, generator)
    return _Setup(
        drafter=drafter,
        head=head,
        batch=TrainBatch(micro, features_TC, Version(1, "0" * 32), 0),
        anchors=anchors,
        targets=build_block_targets(micro, anchors, block_size=work.block_size, gamma=GAMMA),
    )


def _pass(setup: _Setup, forward: Callable[[_Setup], Tensor]) -> tuple[float, float]:
    """Returns the loss and how many seconds the pass took."""
    setup.drafter.zero_grad(set_to_none=True)
    began_s = time.perf_counter()
    loss = forward(setup) / setup.targets.weight_sum
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), time.perf_counter() - began_s


def _product_loss(setup: _Setup) -> Tensor:
    return drafter_loss(setup.drafter, setup.head, setup.batch, setup.anchors, setup.targets).loss_sum


def _reference_loss(setup: _Setup) -> Tensor:
    config, anchors, micro = setup.drafter.config, setup.anchors, setup.batch.micro
    ids_AK = torch.full((len(anchors), config.block_size), config.mask_token_id)
    ids_AK[:, 0] = micro.input_ids_T[anchors.index_A]
    hidden_QE = dense_hidden(
        config,
        dict(setup.drafter.named_parameters()),
        setup.head.embed(ids_AK.flatten()),
        setup.batch.features_TC,
        lengths=micro.lengths,
        blocks=list(zip(anchors.document_A.tolist(), anchors.position_A.tolist(), strict=True)),
    )
    return dense_loss(hidden_QE, setup.head.lm_head_weight_VD, setup.targets.labels_AK, setup.targets.weights_AK)


def _reset_peak() -> None:
    """Has the kernel forget this process's high-water mark (Linux)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _memory(field: str) -> int:
    """Reads VmRSS or VmHWM in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(measure(Work(**json.loads(sys.argv[1]))))), flush=True)
