"""A small honest client of a replica's data stream: opens, grants, asks, checks every frame against its header.

Synchronous and unbuffered: each call reads only as many messages as it needs, so a test can stall exactly where it
wants to. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import grpc
import torch
from crc32c import crc32c
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from target_wire.channel import channel_options
from target_wire.codec import tensor_from_buffer
from target_wire.framing import BatchFrameView, decode_response
from target_wire.messages import spec_from_message
from target_wire.spec import PROTOCOL_VERSION
from target_wire.v1 import target_pb2 as pb
from target_wire.v1 import target_pb2_grpc

from drafter_trainer.client.shared_buffer import AttachedBuffer, fetch

DEADLINE_S = 60.0
_METHOD = "/target_wire.v1.TargetReplicaService/StreamHiddenStates"


@dataclass(frozen=True)
class ReceivedBatch:
    """A batch whose frames were all checked.

    Attributes:
        header: what described it.
        rows_TLD: its rows.
    """

    header: pb.BatchHeader
    rows_TLD: torch.Tensor


class StreamClient:
    """One stream to one replica."""

    def __init__(self, address: str, *, deadline_s: float = DEADLINE_S) -> None:
        self._channel = grpc.insecure_channel(address, options=channel_options())
        self._outgoing: queue.SimpleQueue[pb.StreamHiddenStatesRequest | None] = queue.SimpleQueue()
        call = self._channel.stream_stream(
            _METHOD, request_serializer=pb.StreamHiddenStatesRequest.SerializeToString, response_deserializer=None
        )
        self.call = call(iter(self._outgoing.get, None), timeout=deadline_s)
        self._granted = 0
        self.buffer: AttachedBuffer | None = None

    def __enter__(self) -> StreamClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def open(
        self, taps: Sequence[int], *, max_batch_token_count: int = 64, window_bytes: int = 1 << 24, **fields: object
    ) -> pb.Opened:
        """Opens the session and returns the server's terms; with `shared_memory` it takes up what is offered."""
        fields = {"protocol_version": PROTOCOL_VERSION, **fields}
        self.send(
            open=pb.Open(taps=taps, max_batch_token_count=max_batch_token_count, window_bytes=window_bytes, **fields)
        )
        answer = self.read()
        assert isinstance(answer, pb.StreamHiddenStatesResponse)
        assert answer.WhichOneof("message") == "opened", answer
        assert fields.get("shared_memory") or not answer.opened.HasField("shared_buffer")
        if answer.opened.HasField("shared_buffer"):
            self.buffer = asyncio.run(fetch(answer.opened))
            self.send(shared_buffer_attached=pb.SharedBufferAttached())
        return answer.opened

    def grant(self, more_bytes: int) -> None:
        """Grants this many bytes on top of what was granted before."""
        self._granted += more_bytes
        self.send(credit=pb.Credit(granted_bytes=self._granted))

    def request(self, request_id: int, sequences: Sequence[Sequence[int]]) -> None:
        """Asks for one batch."""
        self.send(
            batch_request=pb.BatchRequest(
                request_id=request_id,
                sequence_lengths=[len(ids) for ids in sequences],
                token_ids=[token for ids in sequences for token in ids],
            )
        )

    def send(self, **message: object) -> None:
        """Sends any message."""
        self._outgoing.put(pb.StreamHiddenStatesRequest(**message))

    def end_requests(self) -> None:
        """Closes this side of the stream."""
        self._outgoing.put(None)

    def read(self) -> BatchFrameView | pb.StreamHiddenStatesResponse | None:
        """Returns the next message; None at the stream's end. Raises grpc.RpcError when it failed."""
        try:
            return decode_response(next(self.call))
        except StopIteration:
            return None

    def receive(self) -> ReceivedBatch | pb.BatchFailed:
        """Returns the next whole answer."""
        message = self.read()
        assert isinstance(message, pb.StreamHiddenStatesResponse), message
        if message.WhichOneof("message") == "batch_failed":
            return message.batch_failed
        return self.receive_body(message.batch_header)

    def receive_batch(self) -> ReceivedBatch:
        """Returns the next answer, which must be a batch."""
        answer = self.receive()
        assert isinstance(answer, ReceivedBatch), answer
        return answer

    def receive_body(self, header: pb.BatchHeader) -> ReceivedBatch:
        """Returns the batch whose header was just read."""
        spec = spec_from_message(header.tensor)
        assert spec.nbytes == header.payload_bytes
        body = bytearray()
        for _ in range(header.frame_count):
            body += self.receive_frame(header.request_id, len(body))
        assert len(body) == header.payload_bytes
        return ReceivedBatch(header, tensor_from_buffer(body, spec.dtype, spec.shape))

    def receive_frame(self, request_id: int, offset_bytes: int) -> bytes:
        """Returns the next frame's body, whichever way it comes."""
        message = self.read()
        frame = message if isinstance(message, BatchFrameView) else message.shared_frame
        assert (frame.request_id, frame.offset_bytes) == (request_id, offset_bytes)
        if isinstance(frame, BatchFrameView):
            assert self.buffer is None
            body = bytes(frame.body)
        else:
            assert self.buffer is not None
            body = bytes(self.buffer.body(frame))
            if (release := self.buffer.copied(frame)) is not None:
                self._outgoing.put(release)
        assert frame.crc32c == crc32c(body)
        return body

    def close(self) -> None:
        """Cancels the stream and closes the channel."""
        if self.buffer is not None:
            self.buffer.close()
        self._outgoing.put(None)
        self.call.cancel()
        self._channel.close()


def capture(address: str, taps: Sequence[int], sequences: Sequence[Sequence[int]]) -> pb.CaptureHiddenStatesResponse:
    """Asks for one batch without a session."""
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        return target_pb2_grpc.TargetReplicaServiceStub(channel).CaptureHiddenStates(
            pb.CaptureHiddenStatesRequest(
                taps=taps,
                batch=pb.BatchRequest(
                    sequence_lengths=[len(ids) for ids in sequences],
                    token_ids=[token for ids in sequences for token in ids],
                ),
            ),
            timeout=DEADLINE_S,
        )


def fetch_head(address: str, **version: object) -> tuple[pb.HeadDescription, dict[str, torch.Tensor]]:
    """Fetches the head and checks its frames."""
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        stub = target_pb2_grpc.TargetReplicaServiceStub(channel)
        answers = stub.FetchHead(pb.FetchHeadRequest(version=pb.TargetVersion(**version)), timeout=DEADLINE_S)
        head = next(answers).head
        return head, dict(_head_tensors(head, answers))


def _head_tensors(
    head: pb.HeadDescription, answers: Iterator[pb.FetchHeadResponse]
) -> Iterator[tuple[str, torch.Tensor]]:
    bodies = [bytearray() for _ in head.tensors]
    for answer in answers:
        frame = answer.frame
        assert frame.offset_bytes == len(bodies[frame.tensor_index])
        assert frame.crc32c == crc32c(frame.body)
        bodies[frame.tensor_index] += frame.body
    for message, body in zip(head.tensors, bodies, strict=True):
        spec = spec_from_message(message)
        yield spec.name, tensor_from_buffer(body, spec.dtype, spec.shape)


def reason_of(error: grpc.RpcError) -> str:
    """Returns the reason of a failed call's ErrorInfo."""
    assert isinstance(error, grpc.Call)
    status = rpc_status.from_call(error)
    assert status is not None, error
    detail = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(detail)
    assert detail.domain == "target_wire"
    return str(detail.reason)
