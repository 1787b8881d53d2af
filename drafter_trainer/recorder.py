"""Writes what a run leaves behind: records, consumed samples, checkpoints, the summary.

The loop's watcher. Metrics, checkpoints and summary are the first rank's; every rank keeps its own list of consumed
samples, which is the proof that each position was trained once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from drafter_trainer.bottleneck import Bottleneck
from drafter_trainer.checkpoint import Checkpoint, CheckpointStore, replace_json
from drafter_trainer.ema import WeightAverage
from drafter_trainer.following import Follower
from drafter_trainer.guard import StepGuard
from drafter_trainer.metrics import (
    ConsoleSink,
    JsonlSink,
    MetricsSink,
    ProgressSink,
    StepMetrics,
    TensorBoardSink,
    truncate_after_step,
)
from drafter_trainer.model import Drafter
from drafter_trainer.optim import DrafterOptimizer
from drafter_trainer.parallel import Ranks, SharedDrafter
from drafter_trainer.run_dir import RunDir
from drafter_trainer.sharded import whole
from drafter_trainer.trainer import Progress
from drafter_trainer.types import MicroBatch, Version

__all__ = ["Learner", "Recorder", "RecorderSettings"]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """What training changes."""

    drafter: Drafter
    shared: SharedDrafter
    optimizer: DrafterOptimizer
    average: WeightAverage | None
    """Of the drafter's weights, where one is wanted."""
    guard: StepGuard
    follower: Follower
    progress: Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecorderSettings:
    """What is written how often, and the facts that go with it."""

    total_steps: int
    log_every_steps: int
    bottleneck_every_steps: int
    tensorboard: bool
    identity: dict[str, Any]
    """What decides the training; compared on resume."""
    facts: dict[str, Any]
    """Target and drafter, for people and tools."""
    bottleneck: Bottleneck
    """Told of every step."""


class Recorder:
    """Told after each step.

    A context manager; entering it cuts off the records that the checkpoint doesn't cover, also those of ranks that the
    run no longer has.

    Args:
        run_dir: Where everything goes.
        store: Where checkpoints go.
        learner: What to save.
        ranks: Who this is.
        settings: How often, and with what.
    """

    def __init__(
        self, run_dir: RunDir, *, store: CheckpointStore, learner: Learner, ranks: Ranks, settings: RecorderSettings
    ) -> None:
        self._run_dir = run_dir
        self._store = store
        self._learner = learner
        self._ranks = ranks
        self._settings = settings
        self._stack = contextlib.ExitStack()
        self._sinks: list[MetricsSink] = []
        self._consumed: JsonlSink | None = None
        self._last: StepMetrics | None = None
        self._accept_len: float | None = None
        self._started_s = time.monotonic()

    def __enter__(self) -> Recorder:
        done = self._learner.progress.step
        self._consumed = JsonlSink(self._run_dir.consumed(self._ranks.rank), last_step=done)
        self._stack.callback(self._consumed.close)
        if self._ranks.is_first:
            for path in self._run_dir.consumed_by_others(self._ranks.num_ranks):
                truncate_after_step(path, done)
            for sink in self._build_sinks(done):
                self._sinks.append(sink)
                self._stack.callback(sink.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def step_done(
        self, progress: Progress, batches: Sequence[tuple[MicroBatch, Version]], metrics: StepMetrics
    ) -> None:
        """Records a step."""
        assert self._consumed is not None, "the recorder is not open"
        consumed = [
            {"position": m.position, "epoch": m.epoch, "samples": m.sample_ids, "target": version.digest}
            for m, version in batches
        ]
        self._consumed.write({"step": progress.step, "batches": consumed})
        self._last = metrics
        self._accept_len = metrics.accept_len if metrics.accept_len is not None else self._accept_len
        for sink in self._sinks:
            sink.record(metrics)
        bottleneck = self._settings.bottleneck
        bottleneck.add(wait_s=metrics.wait_s, step_s=metrics.step_s, parts_s=metrics.parts_s)
        if self._ranks.is_first and progress.step % self._settings.bottleneck_every_steps == 0:
            logger.info("%s", bottleneck.line())

    def checkpoint(self, progress: Progress) -> None:
        """Saves; all ranks call it, and the first one returns once the checkpoint is on the disk."""
        state = self._state(progress)
        if self._ranks.is_first:
            self._store.save(state)

    def summarise(self, progress: Progress, *, finished: bool) -> None:
        """Writes summary.json."""
        if not self._ranks.is_first:
            return
        summary = {
            "finished": finished,
            "steps": progress.step,
            "position": progress.position,
            "tokens": progress.tokens,
            "skipped": self._learner.guard.skipped,
            "skipped_by_kind": self._learner.guard.by_kind,
            "loss_spikes": self._learner.guard.spikes,
            "loss": self._last.loss if self._last is not None else None,
            "accept_len_simulated": self._accept_len,
            "minutes": (time.monotonic() - self._started_s) / 60,
            "target": self._facts(),
        }
        replace_json(self._run_dir.summary, summary)

    def _facts(self) -> dict[str, Any]:
        """The facts, with the target's version as of now and all that were trained."""
        follower = self._learner.follower
        current = follower.current
        target = {
            **self._settings.facts["target"],
            "version": current.number,
            "digest": current.digest,
            "history": [span.to_json() for span in follower.history],
        }
        return {**self._settings.facts, "target": target}

    def _state(self, progress: Progress) -> Checkpoint:
        learner = self._learner
        return Checkpoint(
            step=progress.step,
            position=progress.position,
            identity={**self._settings.identity, "target.digest": learner.follower.current.digest},
            facts=self._facts(),
            counters={"tokens": progress.tokens, **learner.guard.counters},
            model=self._whole(dict(learner.drafter.state_dict())),
            optimizer=self._whole(learner.optimizer.state_dict()),
            average=self._whole(learner.average.state_dict()) if learner.average is not None else None,
        )

    def _whole(self, values: dict[str, Any]) -> dict[str, Any]:
        gathered: dict[str, Any] = whole(values, keep=self._ranks.is_first)
        return gathered

    def _build_sinks(self, done_steps: int) -> Iterator[MetricsSink]:
        total_steps = self._settings.total_steps
        yield JsonlSink(self._run_dir.metrics, last_step=done_steps)
        if self._settings.tensorboard:
            yield TensorBoardSink(self._run_dir.tensorboard, last_step=done_steps)
        if sys.stderr.isatty():
            yield ProgressSink(total_steps=total_steps, done_steps=done_steps)
        else:
            yield ConsoleSink(total_steps=total_steps, every_steps=self._settings.log_every_steps)
