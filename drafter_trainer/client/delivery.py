"""The trainer's end: submits requests in plan order, hands filled slots over in plan order, frees them.

Owns the ring, the receiver process and the order. The receiver may die at any time: what has not been handed over is
submitted to a new one, and the batches already whole in their slots stay valid. Used by one thread.

A batch is handed over with its version's head at hand, fetched from the first word of that version on. Where nobody has
that head any more, the batch is asked for again, in its place: then it comes in the version that is served now.

A slot's life: `submit` gives it to the receiver, `take` to the caller, `release` frees it. Submission number modulo
slot count is the slot, and both ends keep plan order, so there's nothing to search and nothing to leak.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from drafter_trainer.client.port import Message, PortClosedError, TrainerPort
from drafter_trainer.client.ring import Ring
from drafter_trainer.client.served import ServedVersion
from drafter_trainer.client.terms import Patience, StreamTerms, terms_to_json
from drafter_trainer.errors import (
    BatchFailedError,
    TargetChangedError,
    TargetUnavailableError,
    TrainerError,
    UserError,
)
from drafter_trainer.signals import StopRequestedError
from drafter_trainer.types import Version

logger = logging.getLogger(__name__)

# Three of the receiver's regular words missed and then some: it hangs (stopped, swapped out, broken).
SILENCE_LIMIT_S = 30.0
# A receiver that dies again and again without delivering anything has a defect that another start won't cure.
MAX_BARREN_RESTARTS = 5
WAITING_LINE_EVERY_S = 10.0
# How long a step may still wait for its batch once a stop was asked for. Containers are killed after ten seconds.
STOP_PATIENCE_S = 4.0
# How often one batch is asked for again because the head of its version is gone: each time the target has changed twice
# since the batch was made.
MAX_ASKED_AGAIN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """One micro-batch that was asked for."""

    sequence: int
    position: int
    lengths: tuple[int, ...]
    token_ids: bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """A batch as received and checked. `payload` is valid until the slot is released."""

    position: int
    payload: memoryview
    version_number: int
    version_digest: str
    replica_index: int
    finite: bool
    attempts: int


class HeadKeeper(Protocol):
    """Who has the heads of the target's versions; `heads.HeadShelf` is one."""

    def expect(self, version: Version) -> None:
        """Batches of this version are coming: its head is fetched in the background. Doesn't wait."""

    def wait(self, version: Version, *, timeout_s: float) -> bool:
        """Whether the head is at hand; waits for it. Raises ``TargetChangedError`` when nobody has it any more."""


class Delivery:
    """Batches from the target's replicas, once each and in order. A context manager.

    Args:
        addresses: Fronts of the servers.
        terms: Sizes of the run.
        patience: Deadlines and attempts.
        heads: Whose heads the batches will need; None where nobody trains on them.
        shape: What the target must be (`client.shape`); None takes any that fits the terms.
        should_stop: Whether the run was asked to stop; then a batch that doesn't come is not waited for.

    Raises:
        OSError: The ring's memory isn't there.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        terms: StreamTerms,
        patience: Patience,
        heads: HeadKeeper | None = None,
        shape: Mapping[str, Any] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._addresses = list(addresses)
        self._terms = terms
        self._patience = patience
        self._heads = heads
        self._shape = shape
        self._served = ServedVersion()
        self._asked_again = 0
        self._should_stop = should_stop
        self._ring = Ring.create(slot_bytes=terms.max_batch_bytes, slot_count=terms.slot_count)
        self._pending: collections.deque[Submission] = collections.deque()
        self._in_use: collections.deque[int] = collections.deque()
        self._ready: dict[int, dict[str, Any]] = {}
        self._submitted = self._taken = self._released = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._port: TrainerPort | None = None
        self._barren_restarts = 0
        self._said_s = float("-inf")

    def __enter__(self) -> Delivery:
        self._start_receiver()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_receiver()
        self._ring.close()

    @property
    def free_slots(self) -> int:
        """Requests that may be submitted now."""
        return self._terms.slot_count - (self._submitted - self._released)

    @property
    def ring_view(self) -> memoryview:
        """The ring's memory, for pinning it."""
        return self._ring.whole()

    @property
    def receiver_pid(self) -> int | None:
        """Process id of the receiver, for people and tests."""
        return self._process.pid if self._process is not None else None

    def served_version(self) -> Version | None:
        """The version served now, as far as is known; None until anybody has told. Doesn't wait."""
        self._listen()
        return self._served.version

    def take_asked_again(self) -> int:
        """Batches that were asked for again since the last call."""
        asked_again, self._asked_again = self._asked_again, 0
        return asked_again

    def submit(self, *, position: int, lengths: Sequence[int], token_ids: bytes) -> None:
        """Asks for the next micro-batch in plan order; needs a free slot. Does not wait.

        Args:
            position: Place in the plan, for messages.
            lengths: Tokens of each sequence.
            token_ids: int32 little-endian, the sequences one after the other.
        """
        assert self.free_slots > 0, "submit without a free slot"
        self._listen()
        item = Submission(sequence=self._submitted, position=position, lengths=tuple(lengths), token_ids=token_ids)
        self._submitted += 1
        self._pending.append(item)
        try:
            self._send(item)
        except PortClosedError as error:
            self._restart_receiver(str(error))

    def take(self) -> Slot:
        """The next batch in plan order. Waits for it; the patience given bounds how long.

        Raises:
            BatchFailedError: It failed on every attempt.
            TargetUnavailableError: No replica, or no head, for too long.
            TargetChangedError: The target changes faster than batches and heads can be fetched.
            UserError: The target is another one now.
            StopRequestedError: A stop was asked for and the batch doesn't come.
        """
        assert self._taken < self._submitted, "take without a submission"
        self._listen()
        for _ in range(MAX_ASKED_AGAIN):
            self._wait_for_batch()
            version = Version(*self._ready[self._taken]["version"])
            if self._heads is None or self._has_head(self._heads, version):
                return self._hand_over()
            self._ask_again(version)
        position = self._pending[0].position
        raise TargetChangedError(
            f"batch at plan position {position} was asked for {MAX_ASKED_AGAIN} times, and each time the target had "
            "changed and its head was gone before it could be trained; swap the target less often"
        )

    def release(self, slot: Slot) -> None:
        """The batch is consumed and nothing reads it any more; slots are released in the order of their taking."""
        assert self._released < self._taken, "release without a slot taken"
        assert slot.position == self._in_use.popleft(), "slots are released in the order of their taking"
        self._released += 1

    def _wait_for_batch(self) -> None:
        heard_s = started_s = time.monotonic()
        while self._taken not in self._ready:
            try:
                message = self._open_port().receive(1.0)
                if message is not None:
                    heard_s = time.monotonic()
                    self._hear(message)
                elif time.monotonic() - heard_s > SILENCE_LIMIT_S:
                    raise PortClosedError(f"receiver process silent for {SILENCE_LIMIT_S:g} s")
                self._check_stop(started_s)
            except PortClosedError as error:
                self._restart_receiver(str(error))
                heard_s = time.monotonic()

    def _has_head(self, heads: HeadKeeper, version: Version) -> bool:
        """Waits for a version's head; False when nobody has it any more."""
        started_s = time.monotonic()
        try:
            while not heads.wait(version, timeout_s=1.0):
                self._check_stop(started_s)
        except TargetChangedError as error:
            logger.warning("%s; its batches are asked for again", error)
            return False
        return True

    def _ask_again(self, version: Version) -> None:
        """Asks again for everything that has come in this version and wasn't handed over."""
        useless = [number for number, ready in self._ready.items() if ready["version"][1] == version.digest]
        for number in useless:
            del self._ready[number]
        self._asked_again += len(useless)
        try:
            for item in self._pending:
                if item.sequence in useless:
                    self._send(item)
        except PortClosedError as error:
            self._restart_receiver(str(error))

    def _check_stop(self, started_s: float) -> None:
        if self._should_stop() and time.monotonic() - started_s > STOP_PATIENCE_S:
            raise StopRequestedError("asked to stop while waiting for a batch")

    def _listen(self) -> None:
        """Takes in what the receiver has said, without waiting for more: a head is fetched from its first word on."""
        try:
            while (message := self._open_port().receive(0.0)) is not None:
                self._hear(message)
        except PortClosedError as error:
            self._restart_receiver(str(error))

    def _hand_over(self) -> Slot:
        ready, item = self._ready.pop(self._taken), self._pending.popleft()
        assert item.sequence == self._taken
        index = self._taken % self._terms.slot_count
        self._taken += 1
        self._in_use.append(item.position)
        return Slot(
            position=item.position,
            payload=self._ring.slot(index, sum(item.lengths) * self._terms.row_bytes),
            version_number=ready["version"][0],
            version_digest=ready["version"][1],
            replica_index=ready["replica"],
            finite=ready["finite"],
            attempts=ready["attempts"],
        )

    def _hear(self, message: Message) -> None:
        header, _ = message
        kind = header["kind"]
        if kind == "ready":
            self._ready[header["sequence"]] = header
            self._barren_restarts = 0
            self._expect(Version(*header["version"]))
        elif kind == "begun":
            self._expect(Version(*header["version"]))
        elif kind == "served":
            self._served.told_by_front(header["front"], Version(*header["version"]))
        elif kind == "alive":
            self._say_waiting(header)
        elif kind == "connected":
            reason = header["stream_because"]
            way = f"on the gRPC stream ({reason})" if reason else "through shared memory"
            logger.info("replica %s: hidden states come %s", header["replica"], way)
        else:
            raise delivery_error(header)

    def _expect(self, version: Version) -> None:
        self._served.told_by_batch(version)
        if self._heads is not None:
            self._heads.expect(version)

    def _say_waiting(self, alive: dict[str, Any]) -> None:
        now_s = time.monotonic()
        if alive["absent_s"] > 0 and alive["owed"] and now_s - self._said_s >= WAITING_LINE_EVERY_S:
            self._said_s = now_s
            limit_s = self._patience.absence_timeout_s
            logger.warning("no replica for %.0f s of at most %.0f s (%s)", alive["absent_s"], limit_s, alive["reasons"])

    def _send(self, item: Submission) -> None:
        header = {
            "kind": "submit",
            "sequence": item.sequence,
            "position": item.position,
            "slot": item.sequence % self._terms.slot_count,
            "lengths": item.lengths,
        }
        self._open_port().send(header, item.token_ids)

    def _open_port(self) -> TrainerPort:
        assert self._port is not None, "delivery is not open"
        return self._port

    def _start_receiver(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = (self._ring.descriptor, theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "drafter_trainer.client.receiver", *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                # A Ctrl-C at the terminal is the trainer's to answer: it still needs batches to finish its step.
                start_new_session=True,
            )
        self._port = TrainerPort(ours)
        setup = {
            "kind": "setup",
            "addresses": self._addresses,
            "terms": terms_to_json(self._terms),
            "patience": dataclasses.asdict(self._patience),
            "shape": self._shape,
            "slot_bytes": self._ring.slot_bytes,
        }
        self._port.send(setup)

    def _restart_receiver(self, reason: str) -> None:
        """Replaces a dead receiver; asks it for everything that isn't whole yet.

        Raises:
            TrainerError: It has died too often without delivering.
        """
        while True:
            self._barren_restarts += 1
            if self._barren_restarts > MAX_BARREN_RESTARTS:
                raise TrainerError(f"the receiver process died {MAX_BARREN_RESTARTS} times in a row: {reason}")
            logger.warning("receiver process restarted: %s", reason)
            self._stop_receiver(grace_s=0.0)
            try:
                self._start_receiver()
                for item in self._pending:
                    if item.sequence not in self._ready:
                        self._send(item)
                return
            except PortClosedError as error:
                reason = str(error)

    def _stop_receiver(self, *, grace_s: float = 2.0) -> None:
        """Ends the receiver; no slot is written to afterwards."""
        if self._port is not None:
            self._port.close()  # the receiver ends by itself
            self._port = None
        if self._process is not None:
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def delivery_error(failed: dict[str, Any]) -> TrainerError:
    """What the receiver gave up on, as the trainer's exception."""
    if failed["kind"] == "replaced":
        fix = f"another target is served there now: {failed['difference']}. Serve the old one again and run the same "
        return UserError(
            "target.addresses", failed["front"], fix + "command, or train a new drafter in another run.dir"
        )
    if failed["position"] is None:
        return TargetUnavailableError(failed["reason"])
    attempts = "; ".join(f"{number}. {why}" for number, why in enumerate(failed["reasons"], 1))
    return BatchFailedError(f"batch at plan position {failed['position']}: {failed['reason']} ({attempts})")
