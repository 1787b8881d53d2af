"""Which versions of the target a run is trained on: what one step may mix, when a switch begins and ends, the history.

Rules (tests cite the numbers):
  1. Weights are told apart by their digest; the same weights under another number are no change, but recorded.
  2. `follow`: a step may mix versions; each batch is trained with the head of its own.
  3. `finish_step_then_follow`: a step is of one version's batches; one that isn't is made again from new requests.
  4. `stop`: a step with a batch of other weights is not made, and the run ends.
  5. A switch begins with the first step that holds a version never trained before, and ends when everything that may
     have been asked for before it is trained: ``window`` micro-batches, those of its first step included.
  6. A version that was trained before is switched to only when the current one is gone: no batch of it for a window.
     So servers that are swapped one after another make one switch, however their batches alternate.

Every rank hands in the same counts (`parallel` sums them), so all decide alike. No torch, no files.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from drafter_trainer.errors import UserError
from drafter_trainer.types import Version

__all__ = ["Follower", "OnChange", "Span", "pack_counts", "unpack_counts"]

logger = logging.getLogger(__name__)

OnChange = Literal["follow", "finish_step_then_follow", "stop"]

# Doubles hold integers of 6 bytes exactly; a digest of 32 characters takes six of them.
_PART_BYTES, _PARTS = 6, 6
_ENTRY = 2 + _PARTS


@dataclasses.dataclass(frozen=True)
class Span:
    """From where on a version was trained."""

    version: Version
    step: int
    """First step with a batch of it; 0 for the version that the run began with."""
    position: int
    """Plan position at which that step begins."""

    def to_json(self) -> dict[str, Any]:
        """As checkpoints hold it."""
        return {
            "version": self.version.number,
            "digest": self.version.digest,
            "from_step": self.step,
            "from_position": self.position,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Span:
        """The inverse of ``to_json``."""
        return cls(Version(values["version"], values["digest"]), values["from_step"], values["from_position"])


class Follower:
    """Follows the target from version to version. The same on every rank.

    Args:
        history: Versions trained so far, the current one last; at least one.
        on_change: What happens when another version comes.
        window: Micro-batches, over all ranks, that may be asked for and not yet trained.
        say: Whether to tell people; one rank does.
    """

    def __init__(self, history: Sequence[Span], *, on_change: OnChange, window: int, say: bool = True) -> None:
        self._history = list(history)
        self._on_change = on_change
        self._window = window
        self._say = say
        # Versions of which a batch was trained.
        self._known = {span.version for span in history}
        self._left = 0
        # Micro-batches since the last one of the current version. At first nothing is on its way from before.
        self._without_current = window
        self._first_step = 0
        self._around: collections.Counter[Version] = collections.Counter()
        self._asked_again = 0

    @property
    def current(self) -> Version:
        """The newest version that was trained."""
        return self._history[-1].version

    @property
    def history(self) -> tuple[Span, ...]:
        """Every version so far, oldest first."""
        return tuple(self._history)

    def may_train(self, counts: Mapping[Version, int]) -> bool:
        """Whether a step of these batches (version to number of micro-batches) may be made; else ask for them anew.

        Raises:
            UserError: It may not, and the run is to stop at a change (rule 4).
        """
        digests = {version.digest for version in counts}
        if self._on_change == "stop" and digests - {self.current.digest}:
            new = next(version for version in counts if version.digest != self.current.digest)
            fix = f"the target has changed: target.digest was {self.current.digest} (version {self.current.number}), "
            fix += f"is {new.digest} (version {new.number}). Serve the old one again, or go on with the new one: "
            fix += "--run.allow_changed target.digest, or --target.on_target_change follow"
            raise UserError("target.on_target_change", "stop", fix)
        return self._on_change != "finish_step_then_follow" or len(digests) <= 1

    def trained(self, step: int, positions: range, counts: Mapping[Version, int], *, asked_again: int = 0) -> None:
        """A step is done: keeps the history, and says when a switch begins and ends.

        Args:
            step: The step.
            positions: Its plan positions, over all ranks.
            counts: Micro-batches of each version in it.
            asked_again: Batches that were asked for again in its time.
        """
        self._without_current = 0 if self.current in counts else self._without_current + sum(counts.values())
        newest = self._newest(counts)
        if newest is not None:
            self._begin(newest, step, positions.start)
        self._known |= counts.keys()
        if self._left > 0:
            self._around.update(counts)
            self._asked_again += asked_again
            self._left -= sum(counts.values())
            if self._left <= 0:
                self._end(step)

    def _newest(self, counts: Mapping[Version, int]) -> Version | None:
        """The newest version in a step that is to be switched to (rules 5 and 6)."""
        is_gone = self._without_current >= self._window
        return max((v for v in counts if v != self.current and (is_gone or v not in self._known)), default=None)

    def _begin(self, version: Version, step: int, position: int) -> None:
        before = self.current
        if self._left <= 0:
            self._first_step, self._asked_again = step, 0
            self._around.clear()
        self._left, self._without_current = self._window, 0
        self._history.append(Span(version, step, position))
        same = ", the same weights" if version.digest == before.digest else ""
        self._tell("switch from target version %s to %s%s begins with step %d", before, version, same, step)

    def _end(self, step: int) -> None:
        parts = [f"{count} of {named(version)}" for version, count in sorted(self._around.items()) if count]
        self._tell(
            "switch to target version %s ends with step %d: since step %d, batches trained: %s; asked for again: %d",
            self.current, step, self._first_step, ", ".join(parts), self._asked_again,
        )  # fmt: skip
        self._around.clear()

    def _tell(self, message: str, *values: object) -> None:
        if self._say:
            logger.info(message, *(named(value) if isinstance(value, Version) else value for value in values))


def named(version: Version) -> str:
    """A version as people read it."""
    return f"{version.number} ({version.digest[:12]})"


def pack_counts(counts: Mapping[Version, int], *, entries: int) -> list[float]:
    """Counts as ``entries`` entries of equal size for an exchange of doubles; exact. Not more versions than entries."""
    row: list[float] = []
    for version, count in counts.items():
        text = version.digest.encode().ljust(_PART_BYTES * _PARTS, b"\0")
        starts = range(0, len(text), _PART_BYTES)
        parts = [float(int.from_bytes(text[start : start + _PART_BYTES], "big")) for start in starts]
        row += [float(count), float(version.number), *parts]
    assert len(row) <= entries * _ENTRY, "more versions than micro-batches, or a digest too long"
    return row + [0.0] * (entries * _ENTRY - len(row))


def unpack_counts(row: Sequence[float]) -> collections.Counter[Version]:
    """The inverse of ``pack_counts``."""
    counts: collections.Counter[Version] = collections.Counter()
    for start in range(0, len(row), _ENTRY):
        count, number, *parts = row[start : start + _ENTRY]
        text = b"".join(int(part).to_bytes(_PART_BYTES, "big") for part in parts).rstrip(b"\0")
        if count:
            counts[Version(int(number), text.decode())] += int(count)
    return counts
