"""The client takes shared memory only where it can't be harmed by it, and says why it goes without."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from target_wire.errors import WireError
from target_wire.v1 import target_pb2 as pb

from drafter_trainer.client.shared_buffer import NoSharedMemoryError, fetch

SIZE = 1 << 16
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def memory(size_bytes: int = SIZE, *, seals: int = SEALS) -> int:
    """A descriptor of sealed memory whose bytes say where they are."""
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(descriptor, bytes(range(256)) * (size_bytes // 256))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@contextmanager
def server(text: bytes = b"\0", descriptor: int | None = None) -> Iterator[pb.Opened]:
    """Answers one client, then closes the descriptor; yields what the client was told before."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # any free abstract name
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(99) == b"token"
                if text:
                    socket.send_fds(connection, [text], [] if descriptor is None else [descriptor])

        thread = threading.Thread(target=answer)
        thread.start()
        name = listener.getsockname()[1:].decode()
        yield pb.Opened(shared_buffer=pb.SharedBufferOffer(socket_name=name, token="token", size_bytes=SIZE))
        thread.join(5)
        assert not thread.is_alive()
    if descriptor is not None:
        os.close(descriptor)


async def test_bodies_are_read_where_they_are_and_given_back_by_quarters() -> None:
    with server(descriptor=memory()) as opened:
        buffer = await fetch(opened)
    quarter = SIZE // 4
    sent = []
    for position in range(0, 3 * SIZE, quarter // 2):
        frame = pb.SharedFrame(position_bytes=position, size_bytes=quarter // 2)
        body = buffer.body(frame)
        assert body.readonly
        assert bytes(body[:256]) == bytes(range(256))
        sent.append(buffer.copied(frame))
    released = [message.shared_buffer_released.released_bytes for message in sent if message is not None]
    assert released == list(range(quarter, 3 * SIZE + 1, quarter))


@pytest.mark.parametrize(
    ("position", "size"),
    [(SIZE, 64), (-64, 64), (64, 64), (0, SIZE), (0, 0), (0, -1), (0, SIZE // 4 + 1), (1 << 62, 64), (0, 1 << 62)],
)
async def test_no_frame_makes_it_read_elsewhere(position: int, size: int) -> None:
    with server(descriptor=memory()) as opened:
        buffer = await fetch(opened)
    with pytest.raises(WireError):
        buffer.body(pb.SharedFrame(position_bytes=position, size_bytes=size))


@pytest.mark.parametrize(
    ("text", "made", "reason"),
    [
        (b"no memory left", None, "^no memory left$"),
        (b"", None, "the server has hung up"),
        (b"\0", lambda: memory(seals=0), "not sealed against shrinking"),
        (b"\0", lambda: memory(SIZE // 2), f"{SIZE // 2} bytes where {SIZE} were offered"),
        (b"\0", lambda: os.open(os.devnull, os.O_RDONLY), "it can't be mapped"),
    ],
    ids=["refused", "hung-up", "unsealed", "too-small", "no-memory"],
)
async def test_what_can_not_be_used_safely_is_left(text: bytes, made, reason: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with server(text, made and made()) as opened, pytest.raises(NoSharedMemoryError, match=reason):
        await fetch(opened)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_server_on_another_host_is_known_by_its_absent_socket() -> None:
    opened = pb.Opened(shared_buffer=pb.SharedBufferOffer(socket_name="no-such-socket", token="t", size_bytes=SIZE))
    with pytest.raises(NoSharedMemoryError, match="another host, or in another network namespace"):
        await fetch(opened)
    opened.shared_buffer.socket_name = "x" * 200
    with pytest.raises(NoSharedMemoryError, match="can't be fetched"):
        await fetch(opened)


async def test_an_older_server_offers_nothing() -> None:
    with pytest.raises(NoSharedMemoryError, match="the server offers none"):
        await fetch(pb.Opened())


async def test_memory_is_let_go_at_the_end() -> None:
    for held in (False, True):
        descriptor = memory()
        with server(descriptor=os.dup(descriptor)) as opened:
            buffer = await fetch(opened)
        body = buffer.body(pb.SharedFrame(size_bytes=256)) if held else None
        assert is_mapped(descriptor)
        buffer.close()
        assert is_mapped(descriptor) == held
        assert body is None or bytes(body) == bytes(range(256))
        os.close(descriptor)


def is_mapped(descriptor: int) -> bool:
    inode = os.fstat(descriptor).st_ino
    return any(f" {inode} " in line for line in Path("/proc/self/maps").read_text().splitlines())
