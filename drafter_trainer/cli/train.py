"""`drafter-trainer train`: checks what costs nothing, prepares the data if need be, and hands over to `launch`.

`--print-plan` and `--dry-run` end before torch is loaded or a server is contacted; a dry run may be made on a machine
without the devices of the real one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from itertools import islice

from target_wire.imports import quick_imports

from drafter_trainer.cli.prepare import open_with_progress
from drafter_trainer.cli.settings import plan_settings, read_settings, require, total_steps
from drafter_trainer.config import TrainerConfig, default_gamma
from drafter_trainer.dataset import TokenDataset
from drafter_trainer.drafter_config import SLIDING, DrafterConfig
from drafter_trainer.drafter_shape import check_taps, read_model_config, resolve_drafter_config
from drafter_trainer.errors import EXIT_DONE, UserError
from drafter_trainer.memory_plan import plan_memory
from drafter_trainer.plan import Plan
from drafter_trainer.preflight import check_addresses, check_device, check_run_dir
from drafter_trainer.prepare import check_longest_sample
from drafter_trainer.tokenizer import resolve_mask_token_id
from drafter_trainer.warm_start import read_start_config

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
    if options.dry_run and config.data.path is None:
        print(dry_run(config, None, num_ranks=planned_ranks(options)), end="")
        return EXIT_DONE
    require(config, *(() if options.dry_run else ("target.addresses", "run.dir")), "data.path")
    if config.target.addresses:
        check_addresses(config)
    if config.run.dir is not None:
        check_run_dir(config)
    if not options.dry_run:
        with quick_imports():
            check_device(config)
    dataset = open_with_progress(config)
    check_longest_sample(dataset, max_tokens=config.batch.max_tokens)
    check_drafter(config, dataset)
    if options.dry_run:
        print(dry_run(config, dataset, num_ranks=planned_ranks(options)), end="")
        return EXIT_DONE
    # Loads torch: everything above is told before.
    with quick_imports():
        from drafter_trainer.launch import run_training  # noqa: PLC0415

    run_training(config, dataset=dataset)
    return EXIT_DONE


def planned_ranks(options: argparse.Namespace) -> int:
    """For how many ranks to plan: --ranks, else as many as torchrun started."""
    if options.ranks is not None and options.ranks < 1:
        raise UserError("--ranks", options.ranks, "give at least 1")
    # torchrun's name; only `parallel` joins the ranks, and only a real run does.
    return options.ranks or int(os.environ.get("WORLD_SIZE", "1"))


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


def dry_run(config: TrainerConfig, dataset: TokenDataset | None, *, num_ranks: int) -> str:
    """What a run with these settings would do, as text; what isn't known without data or target is left out."""
    per_step = num_ranks * config.batch.accumulation
    lines = [] if dataset is None else data_lines(config, dataset, num_ranks=num_ranks)
    lines.append(
        f"step      {per_step} micro-batches ({num_ranks} ranks x {config.batch.accumulation}) of at most "
        f"{config.batch.max_tokens:,} tokens: at most {per_step * config.batch.max_tokens:,} tokens"
    )
    usual = None if dataset is None else max(1, dataset.meta.tokens // dataset.meta.samples)
    lines += drafter_lines(config, sequence_tokens=usual)
    lines.append(f"target    {', '.join(config.target.addresses) or '(no address given)'} (not contacted)")
    lines.append(f"run.dir   {config.run.dir}")
    return "".join(f"{line}\n" for line in lines)


def data_lines(config: TrainerConfig, dataset: TokenDataset, *, num_ranks: int) -> list[str]:
    """Data, plan and number of steps."""
    plan = Plan(dataset, plan_settings(config))
    per_step = num_ranks * config.batch.accumulation
    steps = total_steps(config, plan, num_ranks=num_ranks)
    per_epoch = plan.micro_batches_in(1)
    return [
        f"data      {dataset.meta.samples:,} samples, {dataset.meta.tokens:,} tokens, "
        f"{dataset.meta.supervised_tokens:,} supervised ({dataset.directory})",
        f"plan      {per_epoch:,} micro-batches an epoch of {dataset.meta.tokens / per_epoch:,.0f} tokens on average, "
        f"{-(-per_epoch // per_step):,} steps an epoch",
        f"steps     {steps:,} of {per_step} micro-batches, {config.epochs or steps * per_step / per_epoch:.3g} epochs",
    ]


def drafter_lines(config: TrainerConfig, *, sequence_tokens: int | None) -> list[str]:
    """The drafter's shape and a rank's memory, as far as the target is known."""
    drafter = planned_drafter(config)
    if drafter is None:
        fix = "give target.hidden_size, num_layers and vocab_size, or data.tokenizer with the target's config.json"
        return [f"drafter   {config.drafter.num_layers} layers; its size follows the target's: {fix}"]
    tied = drafter.tie_word_embeddings
    compute_bytes = 4 if config.run.dtype == "fp32" else 2
    memory = plan_memory(config, drafter, compute_bytes=compute_bytes, tied=tied, sequence_tokens=sequence_tokens)
    windows = sum(kind == SLIDING for kind in drafter.layer_types)
    attention = f"{windows} with a window of {drafter.sliding_window}" if windows else "all with full attention"
    gamma = config.loss.gamma or default_gamma(drafter.block_size)
    return [
        f"drafter   {memory.parameters:,} parameters: {drafter.num_hidden_layers} layers ({attention}), "
        f"taps {','.join(map(str, drafter.target_layer_ids))}, mask token {drafter.mask_token_id}",
        f"          blocks of {drafter.block_size}, gamma {gamma:g}, {config.anchors.num_anchors} anchors a sequence",
        *memory.lines(),
    ]


def planned_drafter(config: TrainerConfig) -> DrafterConfig | None:
    """The drafter's shape without a server; None where nothing says what the target is."""
    model_config = read_model_config(config.data.tokenizer)
    target = PlannedTarget(
        hidden_size=config.target.hidden_size or model_config.get("hidden_size") or 0,
        layer_count=config.target.num_layers or model_config.get("num_hidden_layers") or 0,
        vocab_size=config.target.vocab_size or model_config.get("vocab_size") or 0,
        tie_word_embeddings=bool(model_config.get("tie_word_embeddings", False)),
        max_position_count=model_config.get("max_position_embeddings") or 0,
    )
    if not (target.hidden_size and target.layer_count and target.vocab_size):
        return None
    start = read_start_config(config.drafter.init_from) if config.drafter.init_from is not None else None
    mask = config.drafter.mask_token_id
    if mask is None:  # a server's run takes the tokenizer's or the first unused row
        mask = start.mask_token_id if start is not None else target.vocab_size - 1
    return resolve_drafter_config(config.drafter, target, mask_token_id=mask, model_config=model_config, start=start)


@dataclasses.dataclass
class PlannedTarget:
    """The target as settings and files describe it."""

    hidden_size: int
    layer_count: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_count: int
