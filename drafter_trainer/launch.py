"""Runs a training from its settings to its summary: ``run_training`` is what `drafter-trainer train` calls.

The order is that of cost: settings, data, server, checkpoint, weights, streams. The parts are built in ``blueprint``
and ``learner``; the loop is ``trainer``'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from drafter_trainer.blueprint import Blueprint, check_settings, draw_blueprint, patience_of, prepare_machine
from drafter_trainer.bottleneck import Bottleneck
from drafter_trainer.checkpoint import CheckpointStore
from drafter_trainer.client.delivery import Delivery
from drafter_trainer.config import TrainerConfig
from drafter_trainer.dataset import TokenDataset
from drafter_trainer.devices import pin_host_memory
from drafter_trainer.dump import DumpWriter
from drafter_trainer.errors import TrainerError, UserError
from drafter_trainer.feature_cache import CachedSource
from drafter_trainer.feed import BatchSource, Feed, FeedSettings
from drafter_trainer.head import final_norm_offset
from drafter_trainer.heads import HeadShelf
from drafter_trainer.learner import build_learner, load_checkpoint
from drafter_trainer.loss import Distillation
from drafter_trainer.recorder import Learner, Recorder, RecorderSettings
from drafter_trainer.run_dir import write_provenance
from drafter_trainer.run_lock import lock_run_dir
from drafter_trainer.signals import stop_on_signals
from drafter_trainer.step import StepEngine
from drafter_trainer.step_records import StepSettings
from drafter_trainer.trainer import TrainLoop
from drafter_trainer.vocabulary import VocabSampler

__all__ = ["run_training"]

logger = logging.getLogger(__name__)


def run_training(config: TrainerConfig, *, dataset: TokenDataset | None = None) -> bool:
    """Trains as configured, from the latest checkpoint if there's one. Call it in the main thread (signals).

    Args:
        config: Every setting.
        dataset: That of `data.path`, where the caller has opened it already: to open it is to read the whole source.

    Returns:
        Whether the run is finished; False when it was asked to stop before, with a checkpoint to go on from.

    Raises:
        UserError: A mistake in what the user gave.
        TrainerError: Anything else that ends the run; the message says how to go on.
    """
    run_dir = check_settings(config)
    machine = prepare_machine(config)
    try:
        with lock_run_dir(run_dir, machine.ranks):
            blueprint = draw_blueprint(config, run_dir=run_dir, machine=machine, dataset=dataset)
            store = CheckpointStore(run_dir.checkpoints, keep=config.run.keep_checkpoints)
            saved = load_checkpoint(blueprint, store)
            with build_heads(blueprint) as heads:
                learner = build_learner(blueprint, heads, saved)
                return train(blueprint, heads, learner, store)
    except UserError:
        raise
    except TrainerError as error:
        raise type(error)(f"{error}. To go on, run the same command again with run.dir {run_dir.root}") from error
    finally:
        machine.ranks.leave()


def train(blueprint: Blueprint, heads: HeadShelf, learner: Learner, store: CheckpointStore) -> bool:
    """Opens the streams and the records, and walks the steps. Returns whether the run is finished."""
    config, ranks = blueprint.config, blueprint.machine.ranks
    blueprint.run_dir.root.mkdir(parents=True, exist_ok=True)
    if ranks.is_first:
        write_provenance(blueprint.run_dir, config=config.model_dump(mode="json"), target=blueprint.target.facts)
    recorder = Recorder(
        blueprint.run_dir, store=store, learner=learner, ranks=ranks, settings=recorder_settings(blueprint)
    )
    stopping = stop_on_signals(announce=ranks.announce_stop, announced=ranks.stop_announced)
    with recorder, stopping as should_stop, open_delivery(blueprint, heads, should_stop) as delivery:
        loop = build_loop(blueprint, heads, learner, delivery, recorder)
        finished = loop.run(learner.progress, should_stop=should_stop)
        recorder.summarise(learner.progress, finished=finished)
    return finished


def open_delivery(blueprint: Blueprint, heads: HeadShelf, should_stop: Callable[[], bool]) -> Delivery:
    """The streams; they start when it's entered.

    Raises:
        UserError: The machine hasn't got the memory for the window.
    """
    config, terms = blueprint.config, blueprint.terms
    try:
        delivery = Delivery(
            config.target.addresses,
            terms=terms,
            patience=patience_of(config),
            heads=heads,
            shape=blueprint.shape,
            should_stop=should_stop,
        )
    except OSError as error:
        fix = f"{terms.window_bytes} bytes can't be had here ({error.strerror}); give less"
        raise UserError("target.window_bytes", config.target.window_bytes, fix) from error
    if blueprint.machine.device.type == "cuda":
        pin_host_memory(delivery.ring_view)
    return delivery


def build_heads(blueprint: Blueprint) -> HeadShelf:
    """The target's frozen ends."""
    machine = blueprint.machine
    return HeadShelf(
        blueprint.config.target.addresses,
        cache_dir=blueprint.run_dir.heads,
        device=machine.device,
        dtype=machine.compute_dtype,
        final_norm_offset=norm_offset(blueprint),
        window=blueprint.terms.slot_count,
        absence_timeout_s=blueprint.config.target.wait_timeout_s,
    )


def norm_offset(blueprint: Blueprint) -> float:
    """What the served target adds to its final norm's stored gain; matters where its distribution is wanted."""
    return final_norm_offset(blueprint.target.described.response.model.architecture) or 0.0


def build_loop(
    blueprint: Blueprint, heads: HeadShelf, learner: Learner, delivery: Delivery, recorder: Recorder
) -> TrainLoop:
    """The loop with its feed and engine."""
    machine, terms = blueprint.machine, blueprint.terms
    feed = Feed(
        blueprint.plan,
        build_source(blueprint, delivery),
        FeedSettings(
            start=learner.progress.position,
            stop=blueprint.loop.stop_position,
            rank=machine.ranks.rank,
            num_ranks=machine.ranks.num_ranks,
            wire_dtype=terms.dtype,
            layout=blueprint.target.layout,
            device=machine.device,
        ),
        stopwatch=learner.drafter.stopwatch,
    )
    dumps = dump_writer(blueprint, learner)
    engine = StepEngine(
        learner.shared,
        optimizer=learner.optimizer,
        feed=feed,
        heads=heads,
        settings=step_settings(blueprint),
        average=learner.average,
        on_bad=dumps,
        on_bad_weights=dumps.add_weights,
        may_train=learner.follower.may_train,
    )
    return TrainLoop(
        engine,
        feed=feed,
        guard=learner.guard,
        follower=learner.follower,
        ranks=machine.ranks,
        watcher=recorder,
        settings=blueprint.loop,
    )


def dump_writer(blueprint: Blueprint, learner: Learner) -> DumpWriter:
    """Keeps what made something not finite."""
    return DumpWriter(
        blueprint.run_dir.bad,
        drafter=learner.drafter,
        settings=step_settings(blueprint),
        heads_dir=blueprint.run_dir.heads,
        most=blueprint.config.run.keep_dumps,
    )


def build_source(blueprint: Blueprint, delivery: Delivery) -> BatchSource:
    """The streams, behind a feature cache where one is wanted."""
    max_bytes = blueprint.config.target.feature_cache_bytes
    if not max_bytes:
        return delivery
    terms = blueprint.terms
    return CachedSource(
        delivery,
        row_bytes=terms.row_bytes,
        max_bytes=max_bytes,
        max_outstanding=terms.slot_count,
        served_version=delivery.served_version,
    )


def step_settings(blueprint: Blueprint) -> StepSettings:
    """The settings of a step's arithmetic."""
    config, machine = blueprint.config, blueprint.machine
    return StepSettings(
        seed=config.run.seed,
        num_anchors=config.anchors.num_anchors,
        block_size=blueprint.target.drafter_config.block_size,
        gamma=blueprint.gamma if config.loss.type == "ce" else None,
        dpace_alpha=config.loss.dpace_alpha if config.loss.type == "dpace" else None,
        chunk_rows=config.loss.chunk_rows,
        sampler=build_sampler(blueprint),
        distillation=build_distillation(blueprint),
        final_norm_offset=norm_offset(blueprint),
        compute_dtype=machine.compute_dtype,
        device=machine.device,
        accumulation=config.batch.accumulation,
    )


def build_distillation(blueprint: Blueprint) -> Distillation | None:
    """The part of the loss that compares with the target's own distribution, where one is wanted."""
    loss = blueprint.config.loss
    return None if loss.distill is None else Distillation(loss.distill, loss.distill_weight)


def build_sampler(blueprint: Blueprint) -> VocabSampler | None:
    """Draws the head's rows, where not all are wanted: half are the answers' most frequent tokens."""
    config = blueprint.config
    rows = config.loss.sampled_vocabulary
    if rows is None:
        return None
    always = torch.from_numpy(blueprint.dataset.frequent_tokens(rows // 2))
    return VocabSampler(rows=rows, seed=config.run.seed, always=always)


def recorder_settings(blueprint: Blueprint) -> RecorderSettings:
    """How often records are made, and the facts in them."""
    config = blueprint.config
    return RecorderSettings(
        total_steps=blueprint.loop.total_steps,
        log_every_steps=config.run.log_every_steps,
        bottleneck_every_steps=config.run.bottleneck_every_steps,
        bottleneck=Bottleneck(
            replicas=len(blueprint.target.described.response.replicas),
            ranks=blueprint.machine.ranks.num_ranks,
            batches_ahead=blueprint.terms.slot_count,
            cached=bool(config.target.feature_cache_bytes),
        ),
        tensorboard=config.run.tensorboard,
        identity=blueprint.identity,
        facts={
            "target": blueprint.target.facts,
            "drafter_config": blueprint.target.drafter_config.to_json(),
            "config": config.model_dump(mode="json"),
        },
    )
