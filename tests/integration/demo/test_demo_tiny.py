"""`python -m demo --tiny` as a newcomer runs it: both programs, export, evaluation, last line; and how to stop it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from demo.programs import ending_with_parent
from demo.progress import MetricsTail
from demo.recipe import CHECKOUT
from demo.tiny import ensure_tiny_target
from tests.support.soak import soak_only

FIRST_KEYS = [
    "accept_len",
    "accept_len_macro",
    "accept_len_simulated",
    "prompts",
    "identical",
    "ties",
    "tok_s_plain",
    "tok_s_speculative",
    "tokens_trained",
    "steps",
    "minutes",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory that already has the tiny target."""
    directory = tmp_path_factory.mktemp("cache")
    ensure_tiny_target(directory / "tiny")
    return directory


def _command(cache: Path, run_dir: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "demo", "--tiny", "--cache-dir", str(cache), "--run-dir", str(run_dir), *flags]


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A whole run, its directory and what it printed."""
    run_dir = tmp_path_factory.mktemp("demo") / "run"
    command = _command(cache, run_dir, "--steps", "40", "--prompts", "4")
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return run_dir, done


def _last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(done.stdout.splitlines()[-1])


def test_last_line_has_the_agreed_names_first(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    result = _last_line(finished[1])
    assert list(result)[: len(FIRST_KEYS)] == FIRST_KEYS
    assert all(math.isfinite(result[key]) for key in FIRST_KEYS)
    assert json.loads((finished[0] / "result.json").read_text()) == result


def test_drafter_has_learned_and_decoding_stays_exact(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    result = _last_line(finished[1])
    assert result["steps"] == 40
    assert result["prompts"] == result["prompts_fp32"] == result["identical"] == 4
    assert result["errors"] == 0
    assert result["accept_len"] > 1.0


def test_run_directory_is_a_trainers_and_the_export_a_drafter(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir = finished[0]
    steps = [row["step"] for row in MetricsTail(run_dir / "train/metrics.jsonl").new()]
    assert steps == list(range(1, 41))
    assert (run_dir / "train/checkpoints/latest").exists()
    config = json.loads((run_dir / "drafter/config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert (run_dir / "drafter/model.safetensors").is_file()


def test_no_program_outlives_the_demo(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    assert not _processes_of(finished[0])


@soak_only
def test_an_interrupted_demo_stops_both_programs(cache: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with _running(_command(cache, run_dir, "--steps", "100000")) as demo:
        _wait_for_a_step(demo, run_dir)
        demo.send_signal(signal.SIGINT)  # what Ctrl-C sends
        assert demo.wait(90) == 130
        assert "both programs are stopped" in demo.stderr.read()
    assert not _processes_of(run_dir)


@soak_only
def test_a_killed_server_ends_the_demo_with_its_log(cache: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with _running(_command(cache, run_dir, "--steps", "100000")) as demo:
        _wait_for_a_step(demo, run_dir)
        for process in _processes_of(run_dir):
            if "target_server" in process.cmdline() and "serve" in process.cmdline():
                process.kill()
        assert demo.wait(90) == 1
        assert "target-server was ended by signal 9; the end of its log" in demo.stderr.read()
    assert not _processes_of(run_dir)


def test_a_used_run_directory_is_refused(cache: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        _command(cache, tmp_path), cwd=CHECKOUT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"demo: {tmp_path} exists already; give a new --run-dir"


class _running:  # noqa: N801 - reads as a with statement
    """A demo process that is killed, with its programs, if a test fails while it runs."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    def __enter__(self) -> subprocess.Popen[str]:
        self._demo = subprocess.Popen(
            ending_with_parent(self._command),
            cwd=CHECKOUT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self._demo

    def __exit__(self, *_: object) -> None:
        if self._demo.poll() is None:
            self._demo.terminate()
            self._demo.wait(90)
        assert self._demo.stderr is not None
        self._demo.stderr.close()


def _wait_for_a_step(demo: subprocess.Popen[str], run_dir: Path) -> None:
    deadline = time.monotonic() + 180
    while not MetricsTail(run_dir / "train/metrics.jsonl").new():
        assert demo.poll() is None
        assert time.monotonic() < deadline, "no step within 180 s"
        time.sleep(0.1)


def _processes_of(run_dir: Path) -> list[psutil.Process]:
    """Living processes, other than this one, whose command line names the run directory."""
    return [process for process in _others() if any(str(run_dir) in word for word in _command_line(process))]


def _others() -> Iterator[psutil.Process]:
    return (process for process in psutil.process_iter() if process.pid != os.getpid())


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.NoSuchProcess:
        return []
