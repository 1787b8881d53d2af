"""A target-server that misbehaves on request: real gRPC, no model.

Rows are a pure function of token ids, so a test knows what it must receive. Each request passes through a `Fault`,
which may change the messages that answer it. Front and replicas run in one thread on ports of their own; credit is
checked as a real server would. With `shared_memory` whatever frames a fault has made go to clients that want it through
the server's own shared buffer, so every fault can be had both ways.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any

import crc32c
import grpc
import numpy as np
from google.protobuf.message import DecodeError
from target_wire.channel import server_options
from target_wire.checks import SessionTerms
from target_wire.credits import CreditLedger
from target_wire.errors import FrameError, WireError
from target_wire.framing import BatchFrameView, decode_response, encode_batch_frame
from target_wire.spec import DType
from target_wire.v1 import target_pb2 as pb

from target_server.handover import Handover
from target_server.shared_buffer import SharedBuffer, hear

HIDDEN_SIZE = 16
LAYER_COUNT = 4
VOCAB_SIZE = 320
DIGEST = "0123456789abcdef" * 2
SERVICE = "target_wire.v1"


def expected_rows(token_ids: Sequence[int], taps: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows [tokens, taps * HIDDEN_SIZE] for these tokens."""
    columns = np.concatenate([np.arange(HIDDEN_SIZE) + 100 * tap for tap in taps])
    return (np.asarray(token_ids)[:, None] * 7 + columns).astype(np.float32)


class Abort(Exception):  # noqa: N818 - it is not an error but an instruction
    """Ends the stream, with this status or (None) as a dropped connection would."""

    def __init__(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, detail: str = "cut") -> None:
        self.code, self.detail = code, detail
        super().__init__(detail)


@dataclasses.dataclass
class Asked:
    """A request as a replica sees it."""

    replica: int
    request: pb.BatchRequest
    taps: tuple[int, ...]
    attempt: int
    """How often any replica was asked for these very tokens, from 1."""


# Gets the request and the true messages; returns the messages to send (None entries: sleep a moment).
Fault = Callable[[Asked, list[bytes]], "list[bytes] | AsyncIterator[bytes]"]


def honest(asked: Asked, messages: list[bytes]) -> list[bytes]:
    """No fault."""
    return messages


def true_messages(asked: Asked, *, frames: int = 3, finite: bool = True) -> list[bytes]:
    """Header and frames that answer a request rightly."""
    request, taps = asked.request, asked.taps
    rows = expected_rows(request.token_ids, taps)
    body = rows.tobytes()
    row_bytes = rows.shape[1] * 4
    count = min(frames, len(rows))
    cuts = [len(rows) * index // count * row_bytes for index in range(count + 1)]
    header = pb.BatchHeader(
        request_id=request.request_id,
        version=pb.TargetVersion(number=1, digest=DIGEST),
        tensor=pb.TensorSpec(name="hidden_states", dtype=pb.DTYPE_FLOAT32, shape=[len(rows), len(taps), HIDDEN_SIZE]),
        payload_bytes=len(body),
        frame_count=count,
        finite=finite,
        replica_index=asked.replica,
    )
    messages = [pb.StreamHiddenStatesResponse(batch_header=header).SerializeToString()]
    for start, stop in itertools.pairwise(cuts):
        piece = body[start:stop]
        messages.append(encode_batch_frame(request.request_id, start, crc32c.crc32c(piece), memoryview(piece)))
    return messages


def failed_message(asked: Asked, reason: str, code: int = 14) -> bytes:
    """A `batch_failed`."""
    failed = pb.BatchFailed(request_id=asked.request.request_id, code=code, reason=reason, detail="as the test asks")
    return pb.StreamHiddenStatesResponse(batch_failed=failed).SerializeToString()


def is_failed_message(message: bytes) -> bool:
    """Whether these bytes are a `batch_failed`; False for anything unreadable."""
    try:
        return pb.StreamHiddenStatesResponse.FromString(message).WhichOneof("message") == "batch_failed"
    except DecodeError:
        return False


class FakeTarget:
    """Runs in a thread while the context is open.

    Args:
        replicas: How many data endpoints.
        fault: What happens to each answer.
        advertise: How a replica's port is written in DescribeTarget.
        port: Of the front; 0 takes a free one.
        digest: Of the weights, as the front says.
        shared_memory: Whether it is offered; None takes the class's default.
    """

    SHARED_MEMORY_BYTES = 1 << 16
    shared_memory_by_default = False

    def __init__(
        self,
        *,
        replicas: int = 1,
        fault: Fault = honest,
        advertise: Callable[[int], str] = "127.0.0.1:{}".format,
        port: int = 0,
        digest: str = DIGEST,
        shared_memory: bool | None = None,
    ) -> None:
        offers = self.shared_memory_by_default if shared_memory is None else shared_memory
        self._handover = Handover(self.SHARED_MEMORY_BYTES if offers else 0)
        self.shared_fault: Callable[[pb.SharedFrame], None] = lambda _frame: None
        self.shared_frames = 0
        self._port = port
        self._digest = digest
        self.fault = fault
        self.address = ""
        self.asked: list[Asked] = []
        self.errors: list[str] = []
        self.opens: list[pb.Open] = []
        self._replicas = replicas
        self._advertise = advertise
        self._ports: list[int] = []
        self._attempts: dict[tuple[int, ...], int] = {}
        self._loop = asyncio.new_event_loop()
        self._servers: list[grpc.aio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeTarget:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def stop(self) -> None:
        """Front and replicas go away at once; what they have counted stays."""
        self._run(self._stop())

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self) -> None:
        for index in range(self._replicas):
            self._ports.append(await self._serve(self._replica_handler(index)))
        port = await self._serve(self._front_handler(), self._port)
        self.address = f"127.0.0.1:{port}"

    async def _serve(self, handler: grpc.GenericRpcHandler, port: int = 0) -> int:
        server = grpc.aio.server(options=server_options())
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        self._servers.append(server)
        return port

    async def _stop(self) -> None:
        self._handover.close()
        await asyncio.gather(*(server.stop(0) for server in self._servers))
        self._servers.clear()

    def _front_handler(self) -> grpc.GenericRpcHandler:
        async def describe(request: pb.DescribeTargetRequest, context: Any) -> pb.DescribeTargetResponse:
            return self.description()

        method = grpc.unary_unary_rpc_method_handler(
            describe,
            request_deserializer=pb.DescribeTargetRequest.FromString,
            response_serializer=pb.DescribeTargetResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(f"{SERVICE}.TargetFrontService", {"DescribeTarget": method})

    def description(self) -> pb.DescribeTargetResponse:
        """What the front says."""
        model = pb.TargetModel(
            architecture="Fake",
            model_type="fake",
            hidden_size=HIDDEN_SIZE,
            layer_count=LAYER_COUNT,
            vocab_size=VOCAB_SIZE,
            dtype=pb.DTYPE_FLOAT32,
        )
        replicas = [
            pb.Replica(index=index, address=self._advertise(port), port=port, state=pb.REPLICA_STATE_SERVING)
            for index, port in enumerate(self._ports)
        ]
        return pb.DescribeTargetResponse(
            protocol_version=1,
            model=model,
            version=pb.TargetVersion(number=1, digest=self._digest),
            replicas=replicas,
            max_batch_token_count=4096,
            max_sequence_token_count=4096,
        )

    def _replica_handler(self, index: int) -> grpc.GenericRpcHandler:
        async def stream(requests: AsyncIterator[pb.StreamHiddenStatesRequest], context: Any) -> AsyncIterator[bytes]:
            try:
                async for message in self._session(index, requests):
                    yield message
            except Abort as abort:
                await context.abort(abort.code, abort.detail)

        method = grpc.stream_stream_rpc_method_handler(
            stream, request_deserializer=pb.StreamHiddenStatesRequest.FromString, response_serializer=None
        )
        return grpc.method_handlers_generic_handler(f"{SERVICE}.TargetReplicaService", {"StreamHiddenStates": method})

    async def _session(self, index: int, requests: AsyncIterator[pb.StreamHiddenStatesRequest]) -> AsyncIterator[bytes]:
        opening = (await anext(requests)).open
        self.opens.append(opening)
        taps = tuple(opening.taps)
        row_bytes = len(taps) * HIDDEN_SIZE * 4
        opened = pb.StreamHiddenStatesResponse.FromString(opened_message(index, row_bytes))
        buffer = self._offer(opening, opened.opened)
        yield opened.SerializeToString()
        ledger = CreditLedger(opening.window_bytes)
        heard: asyncio.Queue[pb.StreamHiddenStatesRequest | None] = asyncio.Queue()
        hearing = asyncio.create_task(self._hear(requests, buffer, heard))
        try:
            while (message := await heard.get()) is not None:
                if message.WhichOneof("message") == "credit":
                    ledger.grant(message.credit.granted_bytes)
                    continue
                asked = self._note(index, message.batch_request, taps)
                size = len(asked.request.token_ids) * row_bytes
                if not ledger.reserve(size):
                    self.errors.append(f"request {asked.request.request_id} came without credit")
                    return
                answer = self.fault(asked, true_messages(asked))
                # As a real server: a request that fails gives its reservation back.
                failed = isinstance(answer, list) and is_failed_message(answer[0])
                (ledger.release if failed else ledger.spend)(size)
                async for piece in _each(answer):
                    yield await self._carried(piece, buffer)
        finally:
            hearing.cancel()
            if buffer is not None:
                buffer.close()

    def _offer(self, opening: pb.Open, opened: pb.Opened) -> SharedBuffer | None:
        row_bytes = opened.bytes_per_token
        terms = SessionTerms(tuple(opening.taps), DType.FLOAT32, row_bytes, 0, opening.window_bytes, "")
        offered = self._handover.offer(terms) if opening.shared_memory else None
        if offered is None:
            return None
        opened.shared_buffer.CopyFrom(offered[1])
        return offered[0]

    async def _hear(
        self,
        requests: AsyncIterator[pb.StreamHiddenStatesRequest],
        buffer: SharedBuffer | None,
        heard: asyncio.Queue[pb.StreamHiddenStatesRequest | None],
    ) -> None:
        """Acts on what concerns the buffer at once, and passes everything else on."""
        try:
            async for message in requests:
                if (message.WhichOneof("message") or "").startswith("shared_buffer"):
                    hear(buffer, message)
                else:
                    heard.put_nowait(message)
        except WireError as error:
            self.errors.append(str(error))
        finally:
            heard.put_nowait(None)

    async def _carried(self, piece: bytes, buffer: SharedBuffer | None) -> bytes:
        """Puts a frame's body into the buffer, where there is one and the body fits; returns what is sent."""
        if buffer is None or not buffer.attached:
            return piece
        try:
            frame = decode_response(piece)
        except FrameError:
            return piece
        if not isinstance(frame, BatchFrameView) or not 0 < len(frame.body) <= buffer.largest_body_bytes:
            return piece
        shared = pb.SharedFrame(
            request_id=frame.request_id,
            offset_bytes=frame.offset_bytes,
            crc32c=frame.crc32c,
            position_bytes=await buffer.put(frame.body),
            size_bytes=len(frame.body),
        )
        self.shared_fault(shared)
        self.shared_frames += 1
        return pb.StreamHiddenStatesResponse(shared_frame=shared).SerializeToString()

    def _note(self, index: int, request: pb.BatchRequest, taps: tuple[int, ...]) -> Asked:
        key = tuple(request.token_ids)
        self._attempts[key] = self._attempts.get(key, 0) + 1
        asked = Asked(index, request, taps, self._attempts[key])
        self.asked.append(asked)
        return asked


async def _each(answer: list[bytes] | AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if isinstance(answer, list):
        for piece in answer:
            yield piece
    else:
        async for piece in answer:
            yield piece


def opened_message(index: int, row_bytes: int) -> bytes:
    """The answer to `open`."""
    opened = pb.Opened(
        replica_index=index,
        version=pb.TargetVersion(number=1, digest=DIGEST),
        bytes_per_token=row_bytes,
        dtype=pb.DTYPE_FLOAT32,
    )
    return pb.StreamHiddenStatesResponse(opened=opened).SerializeToString()
