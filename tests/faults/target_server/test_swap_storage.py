"""Storage that fails in the middle of a swap: a disk that is really full, files that are really gone (I8, case 105).

Real processes, two replicas; a replica that is stopped (SIGSTOP) holds a swap at the moment that is wanted. After each
failure the old version is served by both, and the same swap succeeds once the storage is well again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from target_wire.v1 import target_pb2 as pb

from target_server.versions import weights_digest
from tests.support.served_targets import some_ids, write_target
from tests.support.server_process import START_TIMEOUT_S, ServerProcess, running_server, wait_until
from tests.support.stream_client import capture, reason_of
from tests.support.swapping import swap
from tests.support.target_variants import WEIGHTS, Oracle, scaled, write_variant

pytestmark = pytest.mark.timeout(600)

TAP = 4
IDS = some_ids(17, seed=1)
DISK_BYTES = 64 << 10


@dataclass(frozen=True)
class World:
    """A server whose state file may lie on a disk of its own.

    Attributes:
        server: of two replicas.
        root: where checkpoints lie.
        disk: the small disk; None where none may be mounted here.
        oracle: what the old version computes.
    """

    server: ServerProcess
    root: Path
    disk: Path | None
    oracle: Oracle

    def assert_old_version_is_served(self, version: pb.TargetVersion) -> None:
        assert self.server.describe().version == version
        for index in (0, 1):
            answer = capture(self.server.replica_address(index), [TAP], [IDS])
            assert answer.header.version == version
            expected = self.oracle.rows(weights_digest(self.root / "old"), IDS, TAP)
            assert answer.body == expected.contiguous().numpy().tobytes()


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A disk of 64 KiB, where this process may mount one."""
    path = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, timeout=30, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    yield path if mounted else None
    if mounted:
        subprocess.run(["umount", "--lazy", str(path)], timeout=30, check=True)


@pytest.fixture(scope="module")
def world(disk: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("models")
    old = write_target(root / "old", "qwen3")
    state = (disk or tmp_path_factory.mktemp("state")) / "state.json"
    flags = ("--devices", "cpu,cpu", "--swap.state_file", str(state))
    with running_server(old, tmp_path_factory.mktemp("server"), *flags) as server:
        wait_until(
            lambda: all(r.state == pb.REPLICA_STATE_SERVING for r in server.describe().replicas), START_TIMEOUT_S
        )
        yield World(server, root, disk, Oracle({weights_digest(old): old}))


@pytest.fixture
def new(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that could be swapped to."""
    name = tmp_path_factory.mktemp("new").name
    return write_variant(world.root / "old", world.root / name, scaled("layers.2."))


def failing_swap(world: World, checkpoint: Path, break_it: Callable[[], object], *, after: str) -> grpc.RpcError:
    """Swaps, and breaks something before any replica has read ("validate"), or once all have ("read")."""
    first, second = world.server.replica_pids()
    done: list[str] = []

    def watch(message: pb.SwapTargetResponse) -> None:
        if after == "validate" and message.stage == pb.SWAP_STAGE_READ and not done:
            done.append("broken")
            break_it()
            os.kill(second, signal.SIGCONT)
        elif after == "read" and message.stage == pb.SWAP_STAGE_READ and not done:
            # The first replica has read everything: it is held instead, so that the second one can.
            if any(replica.read_bytes and replica.read_bytes == replica.total_bytes for replica in message.replicas):
                done.append("held")
                os.kill(first, signal.SIGSTOP)
                os.kill(second, signal.SIGCONT)
        elif after == "read" and message.stage == pb.SWAP_STAGE_COMMIT and done == ["held"]:
            done.append("broken")
            break_it()
            os.kill(first, signal.SIGCONT)

    os.kill(second, signal.SIGSTOP)
    try:
        with pytest.raises(grpc.RpcError) as failed:
            swap(world.server, checkpoint, on_message=watch)
    finally:
        for pid in (first, second):
            os.kill(pid, signal.SIGCONT)
    assert done[-1:] == ["broken"], "the moment did not come"
    assert world.server.replica_pids() == [first, second], "a replica has died"
    return failed.value


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))
    assert os.statvfs(disk).f_bavail == 0


def detail_of(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call)
    return error.details() or ""


@pytest.mark.parametrize("moment", ["before", "validate", "read"])
def test_full_disk_refuses_or_undoes_a_swap_that_could_not_be_remembered(moment: str, world: World, new: Path) -> None:
    disk = world.disk
    if disk is None:
        pytest.skip("no disk of 64 KiB: mounting a tmpfs is not permitted here")
    before = world.server.describe().version
    if moment == "before":
        fill(disk)
        with pytest.raises(grpc.RpcError) as refused:
            swap(world.server, new)
        error, reason = refused.value, "SWAP_REFUSED"
    else:
        error, reason = failing_swap(world, new, lambda: fill(disk), after=moment), "SWAP_FAILED"
    assert reason_of(error) == reason
    assert "swap.state_file" in detail_of(error)
    assert "No space left on device" in detail_of(error)
    world.assert_old_version_is_served(before)
    (disk / "filler").unlink()
    swap_and_back(world, new)


@pytest.mark.parametrize("damage", ["cut short", "gone"])
@pytest.mark.parametrize("moment", ["validate", "read"])
def test_file_that_is_lost_before_or_after_it_was_read_fails_the_swap(
    damage: str, moment: str, world: World, new: Path
) -> None:
    before = world.server.describe().version
    whole = (new / WEIGHTS).read_bytes()

    def lose() -> None:
        if damage == "gone":
            (new / WEIGHTS).unlink()
        else:
            os.truncate(new / WEIGHTS, len(whole) // 2)

    error = failing_swap(world, new, lose, after=moment)
    assert reason_of(error) == ("SWAP_REFUSED" if moment == "validate" else "SWAP_FAILED")
    assert ("files" if moment == "validate" else "its files changed after they were read") in detail_of(error)
    world.assert_old_version_is_served(before)
    (new / WEIGHTS).unlink(missing_ok=True)
    (new / WEIGHTS).write_bytes(whole)
    swap_and_back(world, new)


def swap_and_back(world: World, new: Path) -> None:
    assert swap(world.server, new)[-1].version.digest == weights_digest(new)
    swap(world.server, world.root / "old")
