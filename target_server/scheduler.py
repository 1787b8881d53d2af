"""Which session's batch runs next, and in which host slot.

Fair by tokens (start-time fair queueing: a session's next batch is tagged with the tokens it has been served, and the
lowest tag runs), among the sessions whose first batch has its credit and a slot. A session without credit, or whose
peer doesn't read, is no candidate and holds nobody up. At most `depth` batches are with the replica's thread: one that
runs and one that follows without a gap; a longer queue would only fix the order earlier than needed.

Runs on the event loop; owns the pool of host slots. Imports no torch and no grpc.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from target_wire.errors import Code, Reason, WireError

from target_server.buffers import HostSlot, SlotPool
from target_server.session import Batch, Session
from target_server.versions import Version

__all__ = ["CaptureJob", "Scheduler"]

_DEPTH = 2


@dataclass(frozen=True, eq=False)
class CaptureJob:
    """What the replica's thread is given: a batch and the slot that it owns until it reports back.

    Attributes:
        batch: the batch.
        slot: its slot.
        given_s: when, of the monotonic clock.
    """

    batch: Batch
    slot: HostSlot
    given_s: float


@dataclass
class _Entry:
    """A session's place in the fair order.

    Attributes:
        session: the session.
        served_tokens: virtual time at which its last batch ends.
        tag: virtual time at which its next batch starts; None while that is not ready to start.
    """

    session: Session
    served_tokens: int = 0
    tag: int | None = None


class Scheduler:
    """The sessions of one replica and the order of their batches."""

    def __init__(
        self, pool: SlotPool, submit: Callable[[CaptureJob], None], *, max_session_count: int, depth: int = _DEPTH
    ) -> None:
        self._pool = pool
        self._submit = submit
        self._max_session_count = max_session_count
        self._depth = depth
        self._entries: dict[int, _Entry] = {}
        self._in_flight: set[CaptureJob] = set()
        self._last_end_s = 0.0
        self._virtual_tokens = 0
        self._paused = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def slot_bytes(self) -> int:
        """Size of a host slot: the largest batch, in bytes."""
        return self._pool.slot_bytes

    def check_room(self) -> None:
        """Refuses one session too many.

        Raises:
            WireError: OVERLOADED.
        """
        if len(self._entries) >= self._max_session_count:
            raise WireError(
                Code.RESOURCE_EXHAUSTED,
                Reason.OVERLOADED,
                f"{len(self._entries)} sessions are open, the most for this replica; raise limits.max_session_count",
            )

    def add(self, session: Session) -> None:
        """Takes a session in; `check_room` must have passed."""
        self.check_room()
        self._entries[session.key] = _Entry(session)

    def remove(self, session: Session) -> None:
        """Closes a session and takes back what it holds; batches that run come back by themselves."""
        del self._entries[session.key]
        for slot in session.close():
            self._pool.release(slot)
        self.wake()

    def wake(self) -> None:
        """Starts every batch that can start now. Cheap; called whenever anything has changed."""
        while not self._paused and len(self._in_flight) < self._depth:
            entry = self._pick()
            if entry is None:
                return
            self._start(entry)

    def captured(self, job: CaptureJob, *, finite: bool) -> None:
        """Takes a finished job back: nothing writes to its slot any more."""
        self._end(job)
        session = job.batch.session
        if session.wants(job.batch):
            self._pool.fill_done(job.slot)
            session.deliver(job.batch, job.slot, finite=finite)
        else:
            self._drop(job, WireError(Code.CANCELLED, Reason.CANCELLED, "withdrawn by the client"))
        self.wake()

    def failed(self, job: CaptureJob, error: WireError) -> None:
        """Takes a failed job back: nothing writes to its slot any more."""
        self._end(job)
        self._drop(job, error)
        self.wake()

    def release(self, slot: HostSlot) -> None:
        """Takes a slot back from the publisher."""
        self._pool.release(slot)
        self.wake()

    def pause(self) -> None:
        """Starts no batch any more until `resume`; `wait_idle` returns when those that run have ended."""
        self._paused = True

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._paused = False
        self.wake()

    def lagging_session_count(self, version: Version) -> int:
        """Returns how many sessions were last sent a batch of another version."""
        return sum(entry.session.lags_behind(version) for entry in self._entries.values())

    def refuse_new(self, error: WireError, *, at_once: bool) -> None:
        """Ends every session with this error, at once or when what runs for it was sent."""
        for entry in list(self._entries.values()):
            entry.session.refuse_new(error, at_once=at_once)

    def longest_running_s(self) -> float:
        """Returns how long the replica's thread has been at its oldest batch; 0 when it has none.

        It takes one batch after the other: what is behind another one only counts from that one's end.
        """
        if not self._in_flight:
            return 0.0
        return time.monotonic() - max(self._last_end_s, min(job.given_s for job in self._in_flight))

    async def wait_idle(self) -> None:
        """Returns once no job is with the replica's thread."""
        await self._idle.wait()

    def snapshot(self) -> dict[str, int]:
        """Returns the counts for metrics."""
        queued = sum(entry.session.snapshot()["queued"] for entry in self._entries.values())
        return {
            "sessions": len(self._entries),
            "queued": queued,
            "in_flight": len(self._in_flight),
            **{f"slots_{state}": count for state, count in self._pool.snapshot().items()},
        }

    def check_integrity(self) -> None:
        """Asserts that slots, credit and jobs agree; for tests and idle moments."""
        self._pool.check_integrity()
        for entry in self._entries.values():
            entry.session.check_integrity()
        assert self._pool.snapshot()["filling"] == len(self._in_flight), self.snapshot()

    def _pick(self) -> _Entry | None:
        best: _Entry | None = None
        for entry in self._entries.values():
            session = entry.session
            if session.head is None or not self._pool.may_acquire(session.key, active_owner_count=len(self._entries)):
                entry.tag = None
                continue
            if entry.tag is None:
                # A session that had nothing to run, or nowhere to put it, doesn't save up turns.
                entry.tag = max(self._virtual_tokens, entry.served_tokens)
            if best is None or best.tag is None or entry.tag < best.tag:
                best = entry
        return best

    def _start(self, entry: _Entry) -> None:
        batch = entry.session.head
        assert batch is not None
        assert entry.tag is not None
        slot = self._pool.acquire(entry.session.key)
        entry.session.start(batch)
        self._virtual_tokens = entry.tag
        entry.served_tokens = entry.tag + batch.token_count
        entry.tag = None
        job = CaptureJob(batch, slot, time.monotonic())
        self._in_flight.add(job)
        self._idle.clear()
        self._submit(job)

    def _end(self, job: CaptureJob) -> None:
        self._in_flight.remove(job)
        self._last_end_s = time.monotonic()
        if not self._in_flight:
            self._idle.set()

    def _drop(self, job: CaptureJob, error: WireError) -> None:
        self._pool.release(job.slot)
        job.batch.session.fail(job.batch, error)
