"""Starts trainer processes quickly: one process imports everything once, each run is a fork of it.

Run as a module it's that process: a line of JSON flags on stdin forks a run and prints its pid; the run's exit status
is printed when it ends. Nothing of gRPC or torch's threads is started before the fork.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


class ForkedRun:
    """One run, a process of its own."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self.ended = threading.Event()
        self.exit_code: int | None = None

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


class ForkingTrainer:
    """The process that forks. A context manager; one run at a time."""

    def __init__(self, directory: Path) -> None:
        self._log = directory / "trainer.log"
        self._log.touch()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forking_trainer", str(self._log)],
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

    def start(self, flags: Sequence[str]) -> ForkedRun:
        """Starts `drafter-trainer train` with these flags."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(flags)) + "\n")
        self._process.stdin.flush()
        with self._news:
            assert self._news.wait_for(lambda: bool(self._started), 300), "the forking process doesn't answer"
            return self._started.pop()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, pid, *rest = line.split()
            with self._news:
                if kind == "started":
                    self._runs[int(pid)] = ForkedRun(int(pid), self._log)
                    self._started.append(self._runs[int(pid)])
                else:
                    run = self._runs[int(pid)]
                    run.exit_code = int(rest[0])
                    run.ended.set()
                self._news.notify_all()


def serve(log: Path) -> None:
    """Forks a run for each line on stdin until it's closed."""
    import drafter_trainer.launch  # noqa: F401, PLC0415 - this is what takes seconds
    from drafter_trainer.__main__ import main  # noqa: PLC0415

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            code = main(["train", *json.loads(line)])
            sys.stderr.flush()
            os._exit(code)
        print("started", child, flush=True)
        _, status = os.waitpid(child, 0)
        print("ended", child, os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
