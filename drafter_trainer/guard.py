"""Keeps bad numbers out of the weights and knows when to give up.

A step is bad when any rank received features that are not finite, or its loss or gradient is not. A bad step changes
nothing (weights, moments, average, schedule), is counted, and says which batches it was; after too many in a row the
run stops with what they have in common, because then it isn't an accident. All ranks must hand in the same facts, so
that all decide alike.

It also watches the losses of good steps: one far above what was usual is no reason to leave the step out, but to say
so.
"""

from __future__ import annotations

import collections
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Protocol

from drafter_trainer.errors import NonFiniteError

__all__ = ["StepGuard", "bad_step_reason"]

logger = logging.getLogger(__name__)

# Losses whose median is what's usual, and how many must be there before one is called unusual.
SPIKE_WINDOW_STEPS = 100
SPIKE_LEAST_STEPS = 20


class BadBatch(Protocol):
    """What the guard needs of a culprit."""

    @property
    def kind(self) -> str:
        """features, loss or gradient."""

    @property
    def replica_index(self) -> int:
        """Which replica made its features."""

    @property
    def version(self) -> int:
        """Of the target."""

    @property
    def sample_ids(self) -> Sequence[int]:
        """What it holds."""


class StepGuard:
    """Counts bad steps and watches the loss.

    Args:
        max_in_a_row: Bad steps in a row that end the run.
        spike_factor: A loss this many times the running median is warned of; None warns of none.
        counters: Of a resumed run, as ``counters`` gave them.
    """

    def __init__(
        self, *, max_in_a_row: int, spike_factor: float | None = None, counters: Mapping[str, int] | None = None
    ) -> None:
        counters = counters or {}
        self._max_in_a_row = max_in_a_row
        self._spike_factor = spike_factor
        self.skipped = counters.get("skipped", 0)
        self.in_a_row = counters.get("skipped_in_a_row", 0)
        self.by_kind = {kind: counters.get(f"skipped_{kind}", 0) for kind in ("features", "loss", "gradient")}
        self.spikes = counters.get("loss_spikes", 0)
        self._diagnosis = ""
        self._in_this_row: list[BadBatch] = []
        self._losses: collections.deque[float] = collections.deque(maxlen=SPIKE_WINDOW_STEPS)

    @property
    def counters(self) -> dict[str, int]:
        """What a checkpoint keeps. Median and culprits start anew in a resumed run: they only feed messages."""
        by_kind = {f"skipped_{kind}": count for kind, count in self.by_kind.items()}
        return {
            "skipped": self.skipped,
            "skipped_in_a_row": self.in_a_row,
            **by_kind,
            "loss_spikes": self.spikes,
        }

    def good(self, *, step: int, loss: float | None) -> bool:
        """A step was made. Returns whether its loss was unusually high; None had nothing to supervise."""
        self.in_a_row = 0
        self._in_this_row.clear()
        if loss is None:
            return False
        usual = statistics.median(self._losses) if len(self._losses) >= SPIKE_LEAST_STEPS else math.inf
        self._losses.append(loss)
        spike = self._spike_factor is not None and loss > self._spike_factor * usual
        if spike:
            self.spikes += 1
            logger.warning(
                "the loss of step %d is %.3f, %.1f times the median %.3f of the %d steps before; if it stays there, "
                "go back to an earlier checkpoint with a lower optim.lr",
                step, loss, loss / usual, usual, len(self._losses) - 1,
            )  # fmt: skip
        return spike

    def bad(self, *, step: int, positions: Sequence[int], reason: str, culprits: Sequence[BadBatch] = ()) -> None:
        """A step was left out. Whether it was one too many, `check` says."""
        self.skipped += 1
        self.in_a_row += 1
        for kind in {culprit.kind for culprit in culprits}:
            self.by_kind[kind] += 1
        self._in_this_row.extend(culprits)
        where = f"step {step} (plan positions {positions[0]} to {positions[-1]})"
        named = "".join(f"; {culprit}" for culprit in culprits)
        logger.warning("%s left out: %s%s; %d left out so far", where, reason, named, self.skipped)
        if self.in_a_row >= self._max_in_a_row:
            self._diagnosis = (
                f"{self.in_a_row} steps in a row were left out, the last at {where}: {reason}{named}. "
                f"{diagnosis(self._in_this_row)}"
            )

    def check(self) -> None:
        """To be asked once a step is recorded, so that a run that goes on from there counts it once.

        Raises:
            NonFiniteError: Too many steps in a row were left out.
        """
        if self._diagnosis:
            raise NonFiniteError(self._diagnosis)


def diagnosis(culprits: Sequence[BadBatch]) -> str:
    """What the bad batches of several steps have in common, and so what to do."""
    kinds = {culprit.kind for culprit in culprits}
    replicas = sorted({culprit.replica_index for culprit in culprits})
    if kinds == {"features"}:
        versions = sorted({culprit.version for culprit in culprits})
        whose = f"all from replica {replicas[0]}" if len(replicas) == 1 else f"from replicas {_listed(replicas)}"
        return (
            f"Each held features that are not finite, {whose}, target version {_listed(versions)}: the target makes "
            "them; look at its log, and whether its weights and dtype are right"
        )
    samples = collections.Counter(sample for culprit in culprits for sample in set(culprit.sample_ids))
    repeated = [sample for sample, count in samples.items() if len(culprits) > 1 and count == len(culprits)]
    if repeated:
        return f"Each held sample {_listed(sorted(repeated))}: look at it (drafter-trainer inspect --sample)"
    return (
        "The target's features were finite, so it's the drafter: go on from an earlier checkpoint with a lower "
        "optim.lr or run.dtype fp32; drafter-trainer replay shows where a dumped batch stops being finite"
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def bad_step_reason(*, bad: Mapping[str, int], loss: float, grad_norm: float) -> str:
    """Why a step must be left out; empty when it's sound. The arguments are the same on all ranks."""
    if bad.get("features"):
        return f"{bad['features']} of its batches held features that are not finite"
    if not math.isfinite(loss):
        return f"its loss is {loss}"
    if bad.get("gradient"):
        return f"the gradient of {bad['gradient']} of its batches is not finite"
    if not math.isfinite(grad_norm):
        return f"its gradient norm is {grad_norm}"
    return ""
