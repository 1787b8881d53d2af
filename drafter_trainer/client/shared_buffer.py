"""The client's end of a session's shared buffer: fetched from a server on this host, read, never written.

The server writes bodies into memory of its own; this process copies each one out and then gives its bytes back
(`target_wire.shared_buffer`). So no server, late or broken, can reach a slot of the ring. What is fetched is only used
when it can't shrink under this process, and positions are checked before anything is read.

The receiver imports this: no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
import sys

from target_wire.shared_buffer import BufferReader
from target_wire.v1 import target_pb2 as pb

_REASON_BYTES = 1024
# Longer than a server needs for a buffer; shorter than anybody would notice.
FETCH_TIMEOUT_S = 5.0


class NoSharedMemoryError(Exception):
    """Bodies come on the stream; the message says why."""


class AttachedBuffer:
    """A buffer that is mapped here.

    Args:
        memory: A read-only map; closed with the buffer.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._reader = BufferReader(len(memory))

    def body(self, frame: pb.SharedFrame) -> memoryview:
        """The bytes of a frame; to be copied before ``copied``.

        Raises:
            WireError: It isn't where it must be.
        """
        start = self._reader.find(frame.position_bytes, frame.size_bytes)
        return self._view[start : start + frame.size_bytes]

    def close(self) -> None:
        """Lets go of the memory; it stays mapped under a body that somebody still holds."""
        with contextlib.suppress(BufferError):
            self._view.release()
            self._memory.close()

    def copied(self, frame: pb.SharedFrame) -> pb.StreamHiddenStatesRequest | None:
        """Gives a frame's bytes back; returns what is to be sent now, None when it can wait."""
        released_bytes = self._reader.copied(frame.position_bytes, frame.size_bytes)
        if released_bytes is None:
            return None
        return pb.StreamHiddenStatesRequest(
            shared_buffer_released=pb.SharedBufferReleased(released_bytes=released_bytes)
        )


async def fetch(opened: pb.Opened) -> AttachedBuffer:
    """Takes up a server's offer, without holding up the event loop.

    Raises:
        NoSharedMemoryError: There is none, or it can't be had.
    """
    if not opened.HasField("shared_buffer"):
        raise NoSharedMemoryError("the server offers none")
    return await asyncio.to_thread(_fetch, opened.shared_buffer)


def wanted_here() -> bool:
    """Whether this machine knows such memory."""
    return sys.platform == "linux"


def _fetch(offer: pb.SharedBufferOffer) -> AttachedBuffer:
    descriptor = _receive_descriptor(offer)
    try:
        return AttachedBuffer(_map(descriptor, offer.size_bytes))
    except (OSError, ValueError) as error:
        raise NoSharedMemoryError(f"it can't be mapped: {error}") from error
    finally:
        os.close(descriptor)


def _receive_descriptor(offer: pb.SharedBufferOffer) -> int:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(FETCH_TIMEOUT_S)
            connection.connect(f"\0{offer.socket_name}")
            connection.send(offer.token.encode())
            text, descriptors, _, _ = socket.recv_fds(connection, _REASON_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionRefusedError as error:
        raise NoSharedMemoryError("the replica is on another host, or in another network namespace") from error
    except (OSError, ValueError) as error:
        raise NoSharedMemoryError(f"its descriptor can't be fetched: {error or type(error).__name__}") from error
    if not descriptors:
        raise NoSharedMemoryError(text.decode(errors="replace") or "the server has hung up")
    return descriptors[0]


def _map(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Maps the memory for reading.

    Raises:
        ValueError: It hasn't the size offered, or could be cut short while it's read, which would end this process.
    """
    if os.fstat(descriptor).st_size != size_bytes:
        raise ValueError(f"{os.fstat(descriptor).st_size} bytes where {size_bytes} were offered")
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("it is not sealed against shrinking")
    return mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)
