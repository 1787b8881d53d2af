"""A session's shared buffer on the server: who gets its memory, what is refused, and that all of it comes back (I2)."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import mmap
import os
import re
import socket
from collections.abc import AsyncIterator

import pytest
from target_wire.checks import SessionTerms
from target_wire.errors import Reason, WireError
from target_wire.spec import DType
from target_wire.v1 import target_pb2 as pb

from target_server import handover as handover_module
from target_server.handover import Handover
from target_server.shared_buffer import SharedBuffer, hear
from target_server.shared_memory import SharedMemory
from target_server.status import _lines, _stats
from tests.support.shared_memory import shared_memory_of

PAGE = mmap.PAGESIZE
TERMS = SessionTerms((0,), DType.FLOAT32, 64, 1024, 1 << 20, "test")
NOBODY = b"no session of this replica waits with this token"
ATTACHED = pb.StreamHiddenStatesRequest(shared_buffer_attached=pb.SharedBufferAttached())


def released(count: int) -> pb.StreamHiddenStatesRequest:
    return pb.StreamHiddenStatesRequest(shared_buffer_released=pb.SharedBufferReleased(released_bytes=count))


@pytest.fixture
async def handover() -> AsyncIterator[Handover]:
    handover = Handover(1 << 16)
    yield handover
    handover.close()
    assert shared_memory_of("self") == []


@pytest.fixture
def attached() -> SharedBuffer:
    buffer = SharedBuffer(PAGE, on_close=lambda: None)
    buffer.provide(SharedMemory(PAGE))
    buffer.attach()
    return buffer


def ask(socket_name: str, token: str | bytes) -> tuple[bytes, list[int]]:
    """What a client is sent; blocks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(10)
        client.connect(f"\0{socket_name}")
        client.send(token if isinstance(token, bytes) else token.encode())
        text, found, _, _ = socket.recv_fds(client, 1024, 1)
        return text, found


def test_memory_is_sealed_read_only_for_others_and_given_back_while_they_map_it() -> None:
    memory = SharedMemory(4 * PAGE)
    reader = memory.reader_descriptor()
    try:
        assert os.fstat(reader).st_blocks * 512 == 4 * PAGE  # reserved, before the first write
        with pytest.raises(PermissionError):
            mmap.mmap(reader, 4 * PAGE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match=r"Errno 22|Errno 1"):
            os.ftruncate(reader, PAGE)
        assert fcntl.fcntl(reader, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        with mmap.mmap(reader, 4 * PAGE, prot=mmap.PROT_READ) as mapped:
            memory.view[PAGE : PAGE + 4] = b"rows"
            assert mapped[PAGE : PAGE + 4] == b"rows"
            memory.close()
            assert os.fstat(reader).st_blocks == 0
            assert mapped[PAGE : PAGE + 4] == bytes(4)  # late, but no error and nobody else's rows
    finally:
        os.close(reader)
    assert shared_memory_of("self") == []


async def test_a_body_waits_until_its_bytes_are_released(attached: SharedBuffer) -> None:
    quarter = PAGE // 4
    for number in range(4):
        assert await attached.put(memoryview(bytes([number]) * quarter)) == number * quarter
    waiting = asyncio.create_task(attached.put(memoryview(b"\xff" * quarter)))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    assert attached._memory is not None
    assert attached._memory.view[:quarter] == bytes(quarter)
    hear(attached, released(quarter - 1))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    assert attached._memory.view[:quarter] == bytes(quarter)
    hear(attached, released(quarter))
    assert await asyncio.wait_for(waiting, 5) == PAGE
    assert attached._memory.view[:quarter] == b"\xff" * quarter
    attached.close()
    attached.close()
    assert shared_memory_of("self") == []


def test_messages_that_no_honest_client_sends_are_refused(attached: SharedBuffer) -> None:
    new = SharedBuffer(PAGE, on_close=lambda: None)
    for buffer, message in [(None, ATTACHED), (None, released(0)), (new, ATTACHED), (attached, ATTACHED)]:
        with pytest.raises(WireError) as refused:
            hear(buffer, message)
        assert refused.value.reason is Reason.SHARED_BUFFER_INVALID
    for count in (-1, 1):
        with pytest.raises(WireError, match="released_bytes"):
            hear(attached, released(count))
    attached.close()


async def test_the_sessions_client_gets_the_memory_once(handover: Handover) -> None:
    offered = handover.offer(TERMS)
    assert offered is not None
    buffer, offer = offered
    assert offer.size_bytes == 1 << 16
    assert shared_memory_of("self") == []  # no memory for a client that may be anywhere
    text, (reader,) = await asyncio.to_thread(ask, offer.socket_name, offer.token)
    assert text == b"\0"
    assert handover.attached_count == 0
    hear(buffer, ATTACHED)
    assert handover.attached_count == 1
    position = await buffer.put(memoryview(b"rows"))
    assert os.pread(reader, 4, position) == b"rows"
    again, none = await asyncio.to_thread(ask, offer.socket_name, offer.token)
    assert (again, none) == (NOBODY, [])
    buffer.close()
    assert handover.attached_count == 0
    assert os.fstat(reader).st_blocks == 0
    os.close(reader)


@pytest.mark.parametrize("token", [b"0" * 32, b"", b"x" * 99, b"\xff"], ids=["other", "none", "long", "no-text"])
async def test_without_the_token_there_is_no_memory(token: bytes, handover: Handover) -> None:
    offered = handover.offer(TERMS)
    assert offered is not None
    buffer, offer = offered
    assert await asyncio.to_thread(ask, offer.socket_name, token) == (NOBODY, [])
    assert shared_memory_of("self") == []
    buffer.close()


async def test_a_session_that_ends_meanwhile_gets_nothing(handover: Handover, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = handover.offer(TERMS)
    assert offered is not None
    buffer, offer = offered
    loop = asyncio.get_running_loop()
    made = handover_module._make_memory

    def slow(size_bytes: int) -> tuple[SharedMemory, int]:
        loop.call_soon_threadsafe(buffer.close)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(5)
        return made(size_bytes)

    monkeypatch.setattr(handover_module, "_make_memory", slow)
    assert await asyncio.to_thread(ask, offer.socket_name, offer.token) == (b"", [])
    assert shared_memory_of("self") == []


async def test_too_little_memory_is_said_once_and_leaves_the_session_its_stream(
    handover: Handover, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            offered = handover.offer(TERMS)
            assert offered is not None
            buffer, offer = offered
            text, found = await asyncio.to_thread(ask, offer.socket_name, offer.token)
            assert (text.decode(), found) == ("no 65536 bytes of shared memory: No space left on device", [])
            with pytest.raises(WireError):
                hear(buffer, ATTACHED)
            buffer.close()
    assert handover.problem == text.decode()
    assert [record.message for record in caplog.records] == [f"hidden states go over the stream: {text.decode()}"]


async def test_sizes_follow_window_and_setting_and_rows_must_fit(handover: Handover) -> None:
    small = SessionTerms((0,), DType.FLOAT32, 64, 16, 1024, "small window")
    offered = handover.offer(small)
    assert offered is not None
    assert offered[0].size_bytes == PAGE  # no more than the window, in whole pages
    offered[0].close()
    wide = SessionTerms((0,), DType.FLOAT32, (1 << 14) + 1, 4, 1 << 20, "wide rows")
    assert handover.offer(wide) is None
    assert re.search(r"a row of 16385 bytes is more than a quarter of 65536", handover.problem)
    assert Handover(0).offer(TERMS) is None


async def test_where_no_socket_can_be_had_nothing_is_offered(
    handover: Handover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_name", "x" * 200)
    assert handover.offer(TERMS) is None
    assert handover.problem.startswith("no Unix socket can be opened")


async def test_without_descriptors_it_pauses_and_goes_on(handover: Handover, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = handover.offer(TERMS)
    assert offered is not None
    buffer, offer = offered
    monkeypatch.setattr(handover_module, "_PAUSE_S", 0.01)
    listener, tries = handover._listener, []
    assert listener is not None

    class Exhausted:
        """The listener, of a process that has no descriptor left for its first two clients."""

        def __getattr__(self, name: str) -> object:
            return getattr(listener, name)

        def accept(self) -> object:
            tries.append(1)
            if len(tries) < 3:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return listener.accept()

    handover._listener = Exhausted()  # type: ignore[assignment]
    text, (reader,) = await asyncio.to_thread(ask, offer.socket_name, offer.token)
    assert (text, len(tries)) == (b"\0", 3)
    assert handover.problem == "no connection can be taken: [Errno 24] Too many open files"
    os.close(reader)
    buffer.close()


async def test_clients_that_say_nothing_are_not_kept_in_numbers(handover: Handover) -> None:
    offered = handover.offer(TERMS)
    assert offered is not None
    buffer, offer = offered

    def connect() -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.settimeout(10)
        client.connect(f"\0{offer.socket_name}")
        return client

    silent = [await asyncio.to_thread(connect) for _ in range(64)]
    one_more = await asyncio.to_thread(connect)
    assert await asyncio.to_thread(one_more.recv, 1) == b""
    for client in (*silent, one_more):
        client.close()
    async with asyncio.timeout(4):  # each is noticed at once, not after its time is up
        await asyncio.gather(*handover._tasks)
    _, (reader,) = await asyncio.to_thread(ask, offer.socket_name, offer.token)
    os.close(reader)
    buffer.close()


def test_status_says_how_many_sessions_use_it_and_why_one_does_not() -> None:
    stats = pb.ReplicaStats(session_count=3, shared_memory_session_count=2, shared_memory_problem="no memory")
    for problem in ("no memory", ""):
        stats.shared_memory_problem = problem
        lines = "\n".join(_lines(pb.DescribeTargetResponse(replicas=[pb.Replica(stats=stats)])))
        assert f"3 sessions, 2 through shared memory{' (denied: no memory)' if problem else ''}\n" in lines + "\n"
        counts = _stats(pb.Replica(stats=stats))
        assert (counts["shared_memory_session_count"], counts["shared_memory_problem"]) == (2, problem)
