"""A process of the benchmark's own: `python -m MODULE ARGUMENT`, spoken to by one line of JSON at a time.

The child writes one line when it is ready and one per command; it ends when its stdin does, so none outlives the
benchmark whatever happens to that. Both directions have a deadline.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.options import CHECKOUT, BenchError

__all__ = ["Child", "child", "commands", "reply"]

_READY_S = 300.0
_END_S = 10.0


class Child:
    """A started process. Made by `child`.

    Attributes:
        pid: its process id.
        ready: what it said when it was ready.
    """

    def __init__(self, module: str, argument: dict[str, Any]) -> None:
        self._name = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(argument)],
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # As the programs' own processes: where cores are short, Linux divides them by session.
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.ready: dict[str, Any] = {}

    def ask(self, command: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Sends a command and returns its answer.

        Raises:
            BenchError: the process has ended, or says nothing in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise BenchError(f"{self._name} has ended; its messages are above") from error
        return self.hear(timeout_s)

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """Returns the next line; raises as `ask`."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty as error:
            raise BenchError(f"{self._name} said nothing for {timeout_s:.0f} s") from error
        if not line:
            raise BenchError(f"{self._name} has ended; its messages are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the process, by force when it doesn't by itself."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(_END_S)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


@contextmanager
def child(module: str, argument: dict[str, Any]) -> Iterator[Child]:
    """Runs a process for the time of a block; it is ready when the block begins."""
    process = Child(module, argument)
    try:
        process.ready = process.hear(_READY_S)
        yield process
    finally:
        process.close()


def reply(answer: dict[str, Any]) -> None:
    """Says something to the parent; for use in the child."""
    print(json.dumps(answer), flush=True)


def commands() -> Iterator[dict[str, Any]]:
    """Yields the parent's commands until it is gone; for use in the child."""
    for line in sys.stdin:
        yield json.loads(line)
