"""A TCP proxy that delays and cuts: stands between trainer and server, on another loopback address.

A server whose replicas advertise no host is reached under the host of its front. So the proxy listens on 127.0.0.2
under the server's own ports, and everything the trainer does passes through it; new replica ports are found by asking
the front.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from types import TracebackType
from typing import Any

import grpc

from drafter_trainer.client.discovery import describe

HOST = "127.0.0.2"
UPSTREAM = "127.0.0.1"
PIECE_BYTES = 4096


class ChaosProxy:
    """Runs in a thread while the context is open.

    Args:
        front_port: Port of the front, here and there.
        seed: Of delays and of where connections are cut.
        delay_s: Longest delay of a piece of up to 4 KiB from the server.
    """

    def __init__(self, front_port: int, *, seed: int, delay_s: float) -> None:
        self.address = f"{HOST}:{front_port}"
        self.cuts = 0
        self._front_port = front_port
        self._random = random.Random(seed)
        self._delay_s = delay_s
        self._cut_pending = 0
        self._servers: dict[int, asyncio.Server] = {}
        self._links: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> ChaosProxy:
        self._thread.start()
        self._run(self._listen(self._front_port))
        self._finding = asyncio.run_coroutine_threadsafe(self._find_replicas(), self._loop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finding.cancel()
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def cut(self, *, times: int = 1) -> None:
        """Cuts the next `times` connections to a replica that carry data, each in the middle of a piece."""
        self._loop.call_soon_threadsafe(self._ask_cut, times)

    def stall(self) -> None:
        """From now on nothing that a replica sends gets through, and no connection is cut."""
        self._delay_s = 1e6

    def _ask_cut(self, times: int) -> None:
        self._cut_pending += times

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _listen(self, port: int) -> None:
        async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._links.add(task)
            try:
                await self._forward(port, reader, writer)
            finally:
                self._links.discard(task)

        self._servers[port] = await asyncio.start_server(link, HOST, port)

    async def _find_replicas(self) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                description = await describe(f"{UPSTREAM}:{self._front_port}", timeout_s=5)
                for replica in description.replicas:
                    if replica.port and replica.port not in self._servers:
                        await self._listen(replica.port)
            await asyncio.sleep(0.1)

    async def _stop(self) -> None:
        for server in self._servers.values():
            server.close()
        for task in list(self._links):
            task.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _forward(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(UPSTREAM, port)
        except OSError:
            writer.close()
            return
        upwards = asyncio.create_task(_copy(reader, up_writer))
        try:
            await self._copy_with_chaos(up_reader, writer, data=port != self._front_port)
        finally:
            upwards.cancel()
            for end in (writer, up_writer):
                end.transport.abort()  # a reset, not a polite end
            await asyncio.gather(upwards, return_exceptions=True)

    async def _copy_with_chaos(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, data: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(PIECE_BYTES):
                if data:
                    await asyncio.sleep(self._random.random() * self._delay_s)
                    if self._cut_pending and len(piece) > 1000:
                        self._cut_pending -= 1
                        self.cuts += 1
                        writer.write(piece[: self._random.randrange(len(piece))])
                        await writer.drain()
                        return
                writer.write(piece)
                await writer.drain()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
