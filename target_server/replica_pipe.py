"""A replica's process as the front holds it: lines in and out, and its end, each within a deadline. No torch."""

from __future__ import annotations

import asyncio
import logging
from asyncio.subprocess import Process
from collections.abc import Sequence

from target_server.control import Start, SwapCommand, encode_line

__all__ = ["await_end", "read_line", "send_line", "wait_all"]

_log = logging.getLogger(__name__)

# For what came while this process itself stood still.
_GRACE_S = 1.0
# A killed process is gone in milliseconds, unless the kernel waits for a device in its name.
_END_LINE_EVERY_S = 10.0


def send_line(process: Process, message: Start | SwapCommand | dict[str, str]) -> None:
    """Writes a line to a replica; nothing happens when it has just died."""
    assert process.stdin is not None
    if not process.stdin.is_closing():
        process.stdin.write(encode_line(message))


async def read_line(stream: asyncio.StreamReader, timeout_s: float) -> bytes:
    """Reads a line; empty at the end of the stream. Unlike wait_for in Python 3.11 it never loses a cancellation.

    A front that was stopped for longer than `timeout_s` (a debugger, a suspended machine) finds the deadline passed and
    the line there: the line counts.

    Raises:
        TimeoutError: no line came within `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await stream.readline()
    except TimeoutError:
        async with asyncio.timeout(_GRACE_S):
            return await stream.readline()


async def await_end(process: Process, who: str) -> int:
    """Returns the exit status of a process that is ending; says every ten seconds that it has not."""
    waited_s = 0.0
    while True:
        try:
            async with asyncio.timeout(_END_LINE_EVERY_S):
                return await process.wait()
        except TimeoutError:
            waited_s += _END_LINE_EVERY_S
            _log.warning("%s, process %d, has not ended after %.0f s", who, process.pid, waited_s)


async def wait_all(processes: Sequence[Process], timeout_s: float) -> None:
    """Waits until all have ended, at most `timeout_s`."""
    waits = [asyncio.create_task(process.wait()) for process in processes]
    if waits:
        _, late = await asyncio.wait(waits, timeout=timeout_s)
        for task in late:
            task.cancel()
