"""One trainer rank's session: its requests, its credit, and what is to be sent to it.

A pure state machine on the event loop: no I/O, no torch, no grpc. The servicer feeds it messages and empties its
outbox; the scheduler takes batches from its head and brings them back. A batch's way:

    QUEUED --start--> RUNNING --deliver--> READY --begin_sending--> SENDING --> answered
      |                  |                   |
      +-- cancel --------+--- cancel --------+--> answered by batch_failed with CANCELLED

Credit for exactly a batch's bytes is reserved when it starts and given back when it fails (I2). Batches start in the
order of their requests: the first one without credit waits, and only its own session waits with it (I7).
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from target_wire.checks import ServedTarget, SessionTerms, check_batch_request
from target_wire.credits import CreditLedger
from target_wire.errors import Code, Reason, WireError
from target_wire.v1 import target_pb2

from target_server.buffers import HostSlot
from target_server.metrics import BatchTimes
from target_server.shared_buffer import SharedBuffer, hear
from target_server.versions import Version

__all__ = ["Batch", "BatchStage", "Outgoing", "Session"]


class BatchStage(Enum):
    """Where a batch is."""

    QUEUED = "queued"
    RUNNING = "running"
    READY = "ready"
    SENDING = "sending"
    ANSWERED = "answered"


@dataclass(eq=False)
class Batch:
    """One request on its way.

    Attributes:
        session: whose it is.
        request_id: the client's id.
        lengths: tokens of each sequence.
        token_ids: the sequences one after the other, 4 bytes a token.
        payload_bytes: exact size of the answer.
        stage: where it is.
        cancelled: the client has withdrawn it.
        slot: where its rows are, from READY on.
        finite: whether no row holds a NaN or an infinity, from READY on.
        version: the one that computes it, from the moment the replica's thread takes it.
        times: where its time went.
    """

    session: Session
    request_id: int
    lengths: tuple[int, ...]
    token_ids: array[int]
    payload_bytes: int
    stage: BatchStage = BatchStage.QUEUED
    cancelled: bool = False
    slot: HostSlot | None = None
    finite: bool = True
    version: Version | None = None
    times: BatchTimes = field(default_factory=BatchTimes)

    @property
    def token_count(self) -> int:
        """Tokens of all sequences."""
        return len(self.token_ids)


# What a session sends: a message, a batch in its slot, or the end of the stream (None, or why).
Outgoing = target_pb2.StreamHiddenStatesResponse | Batch | WireError | None


@dataclass
class _Limits:
    outstanding: int
    outbox: int = field(init=False)

    def __post_init__(self) -> None:
        # Answers to bad requests pile up only when the client does not read; then its requests are not read either.
        self.outbox = self.outstanding + 16


class Session:
    """The state of one open stream."""

    def __init__(
        self,
        key: int,
        terms: SessionTerms,
        served: ServedTarget,
        *,
        max_outstanding_request_count: int,
        on_change: Callable[[], None],
    ) -> None:
        """Opens the session.

        Args:
            key: unique among sessions of this replica.
            terms: what was agreed on.
            served: what requests are checked against.
            max_outstanding_request_count: more are answered with OVERLOADED.
            on_change: called when a batch may have become ready to start.
        """
        self.key = key
        self.terms = terms
        self.ledger = CreditLedger(terms.window_bytes)
        self.shared_buffer: SharedBuffer | None = None
        self._served = served
        self._limits = _Limits(max_outstanding_request_count)
        self._on_change = on_change
        self._queue: deque[Batch] = deque()
        self._batches: dict[int, Batch] = {}
        self._outbox: asyncio.Queue[Outgoing] = asyncio.Queue()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False
        self._refusal: WireError | None = None
        self._no_more_requests = False
        self._last_version: Version | None = None

    # What the client says.

    def take(self, message: target_pb2.StreamHiddenStatesRequest) -> None:
        """Acts on one message.

        Raises:
            WireError: the stream can't go on (a broken protocol); one request's failure only fills the outbox.
        """
        kind = message.WhichOneof("message")
        match kind:
            case "batch_request":
                self._request(message.batch_request)
            case "credit":
                self.ledger.grant(message.credit.granted_bytes)
                self._changed()
            case "cancel":
                self._cancel(message.cancel.request_id)
            case "shared_buffer_attached" | "shared_buffer_released":
                hear(self.shared_buffer, message)
            case "open":
                raise WireError(
                    Code.FAILED_PRECONDITION, Reason.SESSION_ALREADY_OPEN, "open was sent twice; open another stream"
                )
            case None:
                raise WireError(Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, "message is empty; set exactly one field")
            case _:
                assert_never(kind)

    def end_requests(self) -> None:
        """Notes that the client has closed its side: what has credit is still answered, then the stream ends."""
        self._no_more_requests = True
        self._changed()

    async def wait_for_room(self) -> None:
        """Returns once the client has read enough answers for its next message to be taken."""
        await self._room.wait()

    # What the scheduler does.

    @property
    def head(self) -> Batch | None:
        """The batch that starts next; None while there is none or its credit is missing."""
        if self._closed or not self._queue:
            return None
        batch = self._queue[0]
        return batch if batch.payload_bytes <= self.ledger.available_bytes else None

    def start(self, batch: Batch) -> None:
        """Moves the head to RUNNING and reserves its credit."""
        assert self._queue[0] is batch
        reserved = self.ledger.reserve(batch.payload_bytes)
        assert reserved, "a batch was started without credit"
        self._queue.popleft()
        batch.stage = BatchStage.RUNNING
        self._note_times()

    def wants(self, batch: Batch) -> bool:
        """Whether a running batch's rows will be sent."""
        return not self._closed and not batch.cancelled

    def deliver(self, batch: Batch, slot: HostSlot, *, finite: bool) -> None:
        """Puts a captured batch into the outbox; the slot is the publisher's until it was sent."""
        batch.slot, batch.finite, batch.stage = slot, finite, BatchStage.READY
        self._put(batch)

    def fail(self, batch: Batch, error: WireError) -> None:
        """Answers a running batch with an error (CANCELLED where it was withdrawn)."""
        self.ledger.release(batch.payload_bytes)
        self._answer_failed(batch, _cancelled() if batch.cancelled else error)
        self._changed()

    # What the servicer sends.

    async def next_outgoing(self) -> Outgoing:
        """Returns what to send next; waits for it."""
        outgoing = await self._outbox.get()
        if self._outbox.qsize() < self._limits.outbox:
            self._room.set()
        return outgoing

    def begin_sending(self, batch: Batch) -> bool:
        """Claims a batch taken from the outbox; False when it was withdrawn, which is then answered instead."""
        if batch.cancelled:
            self.ledger.release(batch.payload_bytes)
            self._answer_failed(batch, _cancelled())
            self._changed()
            return False
        batch.stage = BatchStage.SENDING
        batch.times.sending = time.monotonic()
        return True

    def sent(self, batch: Batch) -> None:
        """Notes that a batch's last frame was written."""
        self._last_version = batch.version
        self._forget(batch)
        self._changed()

    def lags_behind(self, version: Version) -> bool:
        """Whether the latest batch that was sent is of another version; False when none was sent yet."""
        return self._last_version not in (None, version)

    # The end.

    def refuse_new(self, error: WireError, *, at_once: bool) -> None:
        """Answers what has not started, and every later request, with this error; then ends the stream with it.

        Args:
            error: why.
            at_once: what runs will not come back; else the stream ends when that was sent.
        """
        self._refusal = error
        if at_once:
            self._put(error)
        while self._queue:
            self._answer_failed(self._queue.popleft(), error)
        self._changed()

    def close(self) -> list[HostSlot]:
        """Ends the session at once.

        Returns:
            The slots of batches that were ready and will not be sent; running ones come back by themselves.
        """
        self._closed = True
        if self.shared_buffer is not None:
            self.shared_buffer.close()
        self._queue.clear()
        slots = [batch.slot for batch in self._batches.values() if batch.stage is BatchStage.READY and batch.slot]
        self._batches.clear()
        return slots

    def snapshot(self) -> dict[str, int]:
        """Returns the counts for metrics."""
        return {"outstanding": len(self._batches), "queued": len(self._queue), **self.ledger.snapshot()}

    def check_integrity(self) -> None:
        """Asserts that credit and batches agree; for tests and idle moments."""
        self.ledger.check_integrity()
        if not self._batches and not self._closed:
            assert self.ledger.snapshot()["reserved_bytes"] == 0, self.snapshot()

    def _request(self, request: target_pb2.BatchRequest) -> None:
        try:
            batch = self._checked(request)
        except WireError as error:
            self._put(_failed(request.request_id, error))
            return
        self._batches[batch.request_id] = batch
        self._queue.append(batch)
        self._changed()

    def _checked(self, request: target_pb2.BatchRequest) -> Batch:
        if self._refusal is not None:
            raise self._refusal
        if len(self._batches) >= self._limits.outstanding:
            raise WireError(
                Code.RESOURCE_EXHAUSTED,
                Reason.OVERLOADED,
                f"{len(self._batches)} requests are outstanding, the most for one session; wait for an answer",
            )
        tokens = check_batch_request(
            request,
            self._served,
            max_batch_token_count=self.terms.max_batch_token_count,
            outstanding=self._batches.keys(),
        )
        return Batch(
            self,
            request.request_id,
            tuple(request.sequence_lengths),
            array("i", request.token_ids),
            tokens * self.terms.bytes_per_token,
        )

    def _cancel(self, request_id: int) -> None:
        batch = self._batches.get(request_id)
        if batch is None or batch.stage is BatchStage.SENDING:
            return
        batch.cancelled = True
        if batch.stage is BatchStage.QUEUED:
            self._queue.remove(batch)
            self._answer_failed(batch, _cancelled())
            self._changed()

    def _answer_failed(self, batch: Batch, error: WireError) -> None:
        self._forget(batch)
        self._put(_failed(batch.request_id, error))

    def _forget(self, batch: Batch) -> None:
        batch.stage = BatchStage.ANSWERED
        self._batches.pop(batch.request_id, None)

    def _changed(self) -> None:
        """Wakes the scheduler, and ends the stream when nothing can be answered any more."""
        if self._closed:
            return
        self._note_times()
        self._on_change()
        waits_only_for_credit = self.head is None and len(self._batches) == len(self._queue)
        if self._refusal is not None and not self._batches:
            self._put(self._refusal)
        elif self._no_more_requests and waits_only_for_credit:
            self._put(None)

    def _note_times(self) -> None:
        """Notes when the first batch became the first, and when its credit was there."""
        if self._queue:
            times = self._queue[0].times
            times.due = times.due or time.monotonic()
            if self.head is not None:
                times.credited = times.credited or time.monotonic()

    def _put(self, outgoing: Outgoing) -> None:
        if self._closed:
            return
        self._outbox.put_nowait(outgoing)
        if self._outbox.qsize() >= self._limits.outbox:
            self._room.clear()


def _failed(request_id: int, error: WireError) -> target_pb2.StreamHiddenStatesResponse:
    return target_pb2.StreamHiddenStatesResponse(
        batch_failed=target_pb2.BatchFailed(
            request_id=request_id, code=int(error.code), reason=error.reason.value, detail=error.detail
        )
    )


def _cancelled() -> WireError:
    return WireError(Code.CANCELLED, Reason.CANCELLED, "withdrawn by the client")
