"""Keeps bad numbers out of the weights and knows when to give up.

A step is bad when any rank received features that are not finite, or its loss or gradient is not. A bad step changes
nothing (weights, moments, schedule), is counted, and says which batch it was; after too many in a row the run stops,
because then it isn't an accident. All ranks must hand in the same facts, so that all decide alike.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from drafter_trainer.errors import NonFiniteError

__all__ = ["StepGuard"]

logger = logging.getLogger(__name__)


class StepGuard:
    """Counts bad steps.

    Args:
        max_in_a_row: Bad steps in a row that end the run.
        skipped: Bad steps so far, of a resumed run.
        in_a_row: Of those, since the last good one.
    """

    def __init__(self, *, max_in_a_row: int, skipped: int = 0, in_a_row: int = 0) -> None:
        self._max_in_a_row = max_in_a_row
        self.skipped = skipped
        self.in_a_row = in_a_row

    def good(self) -> None:
        """A step was made."""
        self.in_a_row = 0

    def bad(self, *, step: int, positions: Sequence[int], reason: str) -> None:
        """A step was left out.

        Raises:
            NonFiniteError: It was one too many.
        """
        self.skipped += 1
        self.in_a_row += 1
        where = f"step {step} (plan positions {positions[0]} to {positions[-1]})"
        logger.warning("%s left out: %s; %d left out so far", where, reason, self.skipped)
        if self.in_a_row >= self._max_in_a_row:
            raise NonFiniteError(
                f"{self.in_a_row} steps in a row were left out, the last at {where}: {reason}; "
                "lower optim.lr, look at these samples, or raise optim.max_skipped_steps"
            )


def bad_step_reason(*, bad_batches: int, loss: float, grad_norm: float) -> str:
    """Why a step must be left out; empty when it's sound. The arguments are the same on all ranks."""
    if bad_batches:
        return f"{bad_batches} of its batches held features that are not finite"
    if not math.isfinite(loss):
        return f"its loss is {loss}"
    if not math.isfinite(grad_norm):
        return f"its gradient norm is {grad_norm}"
    return ""
