"""`drafter-trainer train`: checks what costs nothing, prepares the data if need be, and hands over to `launch`.

`--print-plan` and `--dry-run` end before torch is loaded or a server is contacted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import islice

from drafter_trainer.cli.prepare import open_with_progress
from drafter_trainer.cli.settings import plan_settings, read_settings, require, total_steps
from drafter_trainer.client.addresses import check_address
from drafter_trainer.config import TrainerConfig
from drafter_trainer.dataset import TokenDataset
from drafter_trainer.drafter_shape import check_taps, read_model_config
from drafter_trainer.errors import EXIT_DONE, UserError
from drafter_trainer.plan import Plan
from drafter_trainer.prepare import check_longest_sample
from drafter_trainer.tokenizer import resolve_mask_token_id

__all__ = ["run"]


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Trains, or only says what it would do."""
    config = read_settings(options, flags)
    if config is None:
        return EXIT_DONE
    if options.print_plan is not None:
        if options.print_plan < 1:
            raise UserError("--print-plan", options.print_plan, "give how many micro-batches to print, at least 1")
        print_plan(open_plan(config), options.print_plan)
        return EXIT_DONE
    require(config, "target.addresses", "run.dir", "data.path")
    for address in config.target.addresses:
        try:
            check_address(address)
        except ValueError as error:
            raise UserError("target.addresses", address, str(error)) from error
    dataset = open_with_progress(config)
    check_longest_sample(dataset, max_tokens=config.batch.max_tokens)
    check_drafter(config, dataset)
    if options.dry_run:
        print(dry_run(config, dataset), end="")
        return EXIT_DONE
    # Loads torch: everything above is told before.
    from drafter_trainer.launch import run_training  # noqa: PLC0415

    run_training(config, dataset=dataset)
    return EXIT_DONE


def check_drafter(config: TrainerConfig, dataset: TokenDataset) -> None:
    """Checks taps and mask token before a server is asked, where the target's `config.json` lies by its tokenizer.

    What the server says about the target decides later; this only tells most mistakes at once.
    """
    model_config = read_model_config(config.data.tokenizer)
    if "num_hidden_layers" in model_config and config.drafter.target_layer_ids is not None:
        check_taps(config.drafter.target_layer_ids, model_config["num_hidden_layers"])
    if "vocab_size" in model_config:
        given, facts = config.drafter.mask_token_id, dataset.meta.tokenizer
        resolve_mask_token_id(given, facts, vocab_size=model_config["vocab_size"])


def open_plan(config: TrainerConfig) -> Plan:
    """The plan of the configured data; needs neither a server nor a run directory."""
    dataset = open_with_progress(config)
    check_longest_sample(dataset, max_tokens=config.batch.max_tokens)
    return Plan(dataset, plan_settings(config))


def print_plan(plan: Plan, count: int) -> None:
    """Prints the first micro-batches, one a line: what is trained, in the order it is trained."""
    print(f"{'position':>8} {'epoch':>5} {'tokens':>7}  samples as id:tokens")
    for entry in islice(plan.entries(), count):
        samples = " ".join(f"{i}:{length}" for i, length in zip(entry.sample_ids, entry.lengths, strict=True))
        print(f"{entry.position:>8} {entry.epoch:>5} {entry.tokens:>7}  {samples}")


def dry_run(config: TrainerConfig, dataset: TokenDataset) -> str:
    """What a run with these settings would do, as text."""
    plan = Plan(dataset, plan_settings(config))
    # torchrun's name; only `parallel` joins the ranks, and only a real run does.
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    per_step = num_ranks * config.batch.accumulation
    steps = total_steps(config, plan, num_ranks=num_ranks)
    per_epoch = plan.micro_batches_in(1)
    lines = [
        f"data      {dataset.meta.samples:,} samples, {dataset.meta.tokens:,} tokens, "
        f"{dataset.meta.supervised_tokens:,} supervised ({dataset.directory})",
        f"plan      {per_epoch:,} micro-batches an epoch of {dataset.meta.tokens / per_epoch:,.0f} tokens on average",
        f"steps     {steps:,} of {per_step} micro-batches, {config.epochs or steps * per_step / per_epoch:.3g} epochs",
        f"drafter   {config.drafter.num_layers} layers, blocks of {config.drafter.block_size}, gamma {config.gamma:g}",
        f"target    {', '.join(config.target.addresses)} (not contacted)",
        f"run.dir   {config.run.dir}",
    ]
    return "".join(f"{line}\n" for line in lines)
