"""`python -m bench.recipes`: acceptance length of losses and optimizers after equal tokens, on SmolLM2's own answers.

No figure of `make bench`: a table for choosing defaults. In one process, without server: the target runs once over the
conversations (its features are kept on disk), then one small drafter per recipe and seed trains on them. Of one seed,
all recipes see the same batches in the same order with the same anchors and begin with the same weights. Held-out
conversations are walked as decoding would (`drafter_trainer.walk`). A run that is in the output file already is not
made again, so a table can be made in pieces.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.options import CHECKOUT, say
from drafter_trainer.anchors import draw_anchors
from drafter_trainer.drafter_config import DrafterConfig, default_target_layer_ids
from drafter_trainer.head import TargetHead
from drafter_trainer.loss import build_block_targets, drafter_loss
from drafter_trainer.model import Drafter
from drafter_trainer.optim import OptimSettings, build_optimizer
from drafter_trainer.prepare import PrepareSettings, open_dataset
from drafter_trainer.target_layers import copy_target_layers
from drafter_trainer.target_runner import TargetRunner
from drafter_trainer.types import MicroBatch, TrainBatch, Version
from drafter_trainer.vocabulary import VocabSampler
from drafter_trainer.walk import simulate_acceptance

__all__ = ["main"]

LOSSES = ("ce", "dpace")
RATES = (1e-3, 3e-3)
NARROW = {"intermediate_size": 256, "num_attention_heads": 3, "num_key_value_heads": 1}
MASK_ID = 16  # the demo's: a row of SmolLM2's embedding that was never trained


@dataclasses.dataclass(frozen=True, order=True)
class Recipe:
    """What differs between the rows of the table."""

    loss: str
    optimizer: str
    lr: float


@dataclasses.dataclass(frozen=True)
class Run:
    """One drafter trained by a recipe.

    Attributes:
        recipe, seed: Which.
        accept_len: Walked acceptance length on the held-out conversations, the anchor's token included.
        tokens: Trained on, visits counted.
        step_s: Seconds of a step, on average.
    """

    recipe: Recipe
    seed: int
    accept_len: float
    tokens: int
    step_s: float

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Run:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**values, "recipe": Recipe(**values["recipe"])})


@dataclasses.dataclass(frozen=True)
class Size:
    """What is equal in all rows."""

    train: int
    """Conversations trained on."""
    held_out: int
    steps: int
    per_step: int
    """Conversations a step."""
    layers: int = 1
    narrow: bool = False
    """A third of the target's heads and a sixth of its MLPs, drawn at random; otherwise the target's last layers."""
    block_size: int = 5
    anchors: int = 24
    sampled_rows: int = 4096
    gamma: float = 3.0
    """Of the decayed cross-entropy."""
    alpha: float = 0.5
    """Of D-PACE."""


def recipes(losses: Sequence[str], rates: dict[str, Sequence[float]]) -> Iterator[Recipe]:
    """Every loss with every optimizer at each of its rates."""
    for optimizer, own in rates.items():
        for rate in own:
            for loss in losses:
                yield Recipe(loss, optimizer, rate)


class Conversations:
    """Tokens and features of the first conversations of a file, made once."""

    def __init__(self, model_dir: Path, data: Path, *, count: int, scratch: Path) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True).eval()
        self.head = TargetHead.from_model(model)
        layers = model.config.num_hidden_layers
        self.config: dict[str, Any] = {
            "hidden_size": model.config.hidden_size,
            "intermediate_size": model.config.intermediate_size,
            "num_attention_heads": model.config.num_attention_heads,
            "num_key_value_heads": model.config.num_key_value_heads,
            "head_dim": model.config.hidden_size // model.config.num_attention_heads,
            "rope_theta": float(model.config.rope_parameters["rope_theta"]),
            "num_target_layers": layers,
            "vocab_size": model.config.vocab_size,
            "mask_token_id": MASK_ID,
        }
        settings = PrepareSettings(max_length_tokens=256)
        self.dataset = open_dataset(data, tokenizer=model_dir, settings=settings, prepared_dir=scratch / "prepared")
        self.taps = default_target_layer_ids(layers, 2)
        kept = scratch / f"features-{self.dataset.fingerprint}-{'-'.join(map(str, self.taps))}-{count}.safetensors"
        if not kept.exists():
            runner = TargetRunner(model, target_layer_ids=self.taps)
            save_file({str(index): self._features(runner, index) for index in range(count)}, kept)
        self.features = load_file(kept)

    @torch.inference_mode()
    def _features(self, runner: TargetRunner, index: int) -> torch.Tensor:
        ids, _ = self.dataset.sample(index)
        features_TC = runner.prefill(torch.from_numpy(ids.astype("int64"))).features_RC
        assert features_TC is not None, "the runner was told to tap"
        return features_TC.clone()

    def batch(self, indices: Sequence[int], position: int, epoch: int) -> TrainBatch:
        """Some of them, packed."""
        samples = [self.dataset.sample(index) for index in indices]
        micro = MicroBatch(
            position=position,
            epoch=epoch,
            sample_ids=tuple(indices),
            lengths=tuple(len(ids) for ids, _ in samples),
            input_ids_T=torch.cat([torch.from_numpy(ids.astype("int64")) for ids, _ in samples]),
            loss_mask_T=torch.cat([torch.from_numpy(mask.astype("bool")) for _, mask in samples]),
        )
        return TrainBatch(micro, torch.cat([self.features[str(index)] for index in indices]), Version(1, "bench"), 0)


def measure(recipe: Recipe, size: Size, data: Conversations, model_dir: Path, *, seed: int) -> Run:
    """Trains one drafter and walks the held-out conversations with it."""
    shape = {**data.config, **(NARROW if size.narrow else {})}
    config = DrafterConfig(
        **shape, num_hidden_layers=size.layers, target_layer_ids=data.taps, block_size=size.block_size
    )
    drafter = Drafter(config)
    drafter.initialise(data.head, torch.Generator().manual_seed(seed))
    if not size.narrow:
        copy_target_layers(drafter, model_dir)
    settings = OptimSettings(
        algorithm="muon" if recipe.optimizer == "muon" else "adamw",
        lr=recipe.lr,
        total_steps=size.steps,
        betas=(0.9, 0.95),
        muon_dtype=torch.float32,
    )
    optimizer = build_optimizer(drafter, settings)
    always = torch.from_numpy(data.dataset.frequent_tokens(size.sampled_rows // 2))
    sampler = VocabSampler(rows=size.sampled_rows, seed=seed, always=always)
    began, tokens = time.monotonic(), 0
    for step in range(size.steps):
        batch = data.batch(*visits(step, size, seed=seed))
        anchors = draw_anchors(batch.micro, num_anchors=size.anchors, seed=seed)
        gamma = size.gamma if recipe.loss == "ce" else None
        targets = build_block_targets(batch.micro, anchors, block_size=size.block_size, gamma=gamma)
        alpha = size.alpha if recipe.loss == "dpace" else None
        output = drafter_loss(drafter, data.head, batch, anchors, targets, dpace_alpha=alpha, sampler=sampler)
        (output.loss_sum / output.weight_sum).backward()  # type: ignore[no-untyped-call]
        if optimizer.step().skipped:
            raise ArithmeticError(f"{recipe}, seed {seed}: step {step} is not finite")
        tokens += sum(batch.micro.lengths)
    step_s = (time.monotonic() - began) / size.steps
    held_out = data.batch(list(range(size.train, size.train + size.held_out)), 0, 0)
    accept_len = simulate_acceptance(drafter.eval(), data.head, held_out).micro
    return Run(recipe, seed, accept_len, tokens, step_s)


def visits(step: int, size: Size, *, seed: int) -> tuple[list[int], int, int]:
    """A step's conversations, its position, and the epoch it begins in; every epoch has an order of its own."""
    places = range(step * size.per_step, (step + 1) * size.per_step)
    orders = {
        epoch: torch.randperm(size.train, generator=torch.Generator().manual_seed(1000 * seed + epoch)).tolist()
        for epoch in {place // size.train for place in places}
    }
    return [orders[place // size.train][place % size.train] for place in places], step, places[0] // size.train


def table(runs: Sequence[Run]) -> str:
    """Mean and range over seeds, a row a recipe."""
    lines = ["| loss, optimizer, learning rate | seeds | acceptance length | lowest to highest | tokens | a step |"]
    lines.append("|---|---|---|---|---|---|")
    for recipe in sorted({run.recipe for run in runs}):
        own = [run for run in runs if run.recipe == recipe]
        lengths = [run.accept_len for run in own]
        lines.append(
            f"| {recipe.loss}, {recipe.optimizer}, {recipe.lr:g} | {len(own)} | {statistics.mean(lengths):.3f} "
            f"| {min(lengths):.3f} to {max(lengths):.3f} | {own[0].tokens:,} "
            f"| {statistics.mean(run.step_s for run in own):.2f} s |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the runs that are missing and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.recipes", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=CHECKOUT / "demo/data/smollm2-answers.jsonl", help="conversations")
    add("--cache-dir", type=Path, default=CHECKOUT / ".demo", help="keeps model and features (.demo)")
    add("--output", type=Path, default=CHECKOUT / "bench" / "recipes.json", help="where the figures go")
    add("--steps", type=int, default=240, help="steps (240)")
    add("--per-step", type=int, default=4, help="conversations a step (4)")
    add("--train", type=int, default=240, help="conversations trained on (240)")
    add("--held-out", type=int, default=40, help="conversations after those, to measure on (40)")
    add("--layers", type=int, default=1, help="of the drafter (1)")
    add("--narrow", action="store_true", help="few heads and small MLPs, for Muon's sake; not the target's last layers")
    add("--losses", nargs="+", choices=LOSSES, default=LOSSES, help="losses to train with (both)")
    add("--seeds", type=int, nargs="+", default=[0, 1], help="of weights, order, anchors and sampled vocabulary (0 1)")
    add("--adamw-lr", type=float, nargs="*", default=RATES, help="its learning rates (1e-3 3e-3)")
    add("--muon-lr", type=float, nargs="*", default=RATES, help="its learning rates (1e-3 3e-3)")
    given = parser.parse_args(arguments)
    from demo.smollm2 import ensure_smollm2  # noqa: PLC0415 - converting needs torch and gguf

    size = Size(
        given.train,
        given.held_out,
        given.steps,
        per_step=given.per_step,
        layers=given.layers,
        narrow=given.narrow,
    )
    found: dict[str, Any] = json.loads(given.output.read_text()) if given.output.exists() else {}
    if found and found["size"] != dataclasses.asdict(size):
        parser.error(f"--output {given.output}: holds runs of another size ({found['size']}); give another file")
    runs = [Run.from_json(values) for values in found.get("runs", [])]
    made = {(run.recipe, run.seed) for run in runs}
    rates = {"adamw": given.adamw_lr, "muon": given.muon_lr}
    wanted = [(recipe, seed) for seed in given.seeds for recipe in recipes(given.losses, rates)]
    missing = [key for key in wanted if key not in made]
    if missing:
        model_dir = ensure_smollm2(given.cache_dir, say=say)
        say("bench.recipes: the target runs over the conversations ...")
        data = Conversations(model_dir, given.data, count=size.train + size.held_out, scratch=given.cache_dir)
        for recipe, seed in missing:
            runs.append(measure(recipe, size, data, model_dir, seed=seed))
            peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            say(f"bench.recipes: {runs[-1]}, peak memory {peak_mb} MB")
            document = {"size": dataclasses.asdict(size), "runs": [dataclasses.asdict(run) for run in runs]}
            given.output.write_text(json.dumps(document, indent=1) + "\n")
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
