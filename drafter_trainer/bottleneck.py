"""Says in plain words which side of a run waits for the other, and what to change.

A step's wait is the longest of any rank; what a step takes beside it is the trainer's own work. When the trainer hardly
waits, the target does: its credit is used up while the trainer works.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

__all__ = ["Bottleneck"]

# Below this share of a step nobody gains from a change.
BALANCED_SHARE = 0.02


@dataclasses.dataclass
class Bottleneck:
    """Sums since the last line.

    Attributes:
        replicas: Copies of the target that served at the start.
        ranks: Of the trainer.
        batches_ahead: Batches that a rank's window holds.
        cached: Whether later epochs come from memory.
    """

    replicas: int
    ranks: int
    batches_ahead: int
    cached: bool = False
    wait_s: float = 0.0
    step_s: float = 0.0
    steps: int = 0
    parts_s: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, *, wait_s: float, step_s: float, parts_s: Mapping[str, float] | None = None) -> None:
        """Counts a step in."""
        self.wait_s += wait_s
        self.step_s += step_s
        self.steps += 1
        for name, seconds in (parts_s or {}).items():
            self.parts_s[name] = self.parts_s.get(name, 0.0) + seconds

    def line(self) -> str:
        """What the steps since the last line show; starts anew."""
        share = self.wait_s / self.step_s if self.step_s else 0.0
        text = f"last {self.steps} steps: {self._verdict(share)}{self._parts()}"
        self.wait_s = self.step_s = 0.0
        self.steps = 0
        self.parts_s = {}
        return text

    def _verdict(self, share: float) -> str:
        waits = f"the trainer waits for the target {share:.0%} of the time"
        if share <= BALANCED_SHARE:
            return (
                f"{waits}, so the target waits for the trainer or both keep pace; to go faster give the trainer more "
                "devices (of the target's, if it can spare a replica), or a smaller anchors.num_anchors"
            )
        if self.batches_ahead * self.ranks <= self.replicas:
            return (
                f"{waits}, and {self.ranks} windows of {self.batches_ahead} batches can't keep {self.replicas} "
                "replicas busy: raise target.window_bytes or target.requests_ahead"
            )
        cache = "" if self.cached else ", or keep features for later epochs with target.feature_cache_bytes"
        return f"{waits}: add replicas (a device of the trainer's, if it can spare one){cache}"

    def _parts(self) -> str:
        outer = {name: seconds for name, seconds in self.parts_s.items() if name not in ("fuse", "layers")}
        if not outer:
            return ""
        name = max(outer, key=lambda part: outer[part])
        return f"; most of a step is {name} ({outer[name] / max(sum(outer.values()), 1e-9):.0%})"
