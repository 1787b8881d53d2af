"""`python -m bench.recipes`: acceptance length of losses and optimizers after equal tokens, on SmolLM2's own answers.

No figure of `make bench`: a table for choosing defaults. In one process, without server: the target runs once over the
conversations, then one small drafter per recipe trains on the same features, in the same order, with the same anchors
and first weights. Held-out conversations are walked as decoding would (`drafter_trainer.walk`). A recipe that is in
the output file already is not run again, so a table can be made in pieces.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

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

MASK_ID = 16  # the demo's: a row of SmolLM2's embedding that was never trained
SEED = 0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What differs between the rows of the table."""

    loss: str
    optimizer: str
    lr: float

    @property
    def name(self) -> str:
        """Key in the output."""
        return f"{self.loss} {self.optimizer} {self.lr:g}"


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
    block_size: int = 5
    anchors: int = 24
    sampled_rows: int = 4096


def recipes(rates: Sequence[float]) -> Iterator[Recipe]:
    """Every loss with every optimizer at every rate."""
    for rate in rates:
        for optimizer in ("adamw", "muon"):
            for loss in ("ce", "dpace"):
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
        runner = TargetRunner(model, target_layer_ids=self.taps)
        self.features = []
        with torch.no_grad():
            for index in range(count):
                ids, _ = self.dataset.sample(index)
                features_TC = runner.prefill(torch.from_numpy(ids.astype("int64"))).features_RC
                assert features_TC is not None, "the runner was told to tap"
                self.features.append(features_TC.clone())

    def batch(self, indices: Sequence[int], *, position: int, epoch: int) -> TrainBatch:
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
        return TrainBatch(micro, torch.cat([self.features[index] for index in indices]), Version(1, "bench"), 0)


def measure(recipe: Recipe, size: Size, data: Conversations, model_dir: Path) -> dict[str, float]:
    """Trains one drafter; returns its acceptance length on the held-out conversations, and what it cost."""
    config = DrafterConfig(
        **data.config, num_hidden_layers=size.layers, target_layer_ids=data.taps, block_size=size.block_size
    )
    drafter = Drafter(config)
    drafter.initialise(data.head, torch.Generator().manual_seed(SEED))
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
    sampler = VocabSampler(rows=size.sampled_rows, seed=SEED, always=always)
    order = torch.randperm(size.train, generator=torch.Generator().manual_seed(SEED)).tolist()
    began, tokens = time.monotonic(), 0
    for step in range(size.steps):
        places = range(step * size.per_step, (step + 1) * size.per_step)
        indices = [order[place % size.train] for place in places]
        batch = data.batch(indices, position=step, epoch=places[0] // size.train)
        anchors = draw_anchors(batch.micro, num_anchors=size.anchors, seed=SEED)
        gamma = 3.0 if recipe.loss == "ce" else None
        targets = build_block_targets(batch.micro, anchors, block_size=size.block_size, gamma=gamma)
        alpha = 0.5 if recipe.loss == "dpace" else None
        output = drafter_loss(drafter, data.head, batch, anchors, targets, dpace_alpha=alpha, sampler=sampler)
        (output.loss_sum / output.weight_sum).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        tokens += sum(batch.micro.lengths)
    train_s = time.monotonic() - began
    held_out = data.batch(range(size.train, size.train + size.held_out), position=0, epoch=0)
    accept_len = simulate_acceptance(drafter.eval(), data.head, held_out).micro
    return {"accept_len": accept_len, "tokens": tokens, "train_s": train_s}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.recipes", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=CHECKOUT / "demo/data/smollm2-answers.jsonl", help="conversations")
    add("--cache-dir", type=Path, default=CHECKOUT / ".demo", help="keeps the model (.demo)")
    add("--output", type=Path, default=CHECKOUT / "bench" / "recipes.json", help="where the figures go")
    add("--steps", type=int, default=120, help="steps of two conversations (120)")
    add("--train", type=int, default=120, help="conversations trained on (120)")
    add("--held-out", type=int, default=24, help="conversations after those, to measure on (24)")
    add("--lr", type=float, nargs="+", default=[1e-3], help="learning rates to try (1e-3)")
    given = parser.parse_args(arguments)
    from demo.smollm2 import ensure_smollm2  # noqa: PLC0415 - converting needs torch and gguf

    model_dir = ensure_smollm2(given.cache_dir, say=say)
    size = Size(given.train, given.held_out, given.steps, per_step=2)
    found = json.loads(given.output.read_text()) if given.output.exists() else {}
    if found.get("size") != dataclasses.asdict(size):
        found = {"size": dataclasses.asdict(size), "rows": {}}
    rows = found["rows"]
    missing = [recipe for recipe in recipes(given.lr) if recipe.name not in rows]
    if missing:
        say("bench.recipes: the target runs over the conversations ...")
        data = Conversations(model_dir, given.data, count=size.train + size.held_out, scratch=given.cache_dir)
        for recipe in missing:
            rows[recipe.name] = measure(recipe, size, data, model_dir)
            say(f"bench.recipes: {recipe.name}: {rows[recipe.name]}")
            given.output.write_text(json.dumps(found, indent=1) + "\n")
    print("| loss, optimizer, learning rate | tokens | acceptance length | training |\n|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row['tokens']:,.0f} | {row['accept_len']:.3f} | {row['train_s']:.0f} s |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
