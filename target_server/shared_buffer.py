"""A session's shared buffer: bodies on their way to a client on the same host, without the network between.

    offered --the client fetches the descriptor--> provided --the client says it is mapped--> attached

Only an attached buffer is used. Bytes that were put belong to the client until it releases them
(`target_wire.shared_buffer`), so a client that stalls or dies holds its own buffer and nothing else; closing the
session gives the memory back whatever the client still maps. Runs on the event loop alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from target_wire.shared_buffer import BufferSpace, invalid, largest_body
from target_wire.v1 import target_pb2

from target_server.shared_memory import SharedMemory

__all__ = ["SharedBuffer", "hear"]


class SharedBuffer:
    """The buffer of one session.

    Attributes:
        size_bytes: of the memory.
        attached: whether bodies go through it.
        closed: whether its session has ended.
    """

    def __init__(self, size_bytes: int, *, on_close: Callable[[], None]) -> None:
        """Offers a buffer; it has no memory yet.

        Args:
            size_bytes: of the memory, whole pages.
            on_close: called once when the session ends.
        """
        self.size_bytes = size_bytes
        self.attached = False
        self.closed = False
        self._on_close = on_close
        self._memory: SharedMemory | None = None
        self._space = BufferSpace(size_bytes)
        self._room = asyncio.Event()

    @property
    def largest_body_bytes(self) -> int:
        """The most bytes of one body."""
        return largest_body(self.size_bytes)

    def provide(self, memory: SharedMemory) -> None:
        """Gives it the memory that its client has just been sent; the buffer closes it."""
        assert self._memory is None
        assert not self.closed
        self._memory = memory

    def attach(self) -> None:
        """Notes that the client has mapped the memory.

        Raises:
            WireError: SHARED_BUFFER_INVALID, when it can't have, or has said so before.
        """
        if self._memory is None or self.attached:
            raise invalid("shared_buffer_attached was sent twice, or before the buffer was fetched")
        self.attached = True

    def release(self, released_bytes: int) -> None:
        """Takes back what the client has copied out; raises as `BufferSpace.release`."""
        self._space.release(released_bytes)
        self._room.set()

    async def put(self, body: memoryview) -> int:
        """Copies a body into the buffer; waits for the client to make room.

        Args:
            body: at most `largest_body_bytes`; free for reuse on return.

        Returns:
            Its position.
        """
        while (position := self._space.place(body.nbytes)) is None:
            self._room.clear()
            await self._room.wait()
        assert self._memory is not None
        start = position % self.size_bytes
        self._memory.view[start : start + body.nbytes] = body
        return position

    def close(self) -> None:
        """Gives the memory back; nothing is put any more."""
        if self.closed:
            return
        self.closed = True
        self.attached = False
        self._on_close()
        if self._memory is not None:
            self._memory.close()

    def snapshot(self) -> dict[str, int]:
        """Returns the account for tests and logs."""
        return self._space.snapshot()


def hear(buffer: SharedBuffer | None, message: target_pb2.StreamHiddenStatesRequest) -> None:
    """Acts on a client's message about its buffer.

    Args:
        buffer: the session's; None when it was offered none.
        message: with shared_buffer_attached or shared_buffer_released set.

    Raises:
        WireError: SHARED_BUFFER_INVALID.
    """
    if buffer is None:
        raise invalid("this session was offered no shared buffer; send nothing about one")
    if message.HasField("shared_buffer_attached"):
        buffer.attach()
    else:
        buffer.release(message.shared_buffer_released.released_bytes)
