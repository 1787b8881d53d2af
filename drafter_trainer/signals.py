"""SIGTERM and Ctrl-C: the first lets the step finish and a checkpoint be written, the second ends the process.

With several ranks a signal to any of them stops all. A rank may be within a collective then, where Python runs no
handler until the others come too; so a thread waits for the signal as well, and tells the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["StopRequestedError", "stop_on_signals"]

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequestedError(Exception):
    """A stop was asked for and what is being waited for doesn't come; nothing has changed since the last whole step."""


@contextlib.contextmanager
def stop_on_signals(
    *, announce: Callable[[], None] = lambda: None, announced: Callable[[], bool] = lambda: False
) -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether to stop. Only for the main thread; puts the handlers back at the end.

    Args:
        announce: Tells the other ranks of the first signal; called from another thread.
        announced: Whether another rank has told.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if received:
            # Not an exception: it could be caught on the way, or wait for a checkpoint on a full disk.
            os._exit(128 + number)
        received.append(number)
        logger.warning(
            "%s: finishing the step and writing a checkpoint; once more to stop at once", signal.Signals(number).name
        )

    previous = {number: signal.signal(number, receive) for number in SIGNALS}
    try:
        with _told_at_once(announce):
            yield lambda: bool(received) or announced()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _told_at_once(announce: Callable[[], None]) -> Iterator[None]:
    """Calls `announce` for the first signal and ends the process at the second, whatever the main thread waits for."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def listen() -> None:
        first = True
        while number := ours.recv(1):  # Python writes the number of each signal that it has a handler for
            if number[0] in SIGNALS:
                if not first:
                    os._exit(128 + number[0])
                first = False
                announce()

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        theirs.close()  # ends the thread
        thread.join()
        ours.close()
