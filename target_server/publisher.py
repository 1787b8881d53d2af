"""A captured batch onto the wire: its header, then frames cut at token rows out of its host slot.

The body is copied once, into the message that gRPC takes or into the session's shared buffer; there is no protobuf on
it. Credit is spent before a frame is handed over, because the client may grant anew the moment it has received it.
It must never read a slot that it was not handed, and the caller may release the slot when `publish` has returned or
raised.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from crc32c import crc32c
from target_wire.checks import ServedTarget
from target_wire.framing import encode_batch_frame, plan_frames
from target_wire.messages import spec_to_message
from target_wire.spec import HIDDEN_STATES, TensorSpec
from target_wire.v1 import target_pb2

from target_server.session import Batch

__all__ = ["Put", "build_header", "publish"]

# Copies a body into the session's shared buffer, waiting for room, and returns its position there.
Put = Callable[[memoryview], Awaitable[int]]


def build_header(batch: Batch, served: ServedTarget, *, replica_index: int, frame_count: int) -> target_pb2.BatchHeader:
    """Returns what describes a captured batch."""
    taps = batch.session.terms.taps
    spec = TensorSpec(HIDDEN_STATES, served.dtype, (batch.token_count, len(taps), served.hidden_size))
    assert spec.nbytes == batch.payload_bytes, (spec, batch.payload_bytes)
    assert batch.version is not None
    return target_pb2.BatchHeader(
        request_id=batch.request_id,
        # Not the one served now: a swap may have come between this batch and its sending.
        version=batch.version.to_message(),
        tensor=spec_to_message(spec),
        payload_bytes=batch.payload_bytes,
        frame_count=frame_count,
        finite=batch.finite,
        replica_index=replica_index,
    )


async def publish(
    batch: Batch,
    served: ServedTarget,
    write: Callable[[bytes], Awaitable[None]],
    *,
    replica_index: int,
    frame_bytes: int,
    put: Put | None = None,
) -> None:
    """Sends a batch whose slot the caller owns.

    Args:
        batch: in stage SENDING.
        served: the target's shape and type.
        write: hands one message to the transport and returns when that has taken it.
        replica_index: which replica this is.
        frame_bytes: aim for the size of a frame's body.
        put: takes the bodies; None: they go with their frames.
    """
    assert batch.slot is not None
    ledger = batch.session.ledger
    frames = plan_frames(batch.payload_bytes, batch.session.terms.bytes_per_token, frame_bytes)
    header = build_header(batch, served, replica_index=replica_index, frame_count=len(frames))
    await write(target_pb2.StreamHiddenStatesResponse(batch_header=header).SerializeToString())
    for offset, size in frames:
        body = batch.slot.view[offset : offset + size]
        checksum = crc32c(body)
        if put is None:
            message = encode_batch_frame(batch.request_id, offset, checksum, body)
        else:
            message = _shared_frame(batch.request_id, offset, checksum, position=await put(body), size=size)
        ledger.spend(size)
        await write(message)


def _shared_frame(request_id: int, offset: int, checksum: int, *, position: int, size: int) -> bytes:
    frame = target_pb2.SharedFrame(
        request_id=request_id, offset_bytes=offset, crc32c=checksum, position_bytes=position, size_bytes=size
    )
    return target_pb2.StreamHiddenStatesResponse(shared_frame=frame).SerializeToString()
