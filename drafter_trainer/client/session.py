"""One stream to one replica, from dialling to its end.

Owns the gRPC call, the credit of this stream and the assembly of the batch that is arriving. It never retries and never
decides where a request goes: it tells its owner what happened and ends with ``SessionLostError``.

Credit: a request's bytes are granted together with the request, and only requests that own a free slot get here. So the
ring's free slots are the credit; the server never holds more than the slots it was asked to fill, and no credit has to
be taken back when a replica dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import grpc
from target_wire.credits import CreditGrants
from target_wire.errors import RETRYABLE, FrameError, Reason, WireError
from target_wire.framing import BatchFrameView, decode_response
from target_wire.spec import PROTOCOL_VERSION
from target_wire.v1 import target_pb2 as pb

from drafter_trainer.client.assembly import BatchAssembly, ProtocolBrokenError, ReceivedBatch
from drafter_trainer.client.book import Request
from drafter_trainer.client.failures import reason_of
from drafter_trainer.client.shared_buffer import AttachedBuffer, NoSharedMemoryError, fetch, wanted_here
from drafter_trainer.client.terms import Patience, StreamTerms

STREAM_METHOD = "/target_wire.v1.TargetReplicaService/StreamHiddenStates"


class SessionLostError(Exception):
    """The stream is over.

    Args:
        reason: One line for people.
        fatal: Whether trying again is pointless (the terms are refused).
    """

    def __init__(self, reason: str, *, fatal: bool = False) -> None:
        super().__init__(reason)
        self.fatal = fatal


class SessionOwner(Protocol):
    """What a session tells; called on the event loop, must not block."""

    def session_opened(self, session: ReplicaSession) -> None:
        """The replica is ready for requests."""

    def batch_begun(self, session: ReplicaSession, version: tuple[int, str]) -> None:
        """A batch of this target version (number, digest) has begun to arrive."""

    def batch_received(self, session: ReplicaSession, batch: ReceivedBatch) -> None:
        """A batch is whole in its slot (or damaged: look)."""

    def request_failed(self, session: ReplicaSession, request: Request, reason: str, *, retryable: bool) -> None:
        """The replica answered with ``batch_failed``."""


class ReplicaSession:
    """One connection's life. Used on one event loop.

    Args:
        address: The replica's endpoint.
        channel: A channel to it; closed by ``run``.
        terms: The run's terms.
        patience: Deadlines.
        owner: Who is told.
        outstanding: Finds a request that this session owes by its id.
        body_of: The slot memory of a request.

    Attributes:
        stream_because: Why bodies come on the stream; empty when they come through shared memory.
    """

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        *,
        terms: StreamTerms,
        patience: Patience,
        owner: SessionOwner,
        outstanding: Callable[[int], Request | None],
        body_of: Callable[[Request], memoryview],
    ) -> None:
        self.address = address
        self._channel = channel
        self._terms = terms
        self._patience = patience
        self._owner = owner
        self._outstanding = outstanding
        self._body_of = body_of
        self._outbox: asyncio.Queue[pb.StreamHiddenStatesRequest] = asyncio.Queue()
        self._assembly: BatchAssembly | None = None
        self._replica_index = -1
        self._shared: AttachedBuffer | None = None
        self.stream_because = ""
        self._credit = CreditGrants()
        self._heard_s = 0.0

    def send_request(self, request: Request) -> None:
        """Grants the request's bytes and asks for it. The session must be open."""
        if self._credit.owed_bytes == 0:
            self._heard_s = time.monotonic()  # silence counts from the first thing owed
        granted_bytes = self._credit.request(request.payload_bytes)
        self._outbox.put_nowait(pb.StreamHiddenStatesRequest(credit=pb.Credit(granted_bytes=granted_bytes)))
        self._outbox.put_nowait(pb.StreamHiddenStatesRequest(batch_request=wire_request(request)))

    async def run(self) -> None:
        """Lives until the stream ends.

        Raises:
            SessionLostError: Always, at the end.
        """
        call: Any = self._channel.stream_stream(
            STREAM_METHOD,
            request_serializer=pb.StreamHiddenStatesRequest.SerializeToString,
            response_deserializer=None,  # bytes: frames are read without protobuf
        )()
        try:
            await self._open(call)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write(call))
                group.create_task(self._watch())
                group.create_task(self._read(call))
        except ExceptionGroup as group_error:
            raise lost_because(first_leaf(group_error)) from group_error
        except (grpc.aio.AioRpcError, ProtocolBrokenError) as error:
            raise lost_because(error) from error
        finally:
            if self._shared is not None:
                self._shared.close()
            call.cancel()
            await self._channel.close()

    async def _open(self, call: Any) -> None:
        try:
            async with asyncio.timeout(self._patience.connect_timeout_s):
                await call.write(pb.StreamHiddenStatesRequest(open=open_message(self._terms)))
                message = await self._next_message(call)
        except TimeoutError as error:
            raise SessionLostError(f"no answer within {self._patience.connect_timeout_s:g} s") from error
        if not isinstance(message, pb.StreamHiddenStatesResponse) or message.WhichOneof("message") != "opened":
            raise ProtocolBrokenError("the first message is not `opened`")
        self._check_opened(message.opened)
        self._replica_index = message.opened.replica_index
        await self._choose_way(message.opened)
        self._owner.session_opened(self)

    async def _choose_way(self, opened: pb.Opened) -> None:
        """Takes up shared memory where it is wanted and can be had."""
        if not self._terms.shared_memory:
            self.stream_because = "switched off"
            return
        try:
            self._shared = await fetch(opened)
        except NoSharedMemoryError as reason:
            self.stream_because = str(reason)
        else:
            self._outbox.put_nowait(pb.StreamHiddenStatesRequest(shared_buffer_attached=pb.SharedBufferAttached()))

    def _check_opened(self, opened: pb.Opened) -> None:
        if (opened.bytes_per_token, opened.dtype) != (self._terms.row_bytes, self._terms.dtype.number):
            raise SessionLostError(
                f"the target has another shape: {opened.bytes_per_token} bytes a token (dtype {opened.dtype}), "
                f"this run needs {self._terms.row_bytes} ({self._terms.dtype})",
                fatal=True,
            )

    async def _write(self, call: Any) -> None:
        # grpc's word for a stream that ended between two messages; `_read` learns why it did.
        with contextlib.suppress(asyncio.InvalidStateError):
            while True:
                await call.write(await self._outbox.get())

    async def _watch(self) -> None:
        limit_s = self._patience.stall_timeout_s
        while True:
            await asyncio.sleep(min(limit_s / 4, 1.0))
            if self._credit.owed_bytes > 0 and time.monotonic() - self._heard_s > limit_s:
                raise SessionLostError(f"silent for {limit_s:g} s with {self._credit.owed_bytes} bytes owed")

    async def _read(self, call: Any) -> None:
        while True:
            message = await self._next_message(call)
            self._heard_s = time.monotonic()
            if isinstance(message, BatchFrameView):
                self._take_frame(message, message.body)
            elif message.HasField("shared_frame"):
                self._take_shared_frame(message.shared_frame)
            else:
                self._take_control(message)

    async def _next_message(self, call: Any) -> BatchFrameView | pb.StreamHiddenStatesResponse:
        piece = await call.read()
        if piece is grpc.aio.EOF:
            code = await call.code()
            if code is grpc.StatusCode.OK:
                raise SessionLostError("the replica has closed the stream")
            raise grpc.aio.AioRpcError(
                code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
            )
        try:
            return decode_response(piece)
        except FrameError as error:
            raise ProtocolBrokenError(f"unreadable message: {error}") from error

    def _take_frame(self, frame: BatchFrameView | pb.SharedFrame, body: memoryview) -> None:
        if self._assembly is None:
            raise ProtocolBrokenError(f"a frame of request {frame.request_id} without a header")
        batch = self._assembly.add(
            request_id=frame.request_id, offset_bytes=frame.offset_bytes, checksum=frame.crc32c, body=body
        )
        self._credit.receive(len(body))
        if batch is not None:
            self._assembly = None
            self._owner.batch_received(self, batch)

    def _take_shared_frame(self, frame: pb.SharedFrame) -> None:
        if self._shared is None:
            raise ProtocolBrokenError("a frame in shared memory, which this session has not got")
        try:
            body = self._shared.body(frame)
        except WireError as error:
            raise ProtocolBrokenError(f"a frame in shared memory: {error.detail}") from error
        self._take_frame(frame, body)
        # Only now: the server may write there again as soon as it hears of it.
        if (released := self._shared.copied(frame)) is not None:
            self._outbox.put_nowait(released)

    def _take_control(self, message: pb.StreamHiddenStatesResponse) -> None:
        kind = message.WhichOneof("message")
        if self._assembly is not None:
            raise ProtocolBrokenError(f"`{kind}` between the frames of a batch")
        if kind == "batch_header":
            self._begin_batch(message.batch_header)
        elif kind == "batch_failed":
            self._fail_request(message.batch_failed)
        else:
            raise ProtocolBrokenError(f"unexpected `{kind}`")

    def _begin_batch(self, header: pb.BatchHeader) -> None:
        request = self._owed_request(header.request_id)
        if header.replica_index != self._replica_index:
            raise ProtocolBrokenError(f"a batch of replica {header.replica_index} from replica {self._replica_index}")
        self._assembly = BatchAssembly(header, request, terms=self._terms, body=self._body_of(request))
        self._owner.batch_begun(self, (header.version.number, header.version.digest))

    def _fail_request(self, failed: pb.BatchFailed) -> None:
        request = self._owed_request(failed.request_id)
        self._credit.forgive(request.payload_bytes)
        retryable = failed.reason in RETRYABLE
        self._owner.request_failed(self, request, f"{failed.reason}: {failed.detail}", retryable=retryable)

    def _owed_request(self, request_id: int) -> Request:
        request = self._outstanding(request_id)
        if request is None:
            raise ProtocolBrokenError(f"an answer to request {request_id}, which is not outstanding here")
        return request


def open_message(terms: StreamTerms) -> pb.Open:
    """The session's first message.

    It expects no version of the target: what becomes of another one is decided batch by batch, where all ranks of a run
    can agree on it, and a run that follows the target must be able to connect to any.
    """
    return pb.Open(
        protocol_version=PROTOCOL_VERSION,
        taps=terms.taps,
        dtype=pb.Dtype.ValueType(terms.dtype.number),
        max_batch_token_count=terms.max_batch_tokens,
        window_bytes=terms.window_bytes,
        client_name=terms.client_name,
        shared_memory=terms.shared_memory and wanted_here(),
    )


def wire_request(request: Request) -> pb.BatchRequest:
    """The request as the contract has it."""
    return pb.BatchRequest(
        request_id=request.sequence,
        sequence_lengths=request.lengths,
        token_ids=memoryview(request.token_ids).cast("i").tolist(),
    )


# The same terms will be refused again. Everything else that ends a stream is worth another connection: whether it goes
# on like that is bounded by each request's attempts.
REFUSALS = frozenset(
    {
        Reason.BAD_REQUEST,
        Reason.TAP_OUT_OF_RANGE,
        Reason.DTYPE_MISMATCH,
        Reason.BATCH_TOO_LARGE,
        Reason.WINDOW_TOO_SMALL,
        Reason.PROTOCOL_MISMATCH,
        Reason.VERSION_MISMATCH,
    }
)


def lost_because(error: Exception) -> SessionLostError:
    """What ended a session, as its owner is told.

    Raises:
        Exception: ``error`` itself when it's none of those that a peer can cause.
    """
    if isinstance(error, SessionLostError):
        return error
    if isinstance(error, ProtocolBrokenError):
        return SessionLostError(f"protocol broken: {error}")
    if isinstance(error, grpc.RpcError):
        failure = reason_of(error)
        return SessionLostError(str(failure), fatal=failure.reason in REFUSALS)
    raise error


def first_leaf(group: BaseExceptionGroup[Any]) -> Any:
    """The first plain exception in a group."""
    inner = group.exceptions[0]
    return first_leaf(inner) if isinstance(inner, BaseExceptionGroup) else inner
