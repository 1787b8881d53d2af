"""Runs the project's two programs as processes of their own and makes sure that none outlives the demo.

Owns starting, watching, stopping and the end of each log. Stop order: SIGTERM (both programs then finish what they are
at), a deadline, SIGKILL to the whole process group. Every wait has a deadline.

Fact that forces the design: Ctrl-C on a terminal signals every process of the foreground group at once, in no order. So
each program gets a session of its own, and only the demo is interrupted; it then stops the others in order. A demo that
is killed can't: there the kernel ends its programs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from demo.errors import DemoError
from demo.recipe import CHECKOUT

__all__ = ["Program", "ending_with_parent", "interrupted_by_sigterm", "start_program", "wait_for_file"]

_LOG_LINES_SHOWN = 20
_POLL_S = 0.1
# Asks Linux for SIGKILL when the parent dies (PR_SET_PDEATHSIG, which is 1), then becomes the program.
_END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class Program:
    """A started program. Made by `start_program`; stopped when that block is left."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name, self.log = name, log
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id, which is its process group's too."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Exit code, negative for a signal, or None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """Waits for its end.

        Raises:
            DemoError: it still runs after `timeout_s`.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"{self.name} still ran after {timeout_s:.0f} s; its log: {self.log}") from error

    def wait_for_success(self, timeout_s: float) -> None:
        """Waits for its end.

        Raises:
            DemoError: it did not exit 0 in time; the message has the end of its log.
        """
        code = self.wait(timeout_s)
        if code != 0:
            raise self.failure(code)

    def check_running(self) -> None:
        """Raises DemoError, with the end of the log, if it has ended."""
        code = self.exit_code()
        if code is not None:
            raise self.failure(code)

    def failure(self, code: int) -> DemoError:
        """The error for an unwanted end, with the end of the log."""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            tail = "".join(f"  | {line}" for line in deque(file, maxlen=_LOG_LINES_SHOWN))
        how = f"was ended by signal {-code}" if code < 0 else f"exited {code}"
        return DemoError(f"{self.name} {how}; the end of its log {self.log}:\n{tail}".rstrip())

    def stop(self, *, grace_s: float) -> int:
        """Asks it to end, kills it and all it started if it does not, and returns its exit code.

        An interrupt while it waits (a second Ctrl-C) kills at once.
        """
        try:
            if self.exit_code() is None:
                self._process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace_s)
        finally:
            # Also after an orderly end: a crashed program may have left children in its group.
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            code = self._process.wait()
        return code


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The same command, started so that it is killed as soon as this process is gone, however that happens.

    Run it from the main thread: the kernel takes the end of the starting thread for the end of the process. Elsewhere
    than on Linux it is the command itself.
    """
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid()), *command]


@contextmanager
def start_program(
    name: str,
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str],
    output: Path | None = None,
    grace_s: float = 20.0,
) -> Iterator[Program]:
    """Runs `command` in the checkout for the length of a with block.

    Args:
        name: For messages.
        command: Program and arguments.
        log: Takes stderr, and stdout too where `output` is not given; appended to.
        environment: Added to this process's.
        output: Takes stdout.
        grace_s: How long it may take to end after SIGTERM, in seconds.
    """
    with log.open("ab") as log_file, (output or log).open("ab") as output_file:
        process = subprocess.Popen(
            ending_with_parent(command),
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            stdout=output_file,
            stderr=log_file,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    program = Program(name, process, log)
    try:
        yield program
    finally:
        program.stop(grace_s=grace_s)


def wait_for_file(path: Path, *, program: Program, timeout_s: float) -> str:
    """Returns the text of a file that `program` writes once it is ready.

    Raises:
        DemoError: it ended, or did not write within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not path.is_file():
        program.check_running()
        if time.monotonic() > deadline:
            raise DemoError(f"{program.name} did not write {path} within {timeout_s:.0f} s; its log: {program.log}")
        time.sleep(_POLL_S)
    return path.read_text(encoding="utf-8").strip()


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the block as Ctrl-C does, so that a killed demo stops its programs too."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
