"""Builds what training changes (weights, optimizer, counters), fresh or from a checkpoint.

Owns the decision whether a checkpoint may be gone on from: what would silently change the training is refused, field by
field, unless the user names the field in ``run.allow_changed``.
"""

from __future__ import annotations

import json
import logging
import zlib
from pathlib import Path

import torch

from drafter_trainer.blueprint import Blueprint
from drafter_trainer.checkpoint import Checkpoint, CheckpointStore, differences
from drafter_trainer.config import TrainerConfig
from drafter_trainer.devices import resolve_compute_dtype
from drafter_trainer.ema import WeightAverage
from drafter_trainer.errors import UserError
from drafter_trainer.following import Follower, Span
from drafter_trainer.guard import StepGuard
from drafter_trainer.heads import HeadShelf
from drafter_trainer.model import Drafter
from drafter_trainer.optim import OptimSettings, build_optimizer
from drafter_trainer.parallel import SharedDrafter
from drafter_trainer.recorder import Learner
from drafter_trainer.stopwatch import Stopwatch
from drafter_trainer.target_layers import TargetLayersError, copy_target_layers
from drafter_trainer.trainer import Progress
from drafter_trainer.warm_start import read_start_weights

__all__ = ["build_learner", "load_checkpoint"]

logger = logging.getLogger(__name__)


def load_checkpoint(blueprint: Blueprint, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint to go on from; None for a fresh start. All ranks look, and only go on together.

    Raises:
        UserError: ``run.resume`` and the run directory don't go together, the checkpoint is of another training, or the
            ranks disagree.
        CheckpointError: Every checkpoint is damaged.
    """
    saved = find_checkpoint(blueprint, store)
    check_ranks_agree(blueprint, saved)
    return saved


def check_ranks_agree(blueprint: Blueprint, saved: Checkpoint | None) -> None:
    """Refuses ranks that would train different things as one run: nothing later would notice.

    Raises:
        UserError: They see different checkpoints, as on two machines that share no directory; or were started with
            different settings or data.
    """
    # How the drafter is shared may change on resume, but not between ranks.
    identity = {**blueprint.identity, "run.parallel": blueprint.config.run.parallel}
    settings = zlib.crc32(json.dumps(identity, sort_keys=True).encode())
    steps = saved.step if saved is not None else 0
    (first_steps, first_settings), *others = blueprint.machine.ranks.gather([float(steps), float(settings)])
    for rank, (rank_steps, rank_settings) in enumerate(others, 1):
        if rank_steps != first_steps:
            fix = f"rank {rank} finds {rank_steps:.0f} steps done there and the first rank {first_steps:.0f}; "
            raise UserError("run.dir", blueprint.config.run.dir, fix + "give a directory that all ranks share")
        if rank_settings != first_settings:
            raise UserError(f"rank {rank}", "its settings or data", "differ from the first rank's; start all alike")


def find_checkpoint(blueprint: Blueprint, store: CheckpointStore) -> Checkpoint | None:
    """What this rank sees in the run directory; raises as ``load_checkpoint`` does."""
    run = blueprint.config.run
    if run.resume == "never":
        if store.paths() or blueprint.run_dir.metrics.exists():
            raise UserError("run.dir", run.dir, "it has a run in it and run.resume is never; give an empty directory")
        return None
    saved = store.load_latest()
    if saved is None:
        if run.resume == "require":
            raise UserError(
                "run.resume", "require", f"{run.dir} has no checkpoint; give the directory of a run, or auto"
            )
        return None
    check_unchanged(blueprint, saved)
    logger.info("going on after step %d (plan position %d)", saved.step, saved.position)
    return saved


def check_unchanged(blueprint: Blueprint, saved: Checkpoint) -> None:
    """Refuses a checkpoint of another training.

    Raises:
        UserError: Names every field that differs, with both values.
    """
    changed = differences(saved.identity, blueprint.identity)
    allowed = blueprint.config.run.allow_changed
    unknown = [name for name in allowed if name not in blueprint.identity]
    if unknown:
        fix = "no such field; a refused resume lists the names"
        raise UserError("run.allow_changed", ",".join(unknown), fix)
    if blueprint.config.target.on_target_change != "stop" and "target.digest" in changed:
        before, now = changed.pop("target.digest")
        logger.warning("the target's weights were %s and are %s now; following it", before, now)
    refused = {name: values for name, values in changed.items() if name not in allowed}
    if refused:
        diff = "; ".join(f"{name} was {before!r}, is {now!r}" for name, (before, now) in refused.items())
        fix = f"the checkpoint there is of another training: {diff}. Give the old values, another run.dir, or name "
        fix += f"what may change: --run.allow_changed {','.join(refused)}"
        raise UserError("run.dir", blueprint.config.run.dir, fix)
    for name, (before, now) in changed.items():
        logger.warning("%s was %r and is %r now, as run.allow_changed permits", name, before, now)


def build_learner(blueprint: Blueprint, heads: HeadShelf, saved: Checkpoint | None) -> Learner:
    """Weights, optimizer, counters.

    Args:
        blueprint: The run.
        heads: For initial weights that suit the target's head.
        saved: What to go on from, or None.
    """
    config, machine = blueprint.config, blueprint.machine
    drafter = Drafter(blueprint.target.drafter_config)
    if saved is None:
        initialise(drafter, config, blueprint, heads)
    else:
        drafter.load_state_dict(saved.model)
    drafter.to(machine.device)
    drafter.recompute_layers = config.run.recompute_layers
    if config.run.profile_stats:
        drafter.stopwatch = Stopwatch(machine.device, inner=not config.run.compile_drafter)
    if config.run.compile_drafter:
        drafter.compile_parts()
    shared = SharedDrafter(drafter, machine.ranks, shard=config.run.parallel == "fsdp")
    optimizer = build_optimizer(drafter, optim_settings(config, blueprint.loop.total_steps, device=machine.device))
    decay = config.optim.ema_decay
    average = WeightAverage(drafter, decay=decay) if decay is not None else None
    counters: dict[str, int] = {}
    progress = Progress()
    if saved is not None:
        optimizer.load_state_dict(saved.optimizer)
        if average is not None and saved.average is not None:
            average.load_state_dict(saved.average)
        counters = saved.counters
        progress = Progress(saved.step, saved.position, counters["tokens"])
    guard = StepGuard(
        max_in_a_row=config.optim.max_skipped_steps, spike_factor=config.optim.spike_factor, counters=counters
    )
    follower = build_follower(blueprint, saved)
    return Learner(
        drafter=drafter,
        shared=shared,
        optimizer=optimizer,
        average=average,
        guard=guard,
        follower=follower,
        progress=progress,
    )


def build_follower(blueprint: Blueprint, saved: Checkpoint | None) -> Follower:
    """Knows the target's versions so far. A run that stops at a change takes what it was allowed to begin with."""
    version = blueprint.target.version
    on_change = blueprint.config.target.on_target_change
    history = [Span(version, 0, 0)]
    if saved is not None:
        history = [Span.from_json(span) for span in saved.facts["target"]["history"]]
        if on_change == "stop" and history[-1].version.digest != version.digest:
            history.append(Span(version, saved.step + 1, saved.position))
    ranks = blueprint.machine.ranks
    window = blueprint.terms.slot_count * ranks.num_ranks
    return Follower(history, on_change=on_change, window=window, say=ranks.is_first)


def initialise(drafter: Drafter, config: TrainerConfig, blueprint: Blueprint, heads: HeadShelf) -> None:
    """First weights: drawn from the seed, copied from the target's last layers, or those of ``drafter.init_from``."""
    if config.drafter.init_from is not None:
        load_weights(drafter, config.drafter.init_from)
        return
    head = heads.head(blueprint.target.version).to("cpu", torch.float32)
    drafter.initialise(head, torch.Generator().manual_seed(config.run.seed))
    if config.drafter.init_target_layers is not None:
        try:
            copy_target_layers(drafter, config.drafter.init_target_layers)
        except TargetLayersError as error:
            raise UserError("drafter.init_target_layers", config.drafter.init_target_layers, str(error)) from error


def load_weights(drafter: Drafter, directory: Path) -> None:
    """Takes over the weights of an exported or published drafter or a checkpoint.

    Raises:
        UserError: There are none, or they are of another shape.
    """
    try:
        drafter.load_state_dict(read_start_weights(directory))
    except RuntimeError as error:
        fix = f"its weights don't fit this drafter: {str(error).splitlines()[-1].strip()}"
        raise UserError("drafter.init_from", directory, fix) from error


def optim_settings(config: TrainerConfig, total_steps: int, *, device: torch.device) -> OptimSettings:
    """The optimizer's settings."""
    optim = config.optim
    return OptimSettings(
        lr=optim.lr,
        total_steps=total_steps,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        algorithm=optim.algorithm,
        schedule=optim.schedule,
        warmup_share=optim.warmup_ratio,
        decay_share=optim.decay_ratio,
        final_factor=optim.min_lr_ratio,
        max_grad_norm=optim.clip_norm,
        momentum=optim.momentum,
        muon_dtype=resolve_compute_dtype("auto", device),
    )
