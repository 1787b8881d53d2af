"""SIGTERM and Ctrl-C: the first lets the step finish and a checkpoint be written, the second ends the process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["StopRequestedError", "stop_on_signals"]

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequestedError(Exception):
    """A stop was asked for and what is being waited for doesn't come; nothing has changed since the last whole step."""


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether to stop. Only for the main thread; puts the handlers back at the end."""
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
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
