"""Serves new checkpoints of a directory by themselves, as a training loop writes them (`swap.watch_dir`).

A checkpoint counts as complete when config.json and every weight file are there and nothing has changed for a while, or
when its marker file is there. Only the newest that is newer than what is served is taken: those skipped are never
served. One that is refused is said so once, and not tried again unless its files change. It polls: network file systems
tell nobody about changes. No torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from target_wire.errors import WireError
from target_wire.v1 import target_pb2

from target_server.checkpoint import check_checkpoint, weight_files
from target_server.config import ServerConfig, SwapConfig
from target_server.errors import UserError
from target_server.state import VersionStore
from target_server.supervisor import Supervisor
from target_server.swap import SwapCoordinator
from target_server.versions import files_mark

__all__ = ["CheckpointWatch", "watch_checkpoints"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Candidate:
    """A complete checkpoint.

    Attributes:
        path: its directory.
        mark: of its files.
        written_ns: when the last of them was written.
    """

    path: Path
    mark: str
    written_ns: int


class CheckpointWatch:
    """What was seen in the directory so far. Blocks on the disk; used by one thread at a time."""

    def __init__(self, directory: Path, settings: SwapConfig) -> None:
        self._directory = directory
        self._settings = settings
        self._since_s: dict[Path, tuple[str, float]] = {}
        self._done: set[str] = set()

    def newest(self, served: Path, now_s: float) -> Path | None:
        """Returns the newest complete checkpoint that is newer than the one served and was not tried.

        Args:
            served: the checkpoint served now.
            now_s: of the monotonic clock.
        """
        try:
            children = [path for path in self._directory.iterdir() if path.is_dir()]
            newer_than = _written_ns(served)
        except (OSError, UserError):
            return None
        found = [candidate for path in children if (candidate := self._complete(path, now_s))]
        found = [c for c in found if c.written_ns > newer_than and c.path.resolve() != served]
        if not found:
            return None
        newest = max(found, key=lambda candidate: (candidate.written_ns, candidate.path.name))
        return None if newest.mark in self._done else newest.path

    def tried(self, path: Path) -> None:
        """Notes that a checkpoint was served or refused: it is not returned again unless its files change."""
        mark = self._since_s.get(path, ("", 0.0))[0]
        self._done.add(mark)

    def _complete(self, path: Path, now_s: float) -> _Candidate | None:
        try:
            check_checkpoint(path)
            mark, written_ns = files_mark(path), _written_ns(path)
        except (OSError, UserError):
            return None
        before, since_s = self._since_s.get(path, ("", 0.0))
        if mark != before:
            since_s = now_s
            self._since_s[path] = (mark, since_s)
        marker = self._settings.watch_marker
        settled = (path / marker).is_file() if marker else now_s - since_s >= self._settings.watch_settle_s
        return _Candidate(path, mark, written_ns) if settled else None


async def watch_checkpoints(
    config: ServerConfig, supervisor: Supervisor, store: VersionStore, coordinator: SwapCoordinator
) -> None:
    """Swaps to each new checkpoint of `swap.watch_dir` until cancelled; returns at once when none is watched."""
    if config.swap.watch_dir is None:
        return
    watch = CheckpointWatch(config.swap.watch_dir.resolve(), config.swap)
    _log.info("watches %s for checkpoints", config.swap.watch_dir)
    while True:
        await asyncio.sleep(config.swap.watch_poll_s)
        if not supervisor.serving_count:
            continue
        path = await asyncio.to_thread(watch.newest, store.current.checkpoint, time.monotonic())
        if path is not None and await _serve(path, coordinator):
            watch.tried(path)


async def _serve(path: Path, coordinator: SwapCoordinator) -> bool:
    """Swaps; returns whether that has settled the matter. What can be tried again is, at the next look."""
    request_id = f"watch-{time.time_ns()}"
    try:
        async for _ in coordinator.swap(target_pb2.SwapTargetRequest(request_id=request_id, checkpoint=str(path))):
            pass
    except WireError as error:
        _log.warning("%s is not served: %s", path, error.detail)
        return not error.retryable
    except Exception:
        _log.exception("%s is not served", path)
    return True


def _written_ns(path: Path) -> int:
    return max(file.stat().st_mtime_ns for file in weight_files(path))
