"""A run to which everything happens ends bit-equal to one to which nothing happens (I1, I6; cases 86, 89).

Compared are weights, optimizer moments, learning rates, losses, random draws (they decide anchors, and so losses),
position and the list of consumed samples. Real processes: servers with their replicas, trainers with their receivers,
and a proxy between them that delays and cuts. The seed of each run is in the test's name; the header of the output has
them all. `make soak N=...` repeats everything with N new seeds, FAULT_SEEDS=... with given ones.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.chaos_proxy import ChaosProxy
from tests.support.forking_trainer import ForkedRun, ForkingTrainer
from tests.support.soak import FAULT_SEEDS
from tests.support.training_world import Server, TrainingWorld, assert_same_run, final_state, read_records

pytestmark = pytest.mark.timeout(300)

STEPS = 60
# Slow enough for something to happen in every run, fast enough to be done in seconds.
DELAY_S = 0.004
KILLS = 5
# Between two system calls of writing a checkpoint; tests/unit/drafter_trainer/test_checkpoint.py has every single one.
CHECKPOINT_PHASES = ("files", "manifest", "synced", "renamed", "latest", "pruned")


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


@pytest.fixture(params=FAULT_SEEDS, ids="seed {}".format)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed of what happens when."""
    return int(request.param)


def run_flags(world: TrainingWorld, address: str, run_dir: Path) -> list[str]:
    return world.flags(
        address, run_dir, run__steps=STEPS, run__checkpoint_every_steps=7, target__attempts_per_batch=20,
        target__wait_timeout_s=120,
    )  # fmt: skip


def steps_done(run_dir: Path) -> int:
    records = read_records(run_dir / "metrics.jsonl")
    return records[-1]["step"] if records else 0


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


def serving_pids(server: Server) -> list[int]:
    """Waits until at least one replica serves; a second look might find none again."""
    pids: list[int] = []

    def some() -> bool:
        pids[:] = server.serving_pids()
        return bool(pids)

    wait_until(some)
    return pids


def at_random_steps(run: ForkedRun, run_dir: Path, seed: int, *, times: int) -> Iterator[int]:
    """Yields when the run reaches each of `times` random steps."""
    for step in sorted(random.Random(seed).sample(range(2, STEPS - 10), times)):
        while steps_done(run_dir) < step:
            assert not run.ended.is_set(), run.text()
            time.sleep(0.005)
        yield step


def assert_ends_like(run: ForkedRun, run_dir: Path, reference: dict[str, Any]) -> None:
    assert run.wait(200) == 0, run.text()
    assert_same_run(run_dir, reference)


def test_replies_delayed_at_random(
    training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer, reference: dict[str, Any],
    seed: int, tmp_path: Path,
) -> None:  # fmt: skip
    with ChaosProxy(training_server.port, seed=seed, delay_s=4 * DELAY_S) as proxy:
        run = trainers.start(run_flags(training_world, proxy.address, tmp_path / "run"))
        assert_ends_like(run, tmp_path / "run", reference)


def test_connections_cut_in_mid_frame_five_times(
    training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer, reference: dict[str, Any],
    seed: int, tmp_path: Path,
) -> None:  # fmt: skip
    with ChaosProxy(training_server.port, seed=seed, delay_s=DELAY_S) as proxy:
        run = trainers.start(run_flags(training_world, proxy.address, tmp_path / "run"))
        for _ in at_random_steps(run, tmp_path / "run", seed, times=KILLS):
            proxy.cut()
        assert_ends_like(run, tmp_path / "run", reference)
        assert proxy.cuts == KILLS


def test_receivers_killed_five_times(
    training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer, reference: dict[str, Any],
    seed: int, tmp_path: Path,
) -> None:  # fmt: skip
    killed = set()
    with ChaosProxy(training_server.port, seed=seed, delay_s=DELAY_S) as proxy:
        run = trainers.start(run_flags(training_world, proxy.address, tmp_path / "run"))
        for _ in at_random_steps(run, tmp_path / "run", seed, times=KILLS):
            wait_until(lambda: bool(receivers_of(run)))
            for receiver in receivers_of(run):
                receiver.kill()
                killed.add(receiver.pid)
        assert_ends_like(run, tmp_path / "run", reference)
    assert len(killed) == KILLS


def test_replicas_killed_five_times(
    training_world: TrainingWorld, trainers: ForkingTrainer, reference: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    killed = set()
    with (
        Server(training_world, tmp_path, "--deadlines.restart_delay_s", "0.05", replicas=2) as server,
        ChaosProxy(server.port, seed=seed, delay_s=DELAY_S) as proxy,
    ):
        run = trainers.start(run_flags(training_world, proxy.address, tmp_path / "run"))
        for _ in at_random_steps(run, tmp_path / "run", seed, times=KILLS):
            pid = chance.choice(serving_pids(server))
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        assert_ends_like(run, tmp_path / "run", reference)
    assert len(killed) == KILLS


def test_servers_come_and_go(
    training_world: TrainingWorld, trainers: ForkingTrainer, reference: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    """Two servers. The first one's front is killed; it returns on its port; then the second is stopped for good."""
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(Server(training_world, tmp_path / name)) for name in ("first", "second"))
        proxies = [
            stack.enter_context(ChaosProxy(server.port, seed=seed, delay_s=3 * DELAY_S)) for server in (first, second)
        ]
        addresses = ",".join(proxy.address for proxy in proxies)
        run = trainers.start(run_flags(training_world, addresses, tmp_path / "run"))
        happenings = at_random_steps(run, tmp_path / "run", seed, times=2)
        next(happenings)
        first.kill()
        first.stop()
        returned = stack.enter_context(Server(training_world, tmp_path / "first", port=first.port))
        next(happenings)
        second.stop()
        assert_ends_like(run, tmp_path / "run", reference)
        assert sum(replica.stats.batch_count for replica in returned.describe().replicas) > 0


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


def test_trainers_killed_five_times_and_resumed(
    training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer, reference: dict[str, Any],
    seed: int, tmp_path: Path,
) -> None:  # fmt: skip
    run_dir = tmp_path / "run"
    chance = random.Random(seed)
    receivers: list[psutil.Process] = []
    with ChaosProxy(training_server.port, seed=seed, delay_s=DELAY_S) as proxy:
        flags = run_flags(training_world, proxy.address, run_dir)
        for kill in range(KILLS):
            run = trainers.start(flags)
            goal = min(steps_done(run_dir) + chance.randint(1, 10), STEPS - 10 + kill)
            while steps_done(run_dir) < goal:
                assert not run.ended.is_set(), run.text()
                time.sleep(chance.random() * 0.02)
            receivers += receivers_of(run)
            run.kill()
            assert run.wait() == -signal.SIGKILL
        run = trainers.start(flags)
        assert_ends_like(run, run_dir, reference)
    assert len(receivers) == KILLS
    _, left = psutil.wait_procs(receivers, timeout=20)
    assert not left, "a killed trainer's receiver lives on"


def test_trainers_killed_in_every_phase_of_a_checkpoint_and_resumed(
    training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer, reference: dict[str, Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    flags = run_flags(training_world, training_server.address, tmp_path / "run")
    for phase in CHECKPOINT_PHASES:
        run = trainers.start(flags, die_at=phase)
        assert run.wait() == -signal.SIGKILL, run.text()
    assert_ends_like(trainers.start(flags), tmp_path / "run", reference)


def receivers_of(run: ForkedRun) -> list[psutil.Process]:
    """The receiver process of a run, while there is one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(run.pid).children()
        return [child for child in children if "drafter_trainer.client.receiver" in child.cmdline()]
    return []
