"""Which version of the target is served now, as far as fronts and batches tell. Pure; used by one thread.

A batch tells at once, but may be late: made by an earlier version, and received after a batch of a newer one. A front
tells every few seconds, and is right.
"""

from __future__ import annotations

from drafter_trainer.types import Version

__all__ = ["ServedVersion"]


class ServedVersion:
    """The version served now; None until anybody has told."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self._left: set[str] = set()
        self._by_front: dict[str, Version] = {}

    def told_by_batch(self, version: Version) -> None:
        """A batch of it is on its way."""
        now = self.version
        if now is None or version.number > now.number or version.digest not in self._left:
            self._set(version)

    def told_by_front(self, front: str, version: Version) -> None:
        """A front says that it serves this one. Servers that are swapped one after the other don't take turns."""
        if self._by_front.get(front) != version:
            self._by_front[front] = version
            self._set(version)

    def _set(self, version: Version) -> None:
        if self.version is not None and self.version.digest != version.digest:
            self._left.add(self.version.digest)
        self._left.discard(version.digest)
        self.version = version
