"""Starts trainer processes quickly: one process imports everything once, each run is a fork of it.

Run as a module it's that process. A line of JSON on stdin forks a run and its pid is printed; so is its exit status
when it ends. Nothing of gRPC or of torch's threads is started before a fork.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from demo.programs import ending_with_parent

PR_SET_PDEATHSIG = 1
REAP_EVERY_S = 0.02


class ForkedRun:
    """One run, a process of its own."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self.ended = threading.Event()
        self.exit_code: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it's over, however it ended."""
        return self.ended.is_set()

    def kill(self) -> None:
        """As a power cut would."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float = 300.0) -> int:
        """Exit code, negative for a signal."""
        assert self.ended.wait(timeout_s), f"the run still goes on:\n{self.text()}"
        assert self.exit_code is not None
        return self.exit_code

    def text(self) -> str:
        """What it has said."""
        return self.log.read_text()

    def wait_for_line(self, part: str, timeout_s: float = 300.0) -> None:
        """Waits until it has said something."""
        deadline_s = time.monotonic() + timeout_s
        while part not in self.text():
            assert not self.ended.is_set(), f"the run ended before {part!r}:\n{self.text()}"
            assert time.monotonic() < deadline_s, f"no {part!r} from the run:\n{self.text()}"
            time.sleep(0.02)


class ForkingTrainer:
    """The process that forks. A context manager; runs may go on side by side."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()
        self._process = subprocess.Popen(
            ending_with_parent([sys.executable, "-m", "tests.support.forking_trainer"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._runs: dict[int, ForkedRun] = {}
        self._started: list[ForkedRun] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ForkingTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for run in self._runs.values():
            if not run.ended.is_set():
                run.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._reader.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def start(
        self, flags: Sequence[str], *, environment: Mapping[str, str] | None = None, die_at: str = ""
    ) -> ForkedRun:
        """Starts `drafter-trainer train` with these flags.

        Args:
            flags: Of the command line.
            environment: Added to this process's.
            die_at: Phase of writing its first checkpoint at which it kills itself.
        """
        log = self._directory / f"run-{next(self._numbers)}.log"
        order = {"log": str(log), "flags": list(flags), "environment": dict(environment or {}), "die_at": die_at}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        with self._news:
            assert self._news.wait_for(lambda: bool(self._started), 300), "the forking process doesn't answer"
            return self._started.pop()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, pid, rest = line.rstrip("\n").split(" ", 2)
            with self._news:
                if kind == "started":
                    self._runs[int(pid)] = ForkedRun(int(pid), Path(rest))
                    self._started.append(self._runs[int(pid)])
                else:
                    run = self._runs[int(pid)]
                    run.exit_code = int(rest)
                    run.ended.set()
                self._news.notify_all()


def serve() -> None:
    """Forks a run for each line on stdin until it's closed, and tells how each run ends."""
    # These take seconds. Optimizers import the second one when they are first used.
    import torch._dynamo  # noqa: F401, PLC0415

    import drafter_trainer.launch  # noqa: F401, PLC0415

    for order in orders():
        if order is not None:
            Path(order["log"]).touch()
            if (child := os.fork()) == 0:
                os._exit(run(order))
            print("started", child, order["log"], flush=True)
        for pid, status in ended_children():
            print("ended", pid, os.waitstatus_to_exitcode(status), flush=True)


def orders() -> Iterator[dict[str, Any] | None]:
    """Each line of stdin, and None whenever there was none for a moment."""
    buffered = b""
    while True:
        while b"\n" in buffered:
            line, _, buffered = buffered.partition(b"\n")
            yield json.loads(line)
        if not select.select([0], [], [], REAP_EVERY_S)[0]:
            yield None
        elif piece := os.read(0, 1 << 16):
            buffered += piece
        else:
            return


def ended_children() -> Iterator[tuple[int, int]]:
    """Process id and wait status of each child that has ended since."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def run(order: dict[str, Any]) -> int:
    """In the fork: trains, and returns the exit code."""
    from drafter_trainer import launch  # noqa: PLC0415
    from drafter_trainer.__main__ import main  # noqa: PLC0415

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a fork doesn't inherit it
    descriptor = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(order["environment"])
    if order["die_at"]:
        store = launch.CheckpointStore

        def die(phase: str) -> None:
            if phase == order["die_at"]:
                os.kill(os.getpid(), signal.SIGKILL)

        launch.CheckpointStore = lambda *args, **more: store(*args, **more, on_phase=die)  # type: ignore[misc, assignment]
    try:
        return main(["train", *order["flags"]])
    finally:
        sys.stderr.flush()


if __name__ == "__main__":
    serve()
