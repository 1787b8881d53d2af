"""A swap as one replica carries it out, told by the front command by command.

    prepare     a thread of low priority reads the new files once, while the replica serves  -> prepared | refused
    commit      no new batch starts; when the last one has ended, the replica's thread puts the
                weights in; then the replica waits, so that no client sees the new version
                before every replica has it and the state file names it                     -> committed | failed
    finish      the version counts from here on; batches are made again                     -> finished
    roll_back   the old weights are put back, batches are made again                        -> rolled_back

A failure in `commit` puts the old weights back by itself. Where even that fails, or the front never says how the swap
ends, the replica ends its process, and the front starts it again with the version that counts. Runs on the event loop;
everything slow is on a thread of its own or on the replica's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from target_wire.errors import WireError

from target_server.config import ServerConfig
from target_server.control import Event, SwapCommand, SwapEvent
from target_server.errors import DeadlineError, ReplicaFatalError, UserError
from target_server.head import HeadStore
from target_server.loading import LoadedTarget, read_config
from target_server.metrics import ReplicaMetrics
from target_server.reading import ReadWeights, read_weights, take_low_priority
from target_server.replacement import config_differences, refusal
from target_server.replica import Replica
from target_server.scheduler import Scheduler
from target_server.servicer import ReplicaServicer
from target_server.versions import VersionRecord
from target_server.weights import Placement, WeightMap

__all__ = ["ReplicaSwap", "SwapParts"]

_log = logging.getLogger(__name__)
_PROGRESS_S = 0.5
_MAX_EARLIER = 32


@dataclass(frozen=True)
class SwapParts:
    """What a swap touches.

    Attributes:
        config: the server's settings.
        target: the model.
        weights: how its tensors are stored.
        replica: its thread.
        scheduler: whose batches it runs.
        heads: what FetchHead reads.
        servicer: what tells clients the version.
        metrics: where the pause is noted.
    """

    config: ServerConfig
    target: LoadedTarget
    weights: WeightMap
    replica: Replica
    scheduler: Scheduler
    heads: HeadStore
    servicer: ReplicaServicer
    metrics: ReplicaMetrics


@dataclass
class _Running:
    """The swap that runs.

    Attributes:
        command: its latest command.
        stop: set when reading is to end.
        placement: the weights, once they were read.
        decided: done with "finish" or "roll_back".
    """

    command: SwapCommand
    stop: threading.Event
    placement: Placement | None
    decided: asyncio.Future[str]


class ReplicaSwap:
    """The swaps of one replica, one at a time."""

    def __init__(
        self,
        parts: SwapParts,
        current: VersionRecord,
        earlier: list[VersionRecord],
        *,
        send: Callable[[Event], object],
        on_fatal: Callable[[Exception], None],
    ) -> None:
        """Starts with the version that was loaded.

        Args:
            parts: what a swap touches.
            current: the version that the model holds.
            earlier: the versions before.
            send: reports to the front.
            on_fatal: the model holds no version any more.
        """
        self._parts = parts
        self._config = read_config(current.checkpoint)
        self.current = current
        self._earlier = earlier
        self._send = send
        self._on_fatal = on_fatal
        self._running: _Running | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def obey(self, command: SwapCommand) -> None:
        """Carries out a command of the front; returns at once."""
        running = self._running
        if command.command == "prepare":
            decided = asyncio.get_running_loop().create_future()
            self._running = _Running(command, threading.Event(), None, decided)
            self._start(self._prepare(self._running))
        elif running is None or running.command.swap != command.swap:
            _log.warning("%s for a swap that does not run", command.command)
        elif command.command == "commit":
            running.command = command
            self._start(self._commit(running))
        elif not running.decided.done():
            running.stop.set()
            running.decided.set_result(command.command)
            if running.command.command == "prepare":
                self._end(running, "rolled_back")

    async def close(self) -> None:
        """Ends what runs; the model may then hold either version, and must not be used."""
        if self._running is not None:
            self._running.stop.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            _log.exception("a swap left the replica in an unknown state")
            self._on_fatal(error)

    # Reading.

    async def _prepare(self, running: _Running) -> None:
        record = VersionRecord.from_json(running.command.version)
        loop = asyncio.get_running_loop()
        said_s = 0.0

        def progress(read_bytes: int, total_bytes: int) -> None:
            nonlocal said_s
            if time.monotonic() - said_s >= _PROGRESS_S:
                said_s = time.monotonic()
                said = {"read_bytes": read_bytes, "total_bytes": total_bytes}
                loop.call_soon_threadsafe(lambda: self._say(running, "reading", **said))

        with ThreadPoolExecutor(1, thread_name_prefix="swap", initializer=take_low_priority) as pool:
            try:
                found, running.placement = await loop.run_in_executor(pool, self._read, record, progress, running.stop)
            except WireError as error:
                self._end(running, "refused", detail=error.detail)
                return
            except Exception as error:
                _log.exception("the new checkpoint could not be read")
                self._end(running, "refused", detail=f"checkpoint: {record.checkpoint}: {_one_line(error)}")
                return
        total = found.total_bytes
        self._say(running, "prepared", digest=found.digest, mark=found.mark, read_bytes=total, total_bytes=total)

    def _read(
        self, record: VersionRecord, progress: Callable[[int, int], None], stop: threading.Event
    ) -> tuple[ReadWeights, Placement]:
        try:
            for name, found, expected in config_differences(read_config(record.checkpoint), self._config):
                raise refusal(f"config.json {name}", found, expected)
            weights = read_weights(record.checkpoint, progress, stop)
            settings = self._parts.config.model
            old, new = self.current.checkpoint, record.checkpoint
            return weights, Placement(self._parts.target, self._parts.weights, settings, old=old, new=new)
        except UserError as error:
            raise refusal("files", f"{error.value}: {error.fix}", "a checkpoint that loads") from error

    # Taking.

    async def _commit(self, running: _Running) -> None:
        record = VersionRecord.from_json(running.command.version)
        assert running.placement is not None
        self._parts.scheduler.pause()
        deadlines = self._parts.config.deadlines
        await _before(self._parts.scheduler.wait_idle(), deadlines.forward_timeout_s, "the last batch before a swap")
        began_s = time.monotonic()
        self._parts.heads.close_live()
        try:
            await self._on_replica(running.placement.apply)
        except Exception as error:
            _log.exception("the new weights could not be taken; the old ones are put back")
            await self._go_back(running, "failed", detail=_one_line(error))
            return
        self._say(running, "committed")
        timeout_s = self._parts.config.swap.commit_timeout_s
        decision = await _before(asyncio.shield(running.decided), timeout_s, "the front's word on a swap")
        if decision == "finish":
            await self._finish(running, record)
            self._parts.metrics.swapped(time.monotonic() - began_s)
        else:
            await self._go_back(running, "rolled_back")

    async def _finish(self, running: _Running, record: VersionRecord) -> None:
        await self._on_replica(lambda: self._parts.replica.set_version(record.version))
        self._earlier = [self.current, *self._earlier][:_MAX_EARLIER]
        self.current = record
        self._parts.heads.open_live(record, self._earlier)
        self._parts.servicer.serve_version(record.version)
        self._parts.scheduler.resume()
        _log.info("serves version %d from %s", record.number, record.checkpoint)
        self._end(running, "finished")

    async def _go_back(self, running: _Running, stage: str, *, detail: str = "") -> None:
        assert running.placement is not None
        try:
            await self._on_replica(running.placement.undo)
        except Exception as error:
            raise ReplicaFatalError("the old weights could not be put back") from error
        self._parts.heads.open_live(self.current, self._earlier)
        self._parts.scheduler.resume()
        self._end(running, stage, detail=detail)

    async def _on_replica(self, action: Callable[[], object]) -> None:
        timeout_s = self._parts.config.swap.commit_timeout_s
        await _before(asyncio.wrap_future(self._parts.replica.call(action)), timeout_s, "the weights")

    def _end(self, running: _Running, stage: str, *, detail: str = "") -> None:
        if self._running is running:
            self._running = None
        self._say(running, stage, detail=detail)

    def _say(self, running: _Running, stage: str, **fields: Any) -> None:
        event = replace(SwapEvent(running.command.swap, stage), **fields)
        self._send(Event("swap", swap=asdict(event)))


async def _before(awaitable: Any, timeout_s: float, what: str) -> Any:
    """Awaits with a deadline.

    Raises:
        DeadlineError: saying what was waited for.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await awaitable
    except TimeoutError as error:
        raise DeadlineError(f"waited {timeout_s:.0f} s for {what}") from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
