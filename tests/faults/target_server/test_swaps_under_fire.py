"""Swaps back and forth under load while processes are killed: I1, I3 and I8 as two clients of two replicas see them.

After every answer: the rows are what the version that it names computes, bit for bit; a version number means one digest
for ever; numbers of a stream never go back. `make soak N=…` repeats it with new seeds and more swaps.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import torch
from target_wire.v1 import target_pb2 as pb

from target_server.versions import weights_digest
from tests.support.served_targets import some_ids, write_target
from tests.support.server_process import START_TIMEOUT_S, ServerProcess, running_server, wait_until
from tests.support.soak import FAULT_SEEDS, SOAKS, soak_only
from tests.support.stream_client import reason_of
from tests.support.swapping import Load, loaded, swap
from tests.support.target_variants import Oracle, scaled, write_variant

SWAPS = 20 if SOAKS else 4
pytestmark = pytest.mark.timeout(900)

TAP = 4
SEQUENCES = [some_ids(length, seed=length) for length in (5, 17, 33)]
FLAGS = ("--devices", "cpu,cpu", "--limits.max_batch_token_count", "256", "--deadlines.restart_delay_s", "0.1")


class Models:
    """Three versions of one checkpoint and what they compute."""

    def __init__(self, root: Path) -> None:
        old = write_target(root / "old", "qwen3")
        self.paths = [
            old,
            write_variant(old, root / "layer", scaled("layers.2.")),
            write_variant(old, root / "all", scaled("layers.", "lm_head")),
        ]
        self.digests = [weights_digest(path) for path in self.paths]
        self.oracle = Oracle(dict(zip(self.digests, self.paths, strict=True)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def serving(server: ServerProcess) -> int:
    return sum(replica.state == pb.REPLICA_STATE_SERVING for replica in server.describe().replicas)


def kill_a_replica(server: ServerProcess, chance: random.Random) -> None:
    pids = server.replica_pids()
    if pids:
        os.kill(chance.choice(pids), signal.SIGKILL)


def assert_whole(loads: list[Load], models: Models) -> dict[int, str]:
    """Checks every answer; returns the digest of each version seen."""
    seen: dict[int, str] = {}
    for load in loads:
        for batch in load.batches:
            version = batch.header.version
            assert seen.setdefault(version.number, version.digest) == version.digest
            expected = models.oracle.rows(version.digest, load.ids(batch.header.request_id), TAP)
            assert torch.equal(batch.rows_TLD[:, 0], expected), batch.header
        numbers = [batch.header.version.number for batch in load.batches]
        assert numbers == sorted(numbers)
        ids = [batch.header.request_id for batch in load.batches]
        assert len(set(ids)) == len(ids)
    return seen


@pytest.mark.parametrize("seed", FAULT_SEEDS)
def test_swaps_with_replicas_killed_at_random_moments(seed: int, models: Models, tmp_path: Path) -> None:
    chance = random.Random(seed)
    ended: dict[int, str] = {1: models.digests[0]}
    shots = set(chance.sample(range(1, SWAPS), SWAPS // 4))
    with running_server(models.paths[0], tmp_path, *FLAGS, "--swap.state_file", str(tmp_path / "state")) as server:
        wait_until(lambda: serving(server) == 2, START_TIMEOUT_S)
        with loaded(server, TAP, SEQUENCES) as loads:
            for number in range(SWAPS):
                which = chance.randrange(3)
                if number in shots:
                    threading.Timer(chance.uniform(0.0, 0.08), kill_a_replica, (server, chance)).start()
                version = _swap(server, models.paths[which])
                assert version.digest == models.digests[which]
                ended[version.number] = version.digest
                time.sleep(chance.uniform(0.0, 0.2))
            wait_until(lambda: serving(server) == 2, START_TIMEOUT_S)
            for load in loads:
                load.wait_for_more(timeout_s=START_TIMEOUT_S)
            described = server.describe().version
        assert sum(load.lost_count for load in loads) > 0, "nobody was killed"
    seen = assert_whole(loads, models)
    assert seen.items() <= ended.items()
    assert max(seen) == described.number == max(ended)


def _swap(server: ServerProcess, path: Path) -> pb.TargetVersion:
    """Swaps; tries again where every replica was lost."""
    for _ in range(20):
        try:
            return swap(server, path)[-1].version
        except grpc.RpcError as error:
            if reason_of(error) not in ("SWAP_FAILED", "TARGET_LOADING"):
                raise
            time.sleep(1.0)
    raise AssertionError("no swap succeeded")


MOMENTS: dict[str, Callable[[pb.SwapTargetResponse], bool]] = {
    "reading": lambda message: message.stage == pb.SWAP_STAGE_READ,
    "taking": lambda message: message.stage == pb.SWAP_STAGE_COMMIT,
}


@soak_only
@pytest.mark.parametrize("moment", MOMENTS)
def test_front_killed_during_a_swap_comes_back_with_one_version(moment: str, models: Models, tmp_path: Path) -> None:
    # I8: the old one or the new one on every replica, whatever the state file said at that moment.
    flags = (*FLAGS, "--swap.state_file", str(tmp_path / "state"))
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with running_server(models.paths[0], tmp_path / "first", *flags) as server:
        wait_until(lambda: serving(server) == 2, START_TIMEOUT_S)
        with loaded(server, TAP, SEQUENCES) as before:

            def shoot(message: pb.SwapTargetResponse) -> None:
                if MOMENTS[moment](message):
                    os.kill(server.process.pid, signal.SIGKILL)

            with pytest.raises(grpc.RpcError):
                swap(server, models.paths[1], on_message=shoot)
            server.process.wait(10)
            for load in before:
                load.stop()
    with running_server(models.paths[0], tmp_path / "second", *flags) as again:
        wait_until(lambda: serving(again) == 2, START_TIMEOUT_S)
        with loaded(again, TAP, SEQUENCES) as after:
            version = again.describe().version
    assert version in [pb.TargetVersion(number=n + 1, digest=models.digests[n]) for n in (0, 1)]
    seen = {**assert_whole(before, models)}
    assert assert_whole(after, models) == {version.number: version.digest}
    # Nobody was sent a batch of a version that was then taken back.
    assert max(seen) <= version.number


def test_checkpoint_deleted_after_it_was_served_goes_on_being_served(models: Models, tmp_path: Path) -> None:
    own = shutil.copytree(models.paths[1], tmp_path / "own")
    flags = (*FLAGS[2:], "--swap.checkpoint_root", str(tmp_path), "--swap.state_file", str(tmp_path / "state"))
    first = shutil.copytree(models.paths[0], tmp_path / "first")
    with running_server(first, tmp_path, *flags) as server, loaded(server, TAP, SEQUENCES, replicas=1) as loads:
        swap(server, own)
        shutil.rmtree(own)
        loads[0].wait_for_more(16)
    assert assert_whole(loads, models) == {1: models.digests[0], 2: models.digests[1]}
