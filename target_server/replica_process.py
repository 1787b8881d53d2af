"""The process of one model copy: `python -m target_server.replica_process`, started by the front.

Only what must happen before torch and gRPC are imported is here: malloc is tuned while there are no threads, stdout
becomes the pipe to the front (whatever prints goes to stderr), and the pipe is watched from the first moment, so that
the process ends with the front even while it imports or loads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable

from target_wire.channel import tune_malloc
from target_wire.imports import quick_imports

from target_server.control import MAX_LINE_BYTES, Event, Start, SwapCommand, encode_line

__all__ = ["ControlPipe", "main"]

EXIT_ORPHANED = 3


class ControlPipe:
    """The replica's ends of the pipe."""

    def __init__(self) -> None:
        self._events = os.dup(1)
        os.set_blocking(self._events, False)
        os.dup2(2, 1)
        self._buffer = b""
        self._on_drain: Callable[[], object] = lambda: os._exit(0)
        self._on_swap: Callable[[SwapCommand], object] = lambda _command: None

    def read_start(self) -> Start:
        """Blocks for the first line."""
        line = self._read_line()
        if line is None:
            os._exit(EXIT_ORPHANED)
        return Start(**json.loads(line))

    def watch(self) -> None:
        """Starts the thread that obeys commands and ends the process when the front is gone."""
        threading.Thread(target=self._watch, name="control", daemon=True).start()

    def on_drain(self, action: Callable[[], object]) -> None:
        """Sets what a drain command does; before this is called it ends the process, which holds nothing yet."""
        self._on_drain = action

    def on_swap(self, action: Callable[[SwapCommand], object]) -> None:
        """Sets what swap commands do; none is sent before this replica has said that it serves."""
        self._on_swap = action

    def send(self, event: Event) -> None:
        """Reports to the front; never blocks the event loop. A front that reads nothing misses reports."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._events, encode_line(event))

    def _watch(self) -> None:
        while (line := self._read_line()) is not None:
            message = json.loads(line)
            if message["command"] == "drain":
                self._on_drain()
            else:
                self._on_swap(SwapCommand(**message))
        os._exit(EXIT_ORPHANED)

    def _read_line(self) -> bytes | None:
        """Returns the next line; None at the pipe's end.

        It reads the descriptor itself: the watching thread would hold a buffered stream's lock when the interpreter
        shuts down.
        """
        while b"\n" not in self._buffer:
            piece = os.read(0, 65536)
            if not piece or len(self._buffer) > MAX_LINE_BYTES:
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def main() -> int:
    """Runs a replica; returns its exit code."""
    tune_malloc()
    pipe = ControlPipe()
    start = pipe.read_start()
    pipe.watch()
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s replica-{start.index} %(levelname)s %(name)s: %(message)s"
    )
    with quick_imports():
        from target_server.replica_server import run_replica  # noqa: PLC0415 - torch and gRPC only now

    return run_replica(start, pipe)


if __name__ == "__main__":
    sys.exit(main())
