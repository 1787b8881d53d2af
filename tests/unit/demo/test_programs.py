"""Processes that the demo starts: none outlives it, and failures show the log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from demo.errors import DemoError
from demo.programs import interrupted_by_sigterm, start_program, wait_for_file
from demo.recipe import CHECKOUT

SLEEPER = "import time; time.sleep(60)"
# Ignores SIGTERM and has a child in its group; says so once both are there.
STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""


def _python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def _is_gone(pid: int) -> bool:
    """Whether the process has ended; a zombie has (whoever inherited it collects it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _assert_gone_soon(pid: int) -> None:
    deadline = time.monotonic() + 10
    while not _is_gone(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


def test_leaving_the_block_ends_the_program(tmp_path: Path) -> None:
    with start_program("sleeper", _python(SLEEPER), log=tmp_path / "log", environment={}) as program:
        assert program.exit_code() is None
    assert program.exit_code() == -signal.SIGTERM
    _assert_gone_soon(program.pid)


# Starts a sleeper, says its process id, and dies as a process does that runs out of memory.
DYING = """
import os, pathlib, signal, subprocess, sys
from demo.programs import ending_with_parent
sleeper = ending_with_parent([sys.executable, "-c", "import time; time.sleep(60)"])
print(subprocess.Popen(sleeper, start_new_session=True, stdout=subprocess.DEVNULL).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other kernels don't offer it")
def test_a_killed_demo_takes_its_programs_with_it() -> None:
    done = subprocess.run(_python(DYING), cwd=CHECKOUT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    _assert_gone_soon(int(done.stdout))


def test_a_stubborn_program_is_killed_with_its_children(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = _python(STUBBORN, ready)
    with start_program("stubborn", command, log=tmp_path / "log", environment={}, grace_s=0.3) as program:
        child = int(wait_for_file(ready, program=program, timeout_s=30) or 0)
    assert program.exit_code() == -signal.SIGKILL
    _assert_gone_soon(child)


def test_an_error_in_the_block_still_ends_the_program(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        start_program("sleeper", _python(SLEEPER), log=tmp_path / "log", environment={}) as program,
    ):
        raise KeyboardInterrupt
    _assert_gone_soon(program.pid)


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    ready, log = tmp_path / "ready", tmp_path / "log"
    started = time.monotonic()

    def interrupted() -> None:
        command = _python(STUBBORN, ready)
        with start_program("stubborn", command, log=log, environment={}, grace_s=100) as program:
            wait_for_file(ready, program=program, timeout_s=30)
            # The block is left as by a first interrupt; the second one comes while it waits for the program.
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - started < 60
    _assert_gone_soon(int(ready.read_text()))


def test_a_failed_program_shows_the_end_of_its_log(tmp_path: Path) -> None:
    code = "import sys; print(*range(100), sep='\\n'); sys.exit('no such model')"
    with (
        pytest.raises(DemoError) as error,
        start_program("server", _python(code), log=tmp_path / "log", environment={}) as program,
    ):
        program.wait_for_success(30)
    message = str(error.value)
    assert "server exited 1" in message
    assert str(tmp_path / "log") in message
    assert message.endswith("| no such model")
    assert "| 5\n" not in message


def test_waiting_for_a_file_ends_when_the_program_does(tmp_path: Path) -> None:
    with (
        pytest.raises(DemoError, match="was ended by signal 9"),
        start_program(
            "server", _python("import os; os.kill(os.getpid(), 9)"), log=tmp_path / "log", environment={}
        ) as program,
    ):
        wait_for_file(tmp_path / "port", program=program, timeout_s=30)


def test_waiting_for_a_file_has_a_deadline(tmp_path: Path) -> None:
    with (
        pytest.raises(DemoError, match=r"server did not write .* within 0 s"),
        start_program("server", _python(SLEEPER), log=tmp_path / "log", environment={}) as program,
    ):
        wait_for_file(tmp_path / "port", program=program, timeout_s=0.2)


def test_the_environment_is_added_and_outputs_are_kept_apart(tmp_path: Path) -> None:
    code = "import os, sys; assert 'PATH' in os.environ; print(os.environ['DEMO_TEST']); print('note', file=sys.stderr)"
    log, output = tmp_path / "log", tmp_path / "output"
    with start_program("reader", _python(code), log=log, output=output, environment={"DEMO_TEST": "1"}) as program:
        program.wait_for_success(30)
    assert (output.read_text(), log.read_text()) == ("1\n", "note\n")


def test_waiting_for_the_end_has_a_deadline(tmp_path: Path) -> None:
    with (
        pytest.raises(DemoError, match="sleeper still ran after 0 s"),
        start_program("sleeper", _python(SLEEPER), log=tmp_path / "log", environment={}) as program,
    ):
        program.wait_for_success(0.2)


def test_sigterm_interrupts_like_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGTERM)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(KeyboardInterrupt), interrupted_by_sigterm():
        time.sleep(10)
    assert signal.getsignal(signal.SIGTERM) is before
