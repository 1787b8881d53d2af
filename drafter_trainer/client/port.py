"""Messages between the trainer and its receiver process, over a socket pair.

A message is a length-prefixed JSON object followed by raw bytes (token ids). Trainer to receiver: ``setup``,
``submit``, ``stop``. Receiver to trainer: ``connected``, ``begun``, ``ready``, ``served``, ``alive``, ``failed``,
``replaced``. Both ends are ours and of one version, so there's nothing to negotiate; a malformed message is a bug and
raises.

Standard library only; the receiver imports this.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from typing import Any

PREFIX = struct.Struct("<II")  # bytes of the JSON header, bytes of the tail

Message = tuple[dict[str, Any], bytes]


def encode_message(header: dict[str, Any], tail: bytes = b"") -> bytes:
    """One message as bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((PREFIX.pack(len(text), len(tail)), text, tail))


class PortClosedError(ConnectionError):
    """The other process is gone."""


class TrainerPort:
    """The trainer's end: blocking, with deadlines. Used by one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()

    def send(self, header: dict[str, Any], tail: bytes = b"", *, timeout_s: float = 30.0) -> None:
        """Sends one message.

        Raises:
            PortClosedError: The receiver is gone, or has not read for ``timeout_s`` seconds.
        """
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(encode_message(header, tail))
        except (OSError, TimeoutError) as error:
            raise PortClosedError(f"receiver process does not read: {error}") from error

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None when none has come within ``timeout_s`` seconds.

        Raises:
            PortClosedError: The receiver is gone.
        """
        deadline = time.monotonic() + timeout_s
        while (message := self._pop()) is None:
            # 0 would mean non-blocking: an expired deadline still takes what is already there.
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-4))
            if not self._fill():
                return None
        return message

    def close(self) -> None:
        """Closes the socket; the receiver takes that as `stop`."""
        self._socket.close()

    def _fill(self) -> bool:
        try:
            piece = self._socket.recv(1 << 16)
        except TimeoutError:
            return False
        except OSError as error:
            raise PortClosedError(f"receiver process is gone: {error}") from error
        if not piece:
            raise PortClosedError("receiver process is gone")
        self._buffer += piece
        return True

    def _pop(self) -> Message | None:
        if len(self._buffer) < PREFIX.size:
            return None
        header_bytes, tail_bytes = PREFIX.unpack_from(self._buffer)
        end = PREFIX.size + header_bytes + tail_bytes
        if len(self._buffer) < end:
            return None
        header = json.loads(self._buffer[PREFIX.size : PREFIX.size + header_bytes])
        tail = bytes(self._buffer[PREFIX.size + header_bytes : end])
        del self._buffer[:end]
        return header, tail


class ReceiverPort:
    """The receiver's end: asyncio; sending never blocks the loop (the trainer reads, or the receiver ends)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> ReceiverPort:
        """Takes over a connected socket."""
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer)

    async def receive(self) -> Message | None:
        """The next message; None when the trainer is gone. Waits without a deadline: ends with the trainer."""
        try:
            header_bytes, tail_bytes = PREFIX.unpack(await self._reader.readexactly(PREFIX.size))
            header = json.loads(await self._reader.readexactly(header_bytes))
            return header, await self._reader.readexactly(tail_bytes)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def send(self, header: dict[str, Any], tail: bytes = b"") -> None:
        """Queues one message; drops it when the trainer is gone."""
        if not self._writer.is_closing():
            self._writer.write(encode_message(header, tail))

    async def close(self) -> None:
        """Sends what is queued and closes the socket."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return  # the trainer is gone: nobody is left to tell
