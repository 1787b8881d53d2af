"""Gives clients on this host the memory of their session's shared buffer.

A session's offer names a Unix socket and a token. Who reaches the socket is on this host; who has the token is the
session's client, since only its stream was told. The descriptor goes through the socket, so there is no file, no name
and no permission to be left behind or to get wrong. Memory is only made for a client that has got here. Anything that
fails leaves that session with bodies on its stream, and is said once in the log and in the replica's status. Runs on
the event loop alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys

from target_wire.checks import SessionTerms
from target_wire.v1 import target_pb2

from target_server.shared_buffer import SharedBuffer
from target_server.shared_memory import SharedMemory, round_up_to_page

__all__ = ["Handover"]

_log = logging.getLogger(__name__)

_TOKEN_BYTES = 16
_TOKEN_WAIT_S = 5.0
# Clients that have connected and not yet been answered; more wait, or go without.
_CLIENTS = 64
# Before connections are taken again after there were no descriptors for one.
_PAUSE_S = 1.0


class Handover:
    """The offers of one replica and the socket where they are taken up.

    Args:
        buffer_bytes: the most memory of one session; 0: nothing is ever offered.

    Attributes:
        problem: why a session that asked for shared memory was last denied it; empty when none was.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self.problem = ""
        self._buffer_bytes = buffer_bytes
        self._name = f"target-server-{secrets.token_hex(8)}"
        self._listener: socket.socket | None = None
        self._buffers: set[SharedBuffer] = set()
        self._waiting: dict[str, SharedBuffer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def attached_count(self) -> int:
        """Sessions whose bodies go through shared memory now."""
        return sum(buffer.attached for buffer in self._buffers)

    def offer(self, terms: SessionTerms) -> tuple[SharedBuffer, target_pb2.SharedBufferOffer] | None:
        """Returns a buffer for a session that asked for one, and what its client is told; None when there is none."""
        if not self._buffer_bytes:
            return None
        size_bytes = round_up_to_page(min(terms.window_bytes, self._buffer_bytes))
        token = secrets.token_hex(_TOKEN_BYTES)
        buffer = SharedBuffer(size_bytes, on_close=lambda: self._forget(token, buffer))
        if terms.bytes_per_token > buffer.largest_body_bytes:
            self._deny(
                f"a row of {terms.bytes_per_token} bytes is more than a quarter of {size_bytes} bytes; raise "
                "buffers.shared_memory_bytes here or the client's window"
            )
            return None
        if not self._listen():
            return None
        self._buffers.add(buffer)
        self._waiting[token] = buffer
        return buffer, target_pb2.SharedBufferOffer(socket_name=self._name, token=token, size_bytes=size_bytes)

    def close(self) -> None:
        """Takes no more clients; buffers live as long as their sessions."""
        for task in self._tasks:
            task.cancel()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        self._buffer_bytes = 0

    def _listen(self) -> bool:
        """Opens the socket when it is first needed; returns whether it is open."""
        if self._listener is not None:
            return True
        if sys.platform != "linux":
            return False
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            self._deny(f"no Unix socket can be opened: {error}")
            return False
        try:
            listener.setblocking(False)
            listener.bind(f"\0{self._name}")
            listener.listen(_CLIENTS)
        except OSError as error:
            listener.close()
            self._deny(f"no Unix socket can be opened: {error}")
            return False
        self._listener = listener
        self._watch()
        return True

    def _watch(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has gone again
        except OSError as error:
            # Out of descriptors: the socket stays readable, and would keep the loop busy.
            self._deny(f"no connection can be taken: {error}")
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(_PAUSE_S, self._watch)
            return
        connection.setblocking(False)
        if len(self._tasks) >= _CLIENTS:
            connection.close()
            return
        task = asyncio.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                async with asyncio.timeout(_TOKEN_WAIT_S):
                    token = await asyncio.get_running_loop().sock_recv(connection, 4 * _TOKEN_BYTES)
                # Each token is good for one answer.
                await self._hand_over(connection, self._waiting.pop(token.decode("ascii", "replace"), None))
            except (OSError, TimeoutError):
                return  # the client has gone, or finds out by itself

    async def _hand_over(self, connection: socket.socket, buffer: SharedBuffer | None) -> None:
        if buffer is None:
            connection.send(b"no session of this replica waits with this token")
            return
        try:
            memory, descriptor = await asyncio.to_thread(_make_memory, buffer.size_bytes)
        except OSError as error:
            self._deny(f"no {buffer.size_bytes} bytes of shared memory: {error.strerror or error}")
            connection.send(self.problem.encode())
            return
        try:
            if buffer.closed:
                memory.close()
            else:
                buffer.provide(memory)
                socket.send_fds(connection, [b"\0"], [descriptor])
        finally:
            os.close(descriptor)

    def _deny(self, problem: str) -> None:
        if problem != self.problem:
            _log.warning("hidden states go over the stream: %s", problem)
        self.problem = problem

    def _forget(self, token: str, buffer: SharedBuffer) -> None:
        self._waiting.pop(token, None)
        self._buffers.discard(buffer)


def _make_memory(size_bytes: int) -> tuple[SharedMemory, int]:
    """Returns memory and a descriptor to read it by; blocks for milliseconds."""
    memory = SharedMemory(size_bytes)
    try:
        return memory, memory.reader_descriptor()
    except OSError:
        memory.close()
        raise
