"""Swaps back and forth under a run of two ranks, while replicas, the front and the trainers are killed (I1, I3, I6).

Real processes, kill -9. For `make soak N=...`, which swaps 20 times, with N new seeds; `make test` has the parts:
test_swap.py, test_unbroken.py and the server's test_swaps_under_fire.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch

from tests.faults.drafter_trainer.test_swap import Family
from tests.support.forking_trainer import ForkedRun, ForkingTrainer
from tests.support.soak import FAULT_SEEDS, soak_only
from tests.support.swap_oracle import digests_by_position, replay
from tests.support.swapping import swap
from tests.support.target_variants import scaled, write_variant
from tests.support.training_world import Server, TrainingWorld, final_state, read_records

pytestmark = pytest.mark.timeout(1800)

SWAPS = 20
STEPS = 40 * SWAPS
RANKS = 2
WAIT_S = 300.0


class Storm:
    """A run, its server, and what happens to them. Nothing here waits without a deadline."""

    def __init__(self, family: Family, forking: ForkingTrainer, work: Path, seed: int) -> None:
        self.forking = forking
        self.chance = random.Random(seed)
        self.family, self.work = family, work
        self.run_dir = work / "run"
        self.server = Server(family.world, work / "server", replicas=2)
        self.port = self.server.port
        self.flags = family.world.flags(
            self.server.address, self.run_dir, run__steps=STEPS, run__checkpoint_every_steps=7,
            target__attempts_per_batch=30, target__wait_timeout_s=WAIT_S,
        )  # fmt: skip
        self.trainers: list[ForkedRun] = []
        self.start_trainers()

    def start_trainers(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        ranks = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
        ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.trainers = [
            self.forking.start(self.flags, environment={**ranks, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(RANKS)
        ]

    @property
    def step(self) -> int:
        records = read_records(self.run_dir / "metrics.jsonl")
        return records[-1]["step"] if records else 0

    def go_on(self, steps: int) -> None:
        """Waits until so many further steps are made."""
        goal, deadline_s = self.step + steps, time.monotonic() + WAIT_S
        while self.step < goal:
            assert not any(trainer.has_ended for trainer in self.trainers), self.trainers[0].text()
            assert time.monotonic() < deadline_s, self.trainers[0].text()
            time.sleep(0.01)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Trainers don't train for the time of a block, else the run might end before the storm does."""
        pids = [trainer.pid for trainer in self.trainers]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def swap_to(self, name: str) -> None:
        """Swaps; again where a replica that was killed hasn't come back yet."""
        free = self.step < STEPS // 4 and self.chance.random() < 0.5
        with contextlib.nullcontext() if free else self.held():
            deadline_s = time.monotonic() + WAIT_S
            while True:
                try:
                    swap(self.server, self.family.checkpoints[name])  # type: ignore[arg-type]
                    return
                except grpc.RpcError:
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(0.2)

    def kill_replica(self) -> None:
        if alive := self.server.replica_pids():
            os.kill(self.chance.choice(alive), signal.SIGKILL)

    def kill_front(self) -> None:
        self.server.kill()
        self.server.stop()
        self.server = Server(self.family.world, self.work / "server", port=self.port, replicas=2)
        assert self.server.port == self.port

    def kill_trainer(self) -> None:
        victim, other = self.chance.sample(self.trainers, 2)
        victim.kill()
        time.sleep(self.chance.random() * 0.3)
        with contextlib.suppress(ProcessLookupError):
            other.kill()
        for trainer in self.trainers:
            trainer.wait()
        self.start_trainers()


@pytest.fixture(params=FAULT_SEEDS)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed of what happens when; shown when the test fails."""
    print(f"seed {request.param}")
    return int(request.param)


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkingTrainer]:
    """Starts runs quickly, and ends them at last."""
    with ForkingTrainer(tmp_path_factory.mktemp("trainers")) as trainers:
        yield trainers


@pytest.fixture
def storm(training_world: TrainingWorld, forking: ForkingTrainer, tmp_path: Path, seed: int) -> Iterator[Storm]:
    root = tmp_path / "targets"
    one = Path(shutil.copytree(training_world.target, root / "one"))
    variants = {
        "one": one,
        "layer": write_variant(one, root / "layer", scaled("layers.1.")),
        "ends": write_variant(one, root / "ends", scaled("lm_head", "embed_tokens", "model.norm")),
    }
    world = TrainingWorld(one, training_world.data)
    storm = Storm(Family(world, variants), forking, tmp_path, seed)
    try:
        yield storm
    finally:
        storm.server.stop()


@soak_only
def test_a_run_through_swaps_and_kills_learns_what_each_version_made(storm: Storm) -> None:  # cases 86, 104, 105, 107
    kills: list[Callable[[], None]] = [storm.kill_replica, storm.kill_front, storm.kill_trainer]
    moments = storm.chance.sample(range(SWAPS), len(kills))  # each at least once, others by chance
    after = dict(zip(moments, kills, strict=True))
    names = ["layer", "ends", "one"]
    storm.go_on(3)
    for number in range(SWAPS):
        storm.swap_to(names[number % len(names)])
        storm.go_on(storm.chance.randint(1, 6))
        (after.get(number) or storm.chance.choice([*kills, lambda: None]))()
        storm.go_on(storm.chance.randint(1, 6))
    assert [trainer.wait(WAIT_S) for trainer in storm.trainers] == [0] * RANKS, storm.trainers[0].text()
    digests = digests_by_position(storm.run_dir, num_ranks=RANKS)  # I1
    assert len(digests) == RANKS * STEPS
    assert set(digests.values()) == {storm.family.digest(name) for name in names}
    assert_learned(storm, digests)


def assert_learned(storm: Storm, digests: dict[int, str]) -> None:
    """One rank with as many micro-batches a step, on in-process models: the same to rounding (I3, I6)."""
    oracle_dir = storm.work / "oracle"
    flags = [str(oracle_dir) if flag == str(storm.run_dir) else flag for flag in storm.flags]
    models = storm.family.models()
    replay([*flags, "--batch.accumulation", str(RANKS)], models, digests, first=storm.family.digest("one"))
    ours, oracle = final_state(storm.run_dir), final_state(oracle_dir)
    assert ours["progress"] == oracle["progress"]
    for mine, expected in zip(ours["losses"], oracle["losses"], strict=True):
        assert mine[1] == pytest.approx(expected[1], rel=1e-4), f"step {mine[0]}"
    for name, tensor in oracle["model"].items():
        torch.testing.assert_close(ours["model"][name], tensor, rtol=1e-3, atol=1e-5)
