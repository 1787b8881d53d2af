"""That the options do what they are for, on a real socket."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from target_wire.channel import MAX_MESSAGE_BYTES, channel_options, server_options

METHOD = "/test.Echo/Stream"
MIB = 1 << 20


def handler(sizes: list[int]) -> grpc.GenericRpcHandler:
    """Answers one request with messages of these sizes."""

    async def stream(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for size in sizes:
            yield bytes(size)

    return grpc.method_handlers_generic_handler("test.Echo", {"Stream": grpc.unary_stream_rpc_method_handler(stream)})


async def started_server(sizes: list[int]) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((handler(sizes),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def sizes_received(port: int) -> list[int]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        call = channel.unary_stream(METHOD)(b"", timeout=30)
        return [len(message) async for message in call]


def test_options_name_each_setting_once() -> None:
    for options in (channel_options(), server_options()):
        names = [name for name, _ in options]
        assert len(names) == len(set(names))


async def test_frames_pass_and_the_window_reopens() -> None:
    # 24 MiB: more than the lookahead, so it stalls for good if the window does not grow back.
    sizes = [4 * MIB + 64] * 6
    server, port = await started_server(sizes)
    try:
        assert await sizes_received(port) == sizes
    finally:
        await server.stop(0)


async def test_a_message_above_the_limit_is_refused_and_not_lost() -> None:
    server, port = await started_server([MAX_MESSAGE_BYTES + 1])
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sizes_received(port)
    finally:
        await server.stop(0)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_second_server_on_the_same_port_fails_to_bind() -> None:
    server, port = await started_server([])
    second = grpc.aio.server(options=server_options())
    try:
        with pytest.raises(RuntimeError, match=r"[Ff]ailed to bind"):
            second.add_insecure_port(f"127.0.0.1:{port}")
    finally:
        await second.stop(0)
        await server.stop(0)


async def test_proxy_variables_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    server, port = await started_server([1])
    try:
        assert await sizes_received(port) == [1]
    finally:
        await server.stop(0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_malloc_keeps_large_blocks_once_tuned() -> None:
    # In a process of its own: mallopt holds for the rest of a process's life. With glibc's defaults each 40 MiB block
    # is mapped anew, which costs a page fault for every 4 KiB of it, each time.
    probe = """
import resource, sys
from target_wire.channel import tune_malloc
print(tune_malloc() if sys.argv[1] == "tuned" else False)
bytearray(40 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    bytearray(b"x") * (40 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    outcomes = {}
    for mode in ("tuned", "plain"):
        done = subprocess.run(
            [sys.executable, "-c", probe, mode], capture_output=True, text=True, timeout=60, check=True
        )
        tuned, faults = done.stdout.split()
        outcomes[mode] = (tuned == "True", int(faults))
    if not outcomes["tuned"][0]:
        pytest.skip("libc is not glibc")
    assert outcomes["tuned"][1] * 10 < outcomes["plain"][1]
