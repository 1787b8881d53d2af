"""A run to which everything happens ends bit-equal to one to which nothing happens (I1, I6).

Real processes: two replicas, a front, a trainer with its receiver, and a proxy between them that delays and cuts. The
seed of each test is printed; `make soak N=...` repeats all of them with N new seeds.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.chaos_proxy import ChaosProxy
from tests.support.forking_trainer import ForkedRun, ForkingTrainer
from tests.support.training_world import Server, TrainingWorld, assert_same_run, final_state, read_records

pytestmark = pytest.mark.timeout(900)

STEPS = 60
# Slow enough for something to happen in every run, fast enough to be done in seconds.
DELAY_S = 0.004
SOAK_RUNS = int(os.environ.get("SOAK", "0"))
SEEDS = [1] if SOAK_RUNS == 0 else [time.time_ns() % 10**6 + index for index in range(SOAK_RUNS)]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkingTrainer]:
    """Starts runs quickly."""
    with ForkingTrainer(tmp_path_factory.mktemp("trainers")) as forking:
        yield forking


@pytest.fixture(scope="module")
def reference(
    training_world: TrainingWorld,
    training_server: Server,
    trainers: ForkingTrainer,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """The end of the unbroken run."""
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    run = trainers.start(run_flags(training_world, training_server.address, run_dir))
    assert run.wait() == 0, run.text()
    return final_state(run_dir)


@pytest.fixture(params=SEEDS)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed of what happens when; shown when the test fails."""
    print(f"seed {request.param}")
    return int(request.param)


@pytest.fixture(scope="module")
def server(training_world: TrainingWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose replicas may be killed; they come back."""
    with Server(training_world, tmp_path_factory.mktemp("doomed"), replicas=2) as doomed:
        assert doomed.port
        yield doomed


def run_flags(world: TrainingWorld, address: str, run_dir: Path) -> list[str]:
    return world.flags(
        address, run_dir, run__steps=STEPS, run__checkpoint_every_steps=7, target__attempts_per_batch=20,
        target__wait_timeout_s=300,
    )  # fmt: skip


def steps_done(run_dir: Path) -> int:
    records = read_records(run_dir / "metrics.jsonl")
    return records[-1]["step"] if records else 0


def at_random_steps(run: ForkedRun, run_dir: Path, seed: int, *, times: int) -> Iterator[int]:
    """Yields when the run reaches each of `times` random steps; ends early when the run does."""
    for step in sorted(random.Random(seed).sample(range(2, STEPS - 5), times)):
        while steps_done(run_dir) < step and not run.ended.is_set():
            time.sleep(0.01)
        if run.ended.is_set():
            return
        yield step


def assert_ends_like(run: ForkedRun, run_dir: Path, reference: dict[str, Any]) -> None:
    assert run.wait() == 0, run.text()
    assert_same_run(run_dir, reference)


def test_replies_delayed_at_random(
    training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer, reference: dict[str, Any],
    seed: int, tmp_path: Path,
) -> None:  # fmt: skip
    with ChaosProxy(training_server.port, seed=seed, delay_s=4 * DELAY_S) as proxy:
        run = trainers.start(run_flags(training_world, proxy.address, tmp_path / "run"))
        assert_ends_like(run, tmp_path / "run", reference)


def test_connections_cut_in_mid_frame(
    training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer, reference: dict[str, Any],
    seed: int, tmp_path: Path,
) -> None:  # fmt: skip
    with ChaosProxy(training_server.port, seed=seed, delay_s=DELAY_S) as proxy:
        run = trainers.start(run_flags(training_world, proxy.address, tmp_path / "run"))
        for _ in at_random_steps(run, tmp_path / "run", seed, times=5):
            proxy.cut()
        assert_ends_like(run, tmp_path / "run", reference)
        assert proxy.cuts >= 4  # the last may find nothing left to cut


def test_receivers_killed(
    training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer, reference: dict[str, Any],
    seed: int, tmp_path: Path,
) -> None:  # fmt: skip
    with ChaosProxy(training_server.port, seed=seed, delay_s=DELAY_S) as proxy:
        run = trainers.start(run_flags(training_world, proxy.address, tmp_path / "run"))
        killed = 0
        for _ in at_random_steps(run, tmp_path / "run", seed, times=5):
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(run.pid).children():
                    child.kill()
                    killed += 1
        assert_ends_like(run, tmp_path / "run", reference)
        assert killed >= 3


def test_replicas_killed(
    training_world: TrainingWorld, server: Server, trainers: ForkingTrainer, reference: dict[str, Any],
    seed: int, tmp_path: Path,
) -> None:  # fmt: skip
    chance = random.Random(seed)
    with ChaosProxy(server.port, seed=seed, delay_s=DELAY_S) as proxy:
        run = trainers.start(run_flags(training_world, proxy.address, tmp_path / "run"))
        killed = 0
        for _ in at_random_steps(run, tmp_path / "run", seed, times=5):
            alive = server.replica_pids()
            if alive:
                os.kill(chance.choice(alive), signal.SIGKILL)
                killed += 1
        assert_ends_like(run, tmp_path / "run", reference)
        assert killed >= 3


@pytest.mark.parametrize("how", ["front killed", "server stopped"])
def test_the_server_goes_away_and_comes_back_on_the_same_port(
    how: str, training_world: TrainingWorld, trainers: ForkingTrainer, reference: dict[str, Any],
    seed: int, tmp_path: Path,
) -> None:  # fmt: skip
    with (
        Server(training_world, tmp_path, replicas=1) as first,
        ChaosProxy(first.port, seed=seed, delay_s=2 * DELAY_S) as proxy,
    ):
        run = trainers.start(run_flags(training_world, proxy.address, tmp_path / "run"))
        for _ in at_random_steps(run, tmp_path / "run", seed, times=1):
            if how == "front killed":
                first.kill()
            first.stop()
        with Server(training_world, tmp_path, port=first.port, replicas=1):
            assert_ends_like(run, tmp_path / "run", reference)


def test_a_run_asked_to_stop_while_no_server_is_there_saves_and_can_be_resumed(
    training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer, reference: dict[str, Any],
    seed: int, tmp_path: Path,
) -> None:  # fmt: skip # I7
    with ChaosProxy(training_server.port, seed=seed, delay_s=DELAY_S) as proxy:
        run = trainers.start(run_flags(training_world, proxy.address, tmp_path / "run"))
        next(at_random_steps(run, tmp_path / "run", seed, times=1))
    # The proxy is gone, and with it all servers.
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(60) == 0, run.text()
    done = steps_done(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == f"step-{done}"
    run = trainers.start(run_flags(training_world, training_server.address, tmp_path / "run"))
    assert_ends_like(run, tmp_path / "run", reference)


def test_trainers_killed_and_resumed(
    training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer, reference: dict[str, Any],
    seed: int, tmp_path: Path,
) -> None:  # fmt: skip # cases 86, 89
    run_dir = tmp_path / "run"
    chance = random.Random(seed)
    with ChaosProxy(training_server.port, seed=seed, delay_s=DELAY_S) as proxy:
        flags = run_flags(training_world, proxy.address, run_dir)
        for kill in range(5):
            run = trainers.start(flags)
            goal = min(steps_done(run_dir) + chance.randint(1, 12), STEPS - 5 + kill)
            while steps_done(run_dir) < goal and not run.ended.is_set():
                time.sleep(chance.random() * 0.02)
            run.kill()
            assert run.wait() == -signal.SIGKILL
        run = trainers.start(flags)
        assert_ends_like(run, run_dir, reference)
    assert no_receiver_is_left()


def no_receiver_is_left(timeout_s: float = 20.0) -> bool:
    """Whether the killed trainers' receivers have ended by themselves."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        names = [
            " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline", "ppid"]) if p.info["ppid"] == 1
        ]
        if not any("drafter_trainer.client.receiver" in name for name in names):
            return True
        time.sleep(0.2)
    return False
