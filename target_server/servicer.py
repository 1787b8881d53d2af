"""A replica's RPCs: between gRPC's calls and the room's own objects; no torch, no state of its own.

`StreamHiddenStates` runs one reader and one writer per stream; whichever fails ends it, and whatever happens, the
session's slots and its place in the scheduler are given back. The data method's answers are bytes that the publisher
has already framed, so the service is registered by a generic handler instead of the generated one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

import grpc
from crc32c import crc32c
from target_wire.channel import MAX_MESSAGE_BYTES
from target_wire.checks import ServedTarget, SessionTerms, check_batch_request, check_open, check_taps
from target_wire.errors import Code, Reason, WireError
from target_wire.spec import row_bytes
from target_wire.v1 import target_pb2

from target_server.config import ServerConfig
from target_server.errors import maps_errors
from target_server.handover import Handover
from target_server.metrics import ReplicaMetrics
from target_server.publisher import Put, build_header, publish
from target_server.scheduler import Scheduler
from target_server.session import Batch, Session
from target_server.versions import Version

__all__ = ["Head", "Heads", "ReplicaServicer", "build_handler"]

SERVICE_NAME = target_pb2.DESCRIPTOR.services_by_name["TargetReplicaService"].full_name

# Of a HeadFrame's body; the contract allows 4 MiB.
_HEAD_FRAME_BYTES = 2 << 20
# Header and framing of a unary answer beside its body.
_HEADER_ROOM_BYTES = 64 << 10

_Context = grpc.aio.ServicerContext[Any, Any]
_T = TypeVar("_T")


class Heads(Protocol):
    """What the servicer needs of `head.HeadStore`; it blocks."""

    def open(self, wanted: target_pb2.TargetVersion) -> Head: ...  # noqa: D102


class Head(Protocol):
    """What the servicer needs of `head.HeadOfVersion`; `read` blocks."""

    def describe(self) -> target_pb2.HeadDescription: ...  # noqa: D102

    def read(self, tensor_index: int, offset_bytes: int, size_bytes: int) -> memoryview: ...  # noqa: D102


class ReplicaServicer:
    """The RPCs of one replica."""

    def __init__(
        self,
        *,
        served: ServedTarget,
        scheduler: Scheduler,
        heads: Heads,
        config: ServerConfig,
        metrics: ReplicaMetrics,
        handover: Handover,
        replica_index: int,
    ) -> None:
        self._metrics = metrics
        self._served = served
        self._scheduler = scheduler
        self._heads = heads
        self._config = config
        self._handover = handover
        self._replica_index = replica_index
        self._session_keys = itertools.count(1)
        self._refusal: WireError | None = None

    def refuse_new(self, error: WireError, *, at_once: bool = False) -> None:
        """Answers every later call with this error, and ends open streams with it.

        Args:
            error: why.
            at_once: don't wait for what runs; else a stream ends when what runs for it was sent.
        """
        self._refusal = error
        self._scheduler.refuse_new(error, at_once=at_once)

    def serve_version(self, version: Version) -> None:
        """Tells later sessions and callers that this version is served now; batches say their own."""
        self._served = dataclasses.replace(self._served, version_number=version.number, version_digest=version.digest)

    @maps_errors
    async def stream_hidden_states(self, _requests: object, context: _Context) -> None:
        """StreamHiddenStates."""
        session = await self._open(context)
        reader = asyncio.create_task(_read(session, context))
        writer = asyncio.create_task(self._write(session, context))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in (reader, writer):
                task.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
            self._scheduler.remove(session)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result

    @maps_errors
    async def capture_hidden_states(
        self, request: target_pb2.CaptureHiddenStatesRequest, _context: _Context
    ) -> target_pb2.CaptureHiddenStatesResponse:
        """CaptureHiddenStates: a session of one batch whose credit is exactly that batch."""
        self._check_taking()
        session = self._new_session(self._unary_terms(request))
        self._scheduler.add(session)
        try:
            session.ledger.grant(session.terms.window_bytes)
            request.batch.request_id = 0
            session.take(target_pb2.StreamHiddenStatesRequest(batch_request=request.batch))
            outgoing = await _before(
                session.next_outgoing(), self._config.deadlines.forward_timeout_s, "the batch's turn and its forward"
            )
            return self._unary_answer(session, outgoing)
        finally:
            self._scheduler.remove(session)

    @maps_errors
    async def fetch_head(self, request: target_pb2.FetchHeadRequest, context: _Context) -> None:
        """FetchHead."""
        self._check_taking()
        head = await asyncio.to_thread(self._heads.open, request.version)
        description = head.describe()
        await self._write_head(context, target_pb2.FetchHeadResponse(head=description))
        for index in range(len(description.tensors)):
            offset = 0
            while piece := await asyncio.to_thread(head.read, index, offset, _HEAD_FRAME_BYTES):
                frame = target_pb2.HeadFrame(
                    tensor_index=index, offset_bytes=offset, crc32c=crc32c(piece), body=bytes(piece)
                )
                offset += len(piece)
                await self._write_head(context, target_pb2.FetchHeadResponse(frame=frame))

    async def _write_head(self, context: _Context, message: target_pb2.FetchHeadResponse) -> None:
        await _before(
            context.write(message), self._config.deadlines.write_timeout_s, "the client to take a part of the head"
        )

    async def _open(self, context: _Context) -> Session:
        """Reads the first message and answers it."""
        message = await _before(
            context.read(), self._config.deadlines.open_timeout_s, "the stream's first message, which must be open"
        )
        self._check_taking()
        if message is grpc.aio.EOF or message.WhichOneof("message") != "open":
            raise WireError(
                Code.FAILED_PRECONDITION, Reason.SESSION_NOT_OPEN, "the stream's first message must be open"
            )
        terms = check_open(message.open, self._served)
        self._check_fits_slot(terms)
        session = self._new_session(terms)
        self._scheduler.add(session)
        try:
            answer = self._opened(session, shared_memory=message.open.shared_memory)
            await _before(
                context.write(answer.SerializeToString()),
                self._config.deadlines.write_timeout_s,
                "the client to take the answer to open",
            )
        except BaseException:
            self._scheduler.remove(session)
            raise
        return session

    async def _write(self, session: Session, context: _Context) -> None:
        """Sends what the outbox holds until its end."""

        async def write(message: bytes) -> None:
            await _before(
                context.write(message), self._config.deadlines.write_timeout_s, "the client to take a message"
            )

        while (outgoing := await session.next_outgoing()) is not None:
            if isinstance(outgoing, WireError):
                raise outgoing
            if isinstance(outgoing, Batch):
                await self._send_batch(session, outgoing, write)
            else:
                if outgoing.batch_failed.reason != Reason.CANCELLED:
                    self._metrics.failed()
                await write(outgoing.SerializeToString())

    async def _send_batch(self, session: Session, batch: Batch, write: Any) -> None:
        assert batch.slot is not None
        if not session.begin_sending(batch):
            self._scheduler.release(batch.slot)
            return
        try:
            frame_bytes, put = self._body_way(session)
            await publish(
                batch, self._served, write, replica_index=self._replica_index, frame_bytes=frame_bytes, put=put
            )
        finally:
            self._scheduler.release(batch.slot)
        session.sent(batch)
        self._count(batch)

    def _body_way(self, session: Session) -> tuple[int, Put | None]:
        """Returns the size of frames, and what takes their bodies where that is not the stream."""
        buffer, frame_bytes = session.shared_buffer, self._config.buffers.frame_bytes
        if buffer is None or not buffer.attached:
            return frame_bytes, None

        async def put(body: memoryview) -> int:
            timeout_s = self._config.deadlines.write_timeout_s
            return await _before(buffer.put(body), timeout_s, "the client to make room in its shared buffer")

        return min(frame_bytes, buffer.largest_body_bytes), put

    def _count(self, batch: Batch) -> None:
        self._metrics.sent(
            batch.times,
            token_count=batch.token_count,
            payload_bytes=batch.payload_bytes,
            finite=batch.finite,
        )

    def _opened(self, session: Session, *, shared_memory: bool) -> target_pb2.StreamHiddenStatesResponse:
        opened = target_pb2.Opened(
            replica_index=self._replica_index,
            version=self._version(),
            bytes_per_token=session.terms.bytes_per_token,
            dtype=target_pb2.Dtype.ValueType(session.terms.dtype.number),
        )
        if shared_memory and (offered := self._handover.offer(session.terms)) is not None:
            session.shared_buffer, offer = offered
            opened.shared_buffer.CopyFrom(offer)
        return target_pb2.StreamHiddenStatesResponse(opened=opened)

    def _new_session(self, terms: SessionTerms) -> Session:
        self._scheduler.check_room()
        return Session(
            next(self._session_keys),
            terms,
            self._served,
            max_outstanding_request_count=self._config.limits.max_outstanding_request_count,
            on_change=self._scheduler.wake,
        )

    def _unary_terms(self, request: target_pb2.CaptureHiddenStatesRequest) -> SessionTerms:
        taps = check_taps(request.taps, self._served)
        token_count = check_batch_request(request.batch, self._served)
        bytes_per_token = row_bytes(tap_count=len(taps), hidden_size=self._served.hidden_size, dtype=self._served.dtype)
        payload_bytes = token_count * bytes_per_token
        if payload_bytes > MAX_MESSAGE_BYTES - _HEADER_ROOM_BYTES:
            raise WireError(
                Code.RESOURCE_EXHAUSTED,
                Reason.BATCH_TOO_LARGE,
                f"a batch of {token_count} tokens is {payload_bytes} bytes and does not fit one message of "
                f"{MAX_MESSAGE_BYTES}; use StreamHiddenStates",
            )
        terms = SessionTerms(taps, self._served.dtype, bytes_per_token, token_count, payload_bytes, "unary")
        self._check_fits_slot(terms)
        return terms

    def _unary_answer(self, session: Session, outgoing: object) -> target_pb2.CaptureHiddenStatesResponse:
        if isinstance(outgoing, WireError):
            raise outgoing
        if isinstance(outgoing, target_pb2.StreamHiddenStatesResponse):
            failed = outgoing.batch_failed
            raise WireError(Code(failed.code), Reason(failed.reason), failed.detail)
        assert isinstance(outgoing, Batch)
        assert outgoing.slot is not None
        # The slot stays READY, so that closing the session gives it back.
        body = bytes(outgoing.slot.view[: outgoing.payload_bytes])
        header = build_header(outgoing, self._served, replica_index=self._replica_index, frame_count=0)
        outgoing.times.sending = time.monotonic()
        self._count(outgoing)
        return target_pb2.CaptureHiddenStatesResponse(header=header, crc32c=crc32c(body), body=body)

    def _check_taking(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _check_fits_slot(self, terms: SessionTerms) -> None:
        largest = terms.max_batch_token_count * terms.bytes_per_token
        if largest > self._scheduler.slot_bytes:
            fitting = self._scheduler.slot_bytes // terms.bytes_per_token
            raise WireError(
                Code.INVALID_ARGUMENT,
                Reason.BATCH_TOO_LARGE,
                f"max_batch_token_count {terms.max_batch_token_count} with {len(terms.taps)} taps is {largest} bytes; "
                f"a host slot of this server takes {fitting} tokens: ask for that or raise limits.max_tap_count there",
            )

    def _version(self) -> target_pb2.TargetVersion:
        return target_pb2.TargetVersion(number=self._served.version_number, digest=self._served.version_digest)


def build_handler(servicer: ReplicaServicer) -> grpc.GenericRpcHandler:
    """Returns the service for `grpc.aio.Server.add_generic_rpc_handlers`."""
    return grpc.method_handlers_generic_handler(
        SERVICE_NAME,
        {
            "StreamHiddenStates": grpc.stream_stream_rpc_method_handler(
                servicer.stream_hidden_states,
                request_deserializer=target_pb2.StreamHiddenStatesRequest.FromString,
            ),
            "CaptureHiddenStates": grpc.unary_unary_rpc_method_handler(
                servicer.capture_hidden_states,
                request_deserializer=target_pb2.CaptureHiddenStatesRequest.FromString,
                response_serializer=target_pb2.CaptureHiddenStatesResponse.SerializeToString,
            ),
            "FetchHead": grpc.unary_stream_rpc_method_handler(
                servicer.fetch_head,
                request_deserializer=target_pb2.FetchHeadRequest.FromString,
                response_serializer=target_pb2.FetchHeadResponse.SerializeToString,
            ),
        },
    )


async def _read(session: Session, context: _Context) -> None:
    """Feeds the client's messages to the session until it closes its side."""
    while (message := await context.read()) is not grpc.aio.EOF:
        session.take(message)
        await session.wait_for_room()
    session.end_requests()


async def _before(awaitable: Awaitable[_T], timeout_s: float, what: str) -> _T:
    """Awaits with a deadline.

    Raises:
        WireError: STALLED, saying what was waited for.
    """
    try:
        # Not wait_for: before Python 3.12 that loses a cancellation which meets the result, and the task lives on.
        async with asyncio.timeout(timeout_s):
            return await awaitable
    except TimeoutError as error:
        raise WireError(
            Code.DEADLINE_EXCEEDED, Reason.STALLED, f"waited {timeout_s:.0f} s for {what}; open another stream"
        ) from error
