"""One swap at a time, as the front runs it: validate, read, commit, or leave everything as it was.

All or nothing. Replicas take the new weights together and wait paused; only when every one of them has them is the
state file replaced, and that decides: before it, any failure puts the old weights back everywhere (I8); after it, the
new version is the one that every replica serves, and one that dies or hangs is started again with it. So no client ever
sees a version that is taken back, and no two replicas serve different ones. The price is that all replicas pause at
once, for as long as the slowest needs for the batch it is in and the copy.

A replica that dies or is loading meanwhile does not fail the swap: it is started again with whatever counts then. No
torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

from target_wire.errors import Code, Reason, WireError
from target_wire.v1 import target_pb2

from target_server.config import ServerConfig
from target_server.control import SwapCommand, SwapEvent
from target_server.errors import UserError
from target_server.replacement import ServedShape, check_replacement, refusal, resolve_checkpoint
from target_server.state import VersionStore, checkpoint_root
from target_server.supervisor import Supervisor
from target_server.swap_run import Participant, SwapRun
from target_server.versions import Version, VersionRecord, files_mark

__all__ = ["SwapCoordinator"]

_log = logging.getLogger(__name__)

_MAX_REQUEST_ID = 128
_MAX_REMEMBERED = 64
_FOLLOW_POLL_S = 0.25


class SwapCoordinator:
    """The swaps of one server."""

    def __init__(self, config: ServerConfig, supervisor: Supervisor, store: VersionStore) -> None:
        """Reads what is served, which replacements are compared with.

        Raises:
            UserError: its files are damaged.
        """
        self._config = config
        self._supervisor = supervisor
        self._store = store
        self._root = checkpoint_root(config)
        self._shape = ServedShape.of(store.current.checkpoint)
        self._keys = itertools.count(1)
        self._runs: dict[str, SwapRun] = {}
        self._running: SwapRun | None = None
        self._task: asyncio.Task[None] | None = None
        supervisor.on_swap_event = self._said
        supervisor.on_lost = self._lost

    async def swap(self, request: target_pb2.SwapTargetRequest) -> AsyncIterator[target_pb2.SwapTargetResponse]:
        """Runs a swap, joins the one that runs, or repeats how it ended.

        Raises:
            WireError: see SwapTarget in the contract.
        """
        async for message in self._run_of(request).follow():
            yield message

    async def close(self) -> None:
        """Ends the swap that runs, whatever its state."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _run_of(self, request: target_pb2.SwapTargetRequest) -> SwapRun:
        if not 1 <= len(request.request_id) <= _MAX_REQUEST_ID:
            raise _bad_request(f"request_id of {len(request.request_id)} characters: give 1 to {_MAX_REQUEST_ID}")
        known = self._runs.get(request.request_id) or self._finished_before(request)
        if known is not None:
            asked = known.request
            if (asked.checkpoint, asked.dry_run) != (request.checkpoint, request.dry_run):
                raise _bad_request(f"request_id {request.request_id}: was used for another swap; give a new one")
            return known
        if self._running is not None:
            running = self._running.request
            detail = f"checkpoint {request.checkpoint}: a swap to {running.checkpoint} runs; wait for its end"
            raise WireError(Code.ABORTED, Reason.SWAP_IN_PROGRESS, detail)
        if not self._supervisor.serving_count:
            raise WireError(Code.UNAVAILABLE, Reason.TARGET_LOADING, "no replica serves yet; ask again")
        run = SwapRun(request, next(self._keys))
        self._runs[request.request_id] = self._running = run
        self._task = asyncio.create_task(self._execute(run))
        return run

    def _finished_before(self, request: target_pb2.SwapTargetRequest) -> SwapRun | None:
        """Returns a swap that ended well before this server was started, from the state file."""
        finished = self._store.finished(request.request_id)
        if finished is None:
            return None
        run = SwapRun(request, 0, path=finished.checkpoint, version=finished.version)
        if (self._root / request.checkpoint).resolve() != finished.checkpoint or request.dry_run:
            run.request = target_pb2.SwapTargetRequest()
        run.say(target_pb2.SWAP_STAGE_DONE)
        run.end(None)
        return run

    async def _execute(self, run: SwapRun) -> None:
        error: WireError | None = None
        try:
            await self._swap(run)
        except WireError as failure:
            error = failure
            _log.warning("swap to %s: %s", run.request.checkpoint, failure)
        except asyncio.CancelledError:
            error = WireError(Code.UNAVAILABLE, Reason.SHUTTING_DOWN, "the server is shutting down")
        except Exception:
            _log.exception("a swap failed")
            error = WireError(Code.INTERNAL, Reason.INTERNAL, "the server failed; its log has the traceback")
        self._release(run)
        if error is not None:
            # Tried anew when it is asked for again; only a good end is for ever.
            del self._runs[run.request.request_id]
        while len(self._runs) > _MAX_REMEMBERED:
            del self._runs[next(iter(self._runs))]
        run.end(error)

    async def _swap(self, run: SwapRun) -> None:
        run.path = resolve_checkpoint(run.request.checkpoint, self._root)
        run.say(target_pb2.SWAP_STAGE_VALIDATE)
        await self._before(
            asyncio.to_thread(self._validate, run.path, dry_run=run.request.dry_run),
            self._config.swap.prepare_timeout_s,
            "the checkpoint's files",
        )
        record = await self._read(run)
        if not run.request.dry_run:
            await self._commit(run, record)
            self._release(run)
            if run.request.wait_for_trainer:
                await self._wait_for_followers(run)
            _log.info("serves version %d, %s, from %s", record.number, record.digest, record.checkpoint)
        run.say(target_pb2.SWAP_STAGE_DONE)

    def _release(self, run: SwapRun) -> None:
        """Lets another swap begin."""
        if self._running is run:
            self._running = None

    def _validate(self, path: Path, *, dry_run: bool) -> None:
        """Compares the checkpoint with what is served, and looks whether its success could be remembered. Blocks."""
        check_replacement(path, self._shape, self._root)
        if not dry_run:
            try:
                self._store.check_writable()
            except UserError as error:
                raise WireError(Code.FAILED_PRECONDITION, Reason.SWAP_REFUSED, str(error)) from error

    # Reading.

    async def _read(self, run: SwapRun) -> VersionRecord:
        """Lets every serving replica read the weights; returns the version that they would be."""
        assert run.path is not None
        run.participants = {index: Participant(index) for index in self._supervisor.serving_indices()}
        run.say(target_pb2.SWAP_STAGE_READ)
        self._command(run, "prepare", VersionRecord(0, "", run.path))
        try:
            await self._until(run, {"prepared"}, {"refused"}, self._config.swap.prepare_timeout_s, "reading")
            record = self._read_version(run)
        except BaseException:
            self._command(run, "roll_back", VersionRecord(0, "", run.path), to={"asked", "reading", "prepared"})
            raise
        run.version = Version(0, record.digest)
        run.say(target_pb2.SWAP_STAGE_READ)
        if run.request.dry_run:
            self._command(run, "roll_back", record, to={"prepared"})
        return record

    def _read_version(self, run: SwapRun) -> VersionRecord:
        assert run.path is not None
        read = [p.event for p in run.participants.values() if p.stage == "prepared" and p.event is not None]
        if len({(event.digest, event.mark) for event in read}) > 1:
            raise refusal("files", "different ones at each replica", "files that nobody writes any more")
        digest, mark = read[0].digest, read[0].mark
        current = self._store.current
        if run.path == current.checkpoint and digest != current.digest:
            raise refusal(
                "path",
                f"the directory being served, with other weights ({digest})",
                "each version in its own directory",
            )
        return VersionRecord(current.number + 1, digest, run.path, mark)

    # Taking.

    async def _commit(self, run: SwapRun, record: VersionRecord) -> None:
        run.say(target_pb2.SWAP_STAGE_COMMIT)
        self._command(run, "commit", record, to={"prepared"})
        step_s = self._config.swap.commit_timeout_s
        try:
            timeout_s = 2 * step_s + self._config.deadlines.forward_timeout_s
            await self._until(run, {"committed"}, {"failed"}, timeout_s, "taking the weights")
            await self._decide(record, run.request.request_id)
        except Exception:
            # Not when the server shuts down: the replicas end paused, and the state file says what counts.
            await self._roll_back(run, record)
            raise
        run.version = record.version
        self._command(run, "finish", record, to={"committed"})
        with contextlib.suppress(WireError):
            await self._until(run, {"finished"}, set(), 2 * step_s, "serving the new version")
        self._supervisor.adopt(record, [p.index for p in run.participants.values() if p.stage == "finished"])

    async def _decide(self, record: VersionRecord, request_id: str) -> None:
        if not await asyncio.to_thread(_are_as_read, record):
            detail = f"checkpoint {record.checkpoint}: its files changed after they were read; leave them alone"
            raise WireError(Code.ABORTED, Reason.SWAP_FAILED, detail)
        try:
            await asyncio.to_thread(self._store.commit, record, request_id)
        except OSError as error:
            detail = f"swap.state_file: {self._store.file}: can't be written ({error.strerror}); free its disk"
            raise WireError(Code.ABORTED, Reason.SWAP_FAILED, detail) from error

    async def _roll_back(self, run: SwapRun, record: VersionRecord) -> None:
        """Brings the old weights back wherever the new ones are; a replica that does not say so in time is killed."""
        self._command(run, "roll_back", record, to={"prepared", "committed"})
        with contextlib.suppress(WireError):
            timeout_s = 2 * self._config.swap.commit_timeout_s
            await self._until(run, {"rolled_back", "failed"}, set(), timeout_s, "putting the old weights back")

    async def _wait_for_followers(self, run: SwapRun) -> None:
        """Waits until no session's latest batch is of an earlier version, by reports that are newer than the swap."""
        since_s = time.monotonic()
        while True:
            statuses = [self._supervisor.replicas[index] for index in self._supervisor.serving_indices()]
            lagging = sum(status.stats.lagging_session_count for status in statuses if status.stats is not None)
            run.say(target_pb2.SWAP_STAGE_FOLLOW, lagging=lagging)
            if statuses and not lagging and all(status.stats_s > since_s for status in statuses):
                return
            await asyncio.sleep(_FOLLOW_POLL_S)

    # Replicas.

    def _command(self, run: SwapRun, command: str, record: VersionRecord, *, to: set[str] | None = None) -> None:
        for participant in run.participants.values():
            if to is None or participant.stage in to:
                self._supervisor.send(participant.index, SwapCommand(command, run.key, record.to_json()))

    def _said(self, index: int, event: SwapEvent) -> None:
        run = self._running
        if run is None or event.swap != run.key or index not in run.participants:
            return
        participant = run.participants[index]
        participant.stage = event.stage
        if event.stage in ("reading", "prepared"):
            participant.event = event
            run.say(target_pb2.SWAP_STAGE_READ)
        elif event.detail:
            participant.event = event
        if event.stage == "committed":
            participant.committed = True
            run.say(target_pb2.SWAP_STAGE_COMMIT)
        run.wake()

    def _lost(self, index: int) -> None:
        run = self._running
        if run is not None and index in run.participants:
            run.participants[index].stage = "lost"
            run.wake()

    async def _until(self, run: SwapRun, good: set[str], bad: set[str], timeout_s: float, what: str) -> None:
        """Waits until every replica that lives has come to a good stage; kills those that have not in time.

        Raises:
            WireError: one has come to a bad stage (SWAP_REFUSED or SWAP_FAILED), or none is left (SWAP_FAILED).
        """
        deadline_s = time.monotonic() + timeout_s
        while late := [p for p in run.participants.values() if p.stage not in {*good, "lost"}]:
            self._raise_bad(run, bad)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                for participant in late:
                    _log.error("replica %d is killed: %s took over %.0f s", participant.index, what, timeout_s)
                    participant.stage = "lost"
                    self._supervisor.kill_replica(participant.index, f"hung in a swap, {what}")
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await run.changed.wait()
        if not any(participant.stage in good for participant in run.participants.values()):
            raise WireError(Code.ABORTED, Reason.SWAP_FAILED, f"no replica is left after {what}; ask again")

    @staticmethod
    def _raise_bad(run: SwapRun, bad: set[str]) -> None:
        for participant in run.participants.values():
            if participant.stage in bad:
                detail = participant.event.detail if participant.event else ""
                if participant.stage == "refused":
                    raise WireError(Code.FAILED_PRECONDITION, Reason.SWAP_REFUSED, detail)
                raise WireError(
                    Code.ABORTED, Reason.SWAP_FAILED, f"replica {participant.index} could not take it: {detail}"
                )

    @staticmethod
    async def _before(awaitable: Awaitable[None], timeout_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await awaitable
        except TimeoutError as error:
            raise WireError(Code.ABORTED, Reason.SWAP_FAILED, f"{what} took over {timeout_s:.0f} s") from error


def _bad_request(detail: str) -> WireError:
    return WireError(Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, detail)


def _are_as_read(record: VersionRecord) -> bool:
    """Whether a version's files are those that were read, so that a restart would serve the same. Blocks."""
    try:
        return files_mark(record.checkpoint) == record.mark
    except (UserError, OSError):
        return False
