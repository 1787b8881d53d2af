"""A whole replica in one thread with an adversary in charge of time: the real code from session to frame.

Real: sessions, scheduler, slot pool, the replica's and the copier's code, the copy pipeline, the servicer's writer and
the publisher. Modelled: the device (model_streams), the forward (a pattern that depends on the request), the transport
(takes a message when the adversary says so) and the clients. At every turn the adversary picks who moves: the device,
the replica's thread, the copier's thread, the transport of one stream, one client. Checked: every delivered byte, that
a request is answered once, that nobody writes to or reads from a free slot (they are poisoned), credit, and that
nothing is left over.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from crc32c import crc32c
from target_wire.checks import ServedTarget, SessionTerms
from target_wire.codec import tensor_from_buffer
from target_wire.framing import BatchFrameView, decode_response
from target_wire.spec import DType
from target_wire.v1 import target_pb2 as pb

from target_server import replica as replica_module
from target_server.buffers import HostSlot, SlotPool
from target_server.config import ServerConfig
from target_server.handover import Handover
from target_server.metrics import ReplicaMetrics
from target_server.replica import Replica, allocate_slots, slot_payload_bytes
from target_server.scheduler import CaptureJob, Scheduler
from target_server.servicer import ReplicaServicer
from target_server.session import Session
from target_server.versions import Version
from tests.support.model_streams import ModelStreams

HIDDEN = 4
TAPS = (0, 2)
ROW_BYTES = HIDDEN * len(TAPS) * 2
MAX_TOKENS = 6
POISON = 0xEE
_MAX_TURNS = 20_000


@dataclass(frozen=True)
class Profile:
    """What the adversary likes.

    Attributes:
        device: weight of device steps; 0 leaves the device idle until a host wait forces it on.
        compute_bias: see ModelStreams.
        transport: weight of the transport.
        copier: weight of the copier's thread.
    """

    device: float = 1.0
    compute_bias: float = 0.5
    transport: float = 1.0
    copier: float = 1.0


PROFILES = (
    Profile(),
    Profile(device=0.0),
    Profile(compute_bias=1.0, device=4.0),
    Profile(compute_bias=0.0, device=4.0),
    Profile(compute_bias=1.0, copier=0.1),
    Profile(transport=0.05),
    Profile(transport=8.0, device=0.3),
)


def pattern(ident: int, tokens: int) -> torch.Tensor:
    """Returns the rows [tokens, L, D] of a request; every fifth request has a NaN in it."""
    values = (torch.arange(tokens * len(TAPS) * HIDDEN) * 3 + ident * 17) % 251
    rows = values.to(torch.bfloat16).view(tokens, len(TAPS), HIDDEN)
    if ident % 5 == 0:
        rows[-1, 0, 1] = float("nan")
    return rows


def _write_pattern(
    _target: object, token_ids: array[int], _parts: object, *, taps: object, packed_TLD: torch.Tensor
) -> float:
    packed_TLD.copy_(pattern(token_ids[0], len(token_ids)))
    return 0.0


@dataclass
class Client:
    """One rank: its session, what it has asked, what it has got."""

    session: Session
    writer: asyncio.Task[None] | None = None
    to_ask: list[tuple[int, int]] = field(default_factory=list)
    asked: dict[int, int] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    pending: deque[tuple[bytes, asyncio.Future[None]]] = field(default_factory=deque)
    header: pb.BatchHeader | None = None
    body: bytearray = field(default_factory=bytearray)
    received: int = 0

    async def write(self, message: bytes) -> None:
        """The transport's side of `context.write`: returns when the adversary lets the message go."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pending.append((message, taken))
        await taken

    def read(self, message: bytes) -> None:
        """Takes one message and checks it."""
        answer = decode_response(message)
        if isinstance(answer, BatchFrameView):
            self._read_frame(answer)
        elif answer.WhichOneof("message") == "batch_failed":
            self._answer(answer.batch_failed.request_id)
        else:
            assert self.header is None, "a batch began within another"
            self.header, self.body = answer.batch_header, bytearray()

    def _read_frame(self, frame: BatchFrameView) -> None:
        assert self.header is not None
        assert frame.request_id == self.header.request_id
        assert frame.offset_bytes == len(self.body)
        assert frame.crc32c == crc32c(frame.body), "a frame changed under its checksum"
        self.body += frame.body
        self.received += len(frame.body)
        # As eager as a client may be: what has been received is granted again at once.
        granted = self.received + self.session.ledger.window_bytes
        self.session.take(pb.StreamHiddenStatesRequest(credit=pb.Credit(granted_bytes=granted)))
        if len(self.body) == self.header.payload_bytes:
            self._check_batch(self.header)
            self.header = None

    def _check_batch(self, header: pb.BatchHeader) -> None:
        tokens = self.asked[header.request_id]
        expected = pattern(header.request_id, tokens)
        rows = tensor_from_buffer(self.body, DType.BFLOAT16, expected.shape)
        assert torch.equal(rows.view(torch.int16), expected.view(torch.int16)), "wrong bytes were delivered"
        assert header.finite == bool(torch.isfinite(expected).all()), "another batch's status was delivered"
        self._answer(header.request_id)

    def _answer(self, request_id: int) -> None:
        assert request_id not in self.answered, "a request was answered twice"
        self.answered.add(request_id)


class PoisonedPool(SlotPool):
    """Fills free slots with a pattern and looks whether it is still there: a late read or write shows."""

    def acquire(self, owner: int) -> HostSlot:
        slot = super().acquire(owner)
        assert bool((slot.memory == POISON).all()), "a free slot was written to"
        return slot

    def release(self, slot: HostSlot) -> None:
        super().release(slot)
        slot.memory.fill_(POISON)


class World:
    """One run."""

    def __init__(
        self, seed: int, profile: Profile, *, device_buffers: int = 2, overlap: bool = True, audit: str = "off"
    ) -> None:
        self.adversary = random.Random(seed)
        self.profile = profile
        count = self.adversary.randint(1, 3)
        config = ServerConfig(
            limits={"max_batch_token_count": MAX_TOKENS, "max_tap_count": len(TAPS), "max_session_count": count},
            buffers={
                "host_slot_count": count + self.adversary.randint(1, 3),
                "device_buffer_count": device_buffers,
                "copy_overlap": overlap,
                "copy_audit": audit,
                "frame_bytes": 2 * ROW_BYTES,
            },
        )
        self.streams = ModelStreams(self.adversary, compute_bias=profile.compute_bias)
        description = SimpleNamespace(layer_count=4, hidden_size=HIDDEN)
        target: Any = SimpleNamespace(dtype=DType.BFLOAT16, description=description)
        self.fatal: list[Exception] = []
        self.replica = Replica(
            target,
            self.streams,  # type: ignore[arg-type]
            config,
            Version(1, "d"),
            on_captured=lambda job, finite: self.scheduler.captured(job, finite=finite),
            on_failed=lambda job, error: self.fatal.append(error),
            on_fatal=self.fatal.append,
        )
        slots = allocate_slots(
            self.streams,  # type: ignore[arg-type]
            count=config.buffers.host_slot_count,
            payload_bytes=slot_payload_bytes(target, config),
        )
        self.slot_count = len(slots)
        self.pool = PoisonedPool(slots, max_owner_count=count)
        self.jobs: deque[CaptureJob] = deque()
        self.scheduler = Scheduler(self.pool, self.jobs.append, max_session_count=count)
        served = ServedTarget(4, HIDDEN, 1000, DType.BFLOAT16, 1, "d", MAX_TOKENS, MAX_TOKENS)
        heads: Any = None
        self.servicer = ReplicaServicer(
            served=served,
            scheduler=self.scheduler,
            heads=heads,
            config=config,
            replica_index=0,
            metrics=ReplicaMetrics(),
            handover=Handover(0),
        )
        self.clients = [self._client(key, served) for key in range(count)]

    def run(self) -> None:
        """Plays until everything is answered; raises what went wrong."""
        with patch.object(replica_module, "capture_batch", _write_pattern):
            asyncio.run(self._play())

    def _client(self, key: int, served: ServedTarget) -> Client:
        window = self.adversary.randint(MAX_TOKENS, 4 * MAX_TOKENS) * ROW_BYTES
        terms = SessionTerms(TAPS, DType.BFLOAT16, ROW_BYTES, MAX_TOKENS, window, f"client-{key}")
        session = Session(key, terms, served, max_outstanding_request_count=64, on_change=self.scheduler.wake)
        requests = [(100 * key + n, self.adversary.randint(1, MAX_TOKENS)) for n in range(1, 9)]
        return Client(session, to_ask=requests)

    async def _play(self) -> None:
        for client in self.clients:
            self.scheduler.add(client.session)
            client.session.ledger.grant(client.session.ledger.window_bytes)
            context: Any = SimpleNamespace(write=client.write)
            client.writer = asyncio.create_task(self.servicer._write(client.session, context))
        for _ in range(_MAX_TURNS):
            await self._settle()
            moves = self._moves()
            if not moves:
                break
            await self._move(self.adversary.choices([name for name, _ in moves], [weight for _, weight in moves])[0])
            self.scheduler.check_integrity()
        else:
            raise AssertionError("the run did not end")
        await self._end()

    async def _settle(self) -> None:
        """Lets the writers run until each waits for the transport or for its outbox."""
        for _ in range(6):
            await asyncio.sleep(0)
        for client in self.clients:
            if client.writer is not None and client.writer.done():
                client.writer.result()

    def _moves(self) -> list[tuple[str, float]]:
        profile = self.profile
        possible = {
            "client": (any(client.to_ask for client in self.clients), 1.0),
            "replica": (bool(self.jobs), 1.0),
            "copier": (not self.replica._copier._queue.empty(), profile.copier),
            "transport": (any(client.pending for client in self.clients), profile.transport),
        }
        moves = [(name, weight) for name, (can, weight) in possible.items() if can]
        if profile.device and (self.streams.compute.runnable() or self.streams.copy.runnable()):
            moves.append(("device", profile.device))
        return moves

    async def _move(self, name: str) -> None:
        if name == "device":
            self.streams.step()
        elif name == "replica":
            self.replica._capture(self.jobs.popleft())
        elif name == "copier":
            item = self.replica._copier._queue.get_nowait()
            assert item is not None
            self.replica._copier.finish(*item)
        elif name == "transport":
            client = self.adversary.choice([client for client in self.clients if client.pending])
            message, taken = client.pending.popleft()
            # The client may act on a message before the server's write has returned.
            client.read(message)
            taken.set_result(None)
        else:
            await self._act(self.adversary.choice([client for client in self.clients if client.to_ask]))

    async def _act(self, client: Client) -> None:
        draw = self.adversary.random()
        if draw < 0.05:
            await self._leave(client)
        elif draw < 0.2 and client.asked:
            withdrawn = self.adversary.choice(list(client.asked))
            client.session.take(pb.StreamHiddenStatesRequest(cancel=pb.Cancel(request_id=withdrawn)))
        else:
            ident, tokens = client.to_ask.pop(0)
            client.asked[ident] = tokens
            request = pb.BatchRequest(request_id=ident, sequence_lengths=[tokens], token_ids=[ident] * tokens)
            client.session.take(pb.StreamHiddenStatesRequest(batch_request=request))

    async def _leave(self, client: Client) -> None:
        """The client vanishes: what `stream_hidden_states` does in its `finally`."""
        assert client.writer is not None
        client.writer.cancel()
        await asyncio.gather(client.writer, return_exceptions=True)
        self.scheduler.remove(client.session)
        self.clients.remove(client)

    async def _end(self) -> None:
        for client in self.clients:
            assert client.answered == set(client.asked), "a request was not answered"
            assert client.writer is not None
            client.writer.cancel()
            await asyncio.gather(client.writer, return_exceptions=True)
            self.scheduler.remove(client.session)
        assert not self.fatal, self.fatal[0]
        self.scheduler.check_integrity()
        assert self.pool.snapshot()["free"] == self.slot_count, "a slot was lost"
