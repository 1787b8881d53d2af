"""The receiver process of one rank: ``python -m drafter_trainer.client.receiver RING_FD PORT_FD``.

Receiving holds the interpreter's lock, so it has an interpreter of its own. It keeps a session to every replica of
every configured front, sends each request to the least-loaded one, asks again elsewhere when something goes wrong, and
reports batches that are whole in their slots. It never decides what is read or in which order, keeps nothing that
can't be lost (the trainer submits again what it has not got), never imports torch, and ends when the trainer does.

One event loop; every method below runs on it and none blocks.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import socket
import sys
import time
from typing import Any

if __name__ == "__main__":  # before grpc is imported and threads start
    from target_wire.channel import tune_malloc

    tune_malloc()

import grpc
import uvloop
from target_wire.v1 import target_pb2 as pb

from drafter_trainer.client.assembly import ReceivedBatch
from drafter_trainer.client.book import ExhaustedError, Request, RequestBook
from drafter_trainer.client.discovery import describe, open_channel, serving_addresses
from drafter_trainer.client.failures import reason_of
from drafter_trainer.client.port import ReceiverPort
from drafter_trainer.client.ring import Ring
from drafter_trainer.client.session import ReplicaSession, SessionLostError
from drafter_trainer.client.shape import shape_difference
from drafter_trainer.client.terms import patience_from_json, terms_from_json

ALIVE_EVERY_S = 2.0
# Requests owed by one replica at a time: one in its forward, one leaving, two to come. More would tie requests to a
# replica that may turn out to be the slow one.
REQUESTS_PER_REPLICA = 4
# Attempts at a batch that is not finite: another replica may have had a bad moment, but numbers that overflow will
# overflow again, and then the trainer has to know.
NONFINITE_ATTEMPTS = 2


class DeliveryFailedError(Exception):
    """The run can't go on; the message says why."""

    def __init__(self, reason: str, request: Request | None = None) -> None:
        super().__init__(reason)
        self.request = request


class TargetReplacedError(Exception):
    """A front serves a target that this run can't go on with."""

    def __init__(self, front: str, difference: str) -> None:
        super().__init__(f"{front}: {difference}")
        self.front = front
        self.difference = difference


class Receiver:
    """Keeps sessions and places requests.

    Args:
        port: To the trainer.
        ring: Where batches go.
        setup: The trainer's first message: addresses, terms, patience, the target's shape.
    """

    def __init__(self, port: ReceiverPort, ring: Ring, setup: dict[str, Any]) -> None:
        self._port = port
        self._ring = ring
        self._fronts: list[str] = setup["addresses"]
        self._terms = terms_from_json(setup["terms"])
        self._patience = patience_from_json(setup["patience"])
        self._book = RequestBook(self._patience, depth=REQUESTS_PER_REPLICA, rank_name=self._terms.client_name)
        self._shape: dict[str, Any] | None = setup["shape"]
        self._owing_since_s = 0.0
        self._version: tuple[int, str] | None = None
        self._sessions: dict[str, ReplicaSession] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._losses: collections.Counter[str] = collections.Counter()
        self._reasons: dict[str, str] = {}
        self._absent_since_s = time.monotonic()
        self._changed = asyncio.Event()
        self._ask_again = {front: asyncio.Event() for front in self._fronts}

    async def run(self) -> None:
        """Works until the trainer says stop or is gone.

        Raises:
            ExceptionGroup: Of ``DeliveryFailedError`` when a request can't be answered, of ``TargetReplacedError`` when
                the target isn't the run's any more.
        """
        async with asyncio.TaskGroup() as group:
            followers = (self._follow_front(front, group) for front in self._fronts)
            tasks = [group.create_task(job) for job in (*followers, self._place(), self._report())]
            await self._take_commands()
            for task in (*tasks, *self._keepers.values()):
                task.cancel()

    # What the trainer says.

    async def _take_commands(self) -> None:
        while (message := await self._port.receive()) is not None:
            header, tail = message
            if header["kind"] == "stop":
                return
            if not len(self._book):
                self._owing_since_s = time.monotonic()
            self._book.add(self._request(header, tail))
            self._changed.set()

    def _request(self, header: dict[str, Any], tail: bytes) -> Request:
        lengths = tuple(header["lengths"])
        return Request(
            sequence=header["sequence"],
            position=header["position"],
            slot=header["slot"],
            lengths=lengths,
            token_ids=tail,
            payload_bytes=sum(lengths) * self._terms.row_bytes,
        )

    # Who serves.

    async def _follow_front(self, front: str, group: asyncio.TaskGroup) -> None:
        """Keeps a session to every replica that a front lists. Each front has its task: a dead one delays no other."""
        again = self._ask_again[front]
        while True:
            again.clear()
            for address in await self._ask_front(front) - self._keepers.keys():
                self._keepers[address] = group.create_task(self._keep_session(address))
            # Quick while nobody is there: a server that comes back is used at once.
            if await set_within(again, self._patience.rediscover_s if self._sessions else 0.5):
                await asyncio.sleep(0.1)  # a replica that has just died needs a moment to be listed so

    async def _ask_front(self, front: str) -> set[str]:
        """The replicas that a front says serve; none when it doesn't answer (those in use are kept)."""
        try:
            description = await describe(front, timeout_s=self._patience.call_timeout_s)
        except grpc.aio.AioRpcError as error:
            self._reasons[front] = str(reason_of(error))
            return set()
        self._check_target(front, description)
        self._reasons.pop(front, None)
        serving = set(serving_addresses(front, description))
        if not serving:
            self._reasons[front] = "no replica is serving"
        return serving

    def _check_target(self, front: str, description: pb.DescribeTargetResponse) -> None:
        """Before anything is asked of a front's replicas: is it still the run's target, and in which version?"""
        if self._shape is not None and (difference := shape_difference(self._shape, description)):
            raise TargetReplacedError(front, difference)
        version = [description.version.number, description.version.digest]
        self._port.send({"kind": "served", "front": front, "version": version})

    async def _keep_session(self, address: str) -> None:
        """One session to one replica, and the wait before there may be another."""
        try:
            await self._new_session(address).run()
        except SessionLostError as lost:
            self._session_lost(address, lost)
        self._losses[address] += 1
        await asyncio.sleep(self._patience.backoff_s(self._losses[address]))
        del self._keepers[address]
        self._ask_fronts_again()

    def _ask_fronts_again(self) -> None:
        for again in self._ask_again.values():
            again.set()

    def _new_session(self, address: str) -> ReplicaSession:
        return ReplicaSession(
            address,
            open_channel(address),
            terms=self._terms,
            patience=self._patience,
            owner=self,
            outstanding=lambda sequence: self._book.find(sequence, holder=address),
            body_of=lambda request: self._ring.slot(request.slot, request.payload_bytes),
        )

    def _session_lost(self, address: str, lost: SessionLostError) -> None:
        if self._sessions.pop(address, None) is not None and not self._sessions:
            self._absent_since_s = time.monotonic()
        self._reasons[address] = str(lost)
        if lost.fatal:
            raise DeliveryFailedError(f"replica {address} refuses: {lost}")
        try:
            self._book.lose(address, str(lost), now_s=time.monotonic())
        except ExhaustedError as error:
            raise exhausted(error) from error
        self._changed.set()

    # What goes where.

    async def _place(self) -> None:
        while True:
            self._changed.clear()
            now_s = time.monotonic()
            while (choice := self._book.choose(self._sessions, now_s=now_s)) is not None:
                request, address = choice
                self._sessions[address].send_request(request)
            wait_s = self._book.wait_s(now_s=now_s) if self._sessions else None
            await set_within(self._changed, max(wait_s, 0.01) if wait_s is not None else 1.0)

    # What the sessions tell (SessionOwner).

    def session_opened(self, session: ReplicaSession) -> None:
        """A replica is ready."""
        self._sessions[session.address] = session
        self._port.send({"kind": "connected", "replica": session.address, "stream_because": session.stream_because})
        self._reasons.clear()  # they are told while nobody serves, and are old news by then
        self._changed.set()

    def batch_begun(self, session: ReplicaSession, version: tuple[int, str]) -> None:
        """The trainer is told of another version while its first batch is still arriving."""
        if version != self._version:
            self._version = version
            self._port.send({"kind": "begun", "version": list(version)})

    def batch_received(self, session: ReplicaSession, batch: ReceivedBatch) -> None:
        """A batch is whole: reported, or asked for again when it is damaged or not finite."""
        request = batch.request
        self._losses.pop(session.address, None)
        if batch.damage:
            self._try_again(request, batch.damage)
        elif not batch.finite and len(request.reasons) + 1 < NONFINITE_ATTEMPTS:
            self._try_again(request, "the batch is not finite")
        else:
            self._book.complete(request)
            self._changed.set()
            self._port.send(ready_message(batch))

    def request_failed(self, session: ReplicaSession, request: Request, reason: str, *, retryable: bool) -> None:
        """A replica can't answer this one."""
        if not retryable:
            request.reasons.append(f"{session.address}: {reason}")
            raise DeliveryFailedError("the request is refused", request)
        self._try_again(request, reason)

    def _try_again(self, request: Request, reason: str) -> None:
        try:
            self._book.fail(request, reason, now_s=time.monotonic())
        except ExhaustedError as error:
            raise exhausted(error) from error
        self._changed.set()

    # What the trainer is told.

    async def _report(self) -> None:
        """Regular word to the trainer: that this process lives, and what it waits for when nobody serves."""
        while True:
            await asyncio.sleep(ALIVE_EVERY_S)
            waits = len(self._book) > 0 and not self._sessions
            absent_s = time.monotonic() - max(self._absent_since_s, self._owing_since_s) if waits else 0.0
            reasons = "; ".join(f"{who}: {why}" for who, why in self._reasons.items())
            reasons = reasons or "the first connections are still being made"
            if absent_s > self._patience.absence_timeout_s:
                raise DeliveryFailedError(f"no replica for {absent_s:.0f} s ({reasons})")
            self._port.send({"kind": "alive", "absent_s": absent_s, "reasons": reasons, "owed": len(self._book)})


async def set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits for an event; whether it was set in time.

    Not `asyncio.wait_for`: before Python 3.12 that loses a cancellation which meets the event, and the task lives on.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    return False


def ready_message(batch: ReceivedBatch) -> dict[str, Any]:
    """Tells the trainer that a slot is filled."""
    return {
        "kind": "ready",
        "sequence": batch.request.sequence,
        "version": [batch.version_number, batch.version_digest],
        "replica": batch.replica_index,
        "finite": batch.finite,
        "attempts": len(batch.request.reasons) + 1,
    }


def failed_message(error: DeliveryFailedError) -> dict[str, Any]:
    """Tells the trainer why the run can't go on."""
    request = error.request
    return {
        "kind": "failed",
        "reason": str(error),
        "position": request.position if request is not None else None,
        "reasons": request.reasons if request is not None else [],
    }


def replaced_message(error: TargetReplacedError) -> dict[str, Any]:
    """Tells the trainer that the target isn't the run's any more."""
    return {"kind": "replaced", "front": error.front, "difference": error.difference}


def exhausted(error: ExhaustedError) -> DeliveryFailedError:
    """An exhausted request as the end of the run."""
    return DeliveryFailedError(f"{len(error.request.reasons)} attempts failed", error.request)


async def serve(ring_descriptor: int, port_descriptor: int) -> None:
    """Runs the receiver on inherited descriptors until the trainer ends it."""
    port = await ReceiverPort.open(socket.socket(fileno=port_descriptor))
    message = await port.receive()
    if message is None:
        return
    setup, _ = message
    ring = Ring(ring_descriptor, slot_bytes=setup["slot_bytes"], slot_count=setup["terms"]["slot_count"])
    try:
        await Receiver(port, ring, setup).run()
    except ExceptionGroup as group:
        failed = group.subgroup((DeliveryFailedError, TargetReplacedError))
        if failed is None:
            raise
        error = _leaf(failed)
        port.send(failed_message(error) if isinstance(error, DeliveryFailedError) else replaced_message(error))
    finally:
        await port.close()
        ring.close()


def _leaf(group: BaseException) -> Any:
    return _leaf(group.exceptions[0]) if isinstance(group, BaseExceptionGroup) else group


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
