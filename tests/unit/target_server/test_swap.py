"""All replicas or none: what the front decides when replicas refuse, fail, hang or die in a swap (I8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from target_wire.errors import Reason, WireError
from target_wire.v1 import target_pb2 as pb

from target_server.config import ServerConfig
from target_server.control import SwapCommand, SwapEvent
from target_server.state import VersionStore
from target_server.supervisor import Supervisor
from target_server.swap import SwapCoordinator
from tests.unit.target_server.test_state import record, started, write

# What a replica answers to a command: stages, "dies" or nothing.
Answers = dict[str, list[str]]
GOOD: Answers = {"prepare": ["reading", "prepared"], "commit": ["committed"], "finish": ["finished"]}
GOOD["roll_back"] = ["rolled_back"]


class FakeReplicas:
    """Replicas that answer as the test says, behind the real supervisor's methods.

    Attributes:
        commands: of each replica, in order.
        killed: which were killed.
        adopted: versions and who serves them.
    """

    def __init__(self, supervisor: Supervisor, digest: str, mark: str, answers: list[Answers]) -> None:
        self.supervisor = supervisor
        self.digest, self.mark = digest, mark
        self.answers = [{**GOOD, **own} for own in answers]
        self.commands: list[list[str]] = [[] for _ in answers]
        self.killed: list[int] = []
        self.adopted: list[tuple[int, list[int]]] = []
        self.on_command: Callable[[int, str], None] = lambda _index, _command: None
        for replica in supervisor.replicas:
            replica.state = pb.REPLICA_STATE_SERVING
        patched: Any = supervisor
        patched.send = self.send
        patched.kill_replica = lambda index, _reason: self.killed.append(index)
        patched.adopt = lambda version, indices: self.adopted.append((version.number, list(indices)))

    def send(self, index: int, command: SwapCommand) -> None:
        self.commands[index].append(command.command)
        self.on_command(index, command.command)
        asyncio.get_running_loop().call_soon(self._answer, index, command)

    def _answer(self, index: int, command: SwapCommand) -> None:
        for stage in self.answers[index][command.command]:
            if stage == "dies":
                self.supervisor.on_lost(index)
                return
            event = SwapEvent(command.swap, stage, 5, 5, self.digest, self.mark, "the reason")
            self.supervisor.on_swap_event(index, event)


class Bench:
    """A coordinator with two replicas and a checkpoint "b" to swap to."""

    def __init__(self, root: Path, *answers: Answers, **swap: object) -> None:
        for name in ("a", "b"):
            write(root / name)
        self.root = root
        self.store: VersionStore = started(root)
        config = ServerConfig(model={"path": root / "a"}, devices=["cpu"] * len(answers), swap=swap)
        supervisor = Supervisor(config, self.store, lambda: None)
        to = record(root, "b", 2)
        self.replicas = FakeReplicas(supervisor, to.digest, to.mark, list(answers))
        self.coordinator = SwapCoordinator(config, supervisor, self.store)

    async def swap(self, checkpoint: str = "b", *, request_id: str = "1", **fields: object) -> list[int]:
        """Swaps and returns the stages."""
        request = pb.SwapTargetRequest(request_id=request_id, checkpoint=checkpoint, **fields)
        return [message.stage async for message in self.coordinator.swap(request)]

    async def fails(self, reason: Reason, **fields: object) -> WireError:
        with pytest.raises(WireError) as failed:
            await self.swap(**fields)
        assert failed.value.reason is reason
        return failed.value

    def assert_unchanged(self) -> None:
        assert self.store.current == record(self.root, "a", 1)
        assert not self.store.file.exists()
        assert self.replicas.adopted == []


async def test_swap_goes_through_all_stages(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {}, {})
    assert [*dict.fromkeys(await bench.swap())] == [1, 2, 3, 5]
    assert bench.replicas.commands == [["prepare", "commit", "finish"]] * 2
    assert bench.replicas.adopted == [(2, [0, 1])]
    assert bench.store.current == record(tmp_path, "b", 2)


async def test_state_is_written_after_every_replica_has_taken_the_weights_and_before_any_serves_them(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, {}, {})
    numbers: list[tuple[str, int]] = []
    bench.replicas.on_command = lambda _index, command: numbers.append((command, bench.store.current.number))
    await bench.swap()
    assert numbers == [("prepare", 1)] * 2 + [("commit", 1)] * 2 + [("finish", 2)] * 2


@pytest.mark.parametrize("other", [["prepared"], ["reading"], ["dies"]])
async def test_one_refusal_gives_the_swap_up(other: list[str], tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"prepare": ["refused"]}, {"prepare": other})
    assert (await bench.fails(Reason.SWAP_REFUSED)).detail == "the reason"
    assert bench.replicas.commands[1] == ["prepare", *([] if other == ["dies"] else ["roll_back"])]
    bench.assert_unchanged()


async def test_one_failure_takes_the_weights_back_everywhere(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"commit": ["failed"]}, {})
    assert "replica 0 could not take it: the reason" in (await bench.fails(Reason.SWAP_FAILED)).detail
    assert bench.replicas.commands == [["prepare", "commit"], ["prepare", "commit", "roll_back"]]
    bench.assert_unchanged()
    bench.replicas.answers[0] = GOOD
    assert (await bench.swap())[-1] == pb.SWAP_STAGE_DONE  # the same id is tried anew


async def test_state_that_can_not_be_written_takes_the_weights_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, {}, {})

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench.store, "commit", full)
    assert "No space left on device" in (await bench.fails(Reason.SWAP_FAILED)).detail
    assert bench.replicas.commands == [["prepare", "commit", "roll_back"]] * 2
    bench.assert_unchanged()


@pytest.mark.parametrize("stage", ["prepare", "commit", "finish"])
async def test_replica_that_dies_does_not_hold_the_others_up(stage: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path, {stage: ["dies"]}, {})
    assert (await bench.swap())[-1] == pb.SWAP_STAGE_DONE
    assert bench.replicas.adopted == [(2, [1])]
    assert bench.replicas.killed == []


async def test_nobody_left_before_the_decision_is_a_failure(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"commit": ["dies"]}, {"prepare": ["dies"]})
    await bench.fails(Reason.SWAP_FAILED)
    bench.assert_unchanged()


async def test_nobody_left_after_the_decision_is_none(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"finish": ["dies"]}, {"finish": ["dies"]})
    assert (await bench.swap())[-1] == pb.SWAP_STAGE_DONE
    assert bench.replicas.adopted == [(2, [])]


@pytest.mark.parametrize("stage", ["prepare", "finish"])
async def test_replica_that_hangs_is_killed_and_the_others_go_on(stage: str, tmp_path: Path) -> None:
    # I7
    bench = Bench(tmp_path, {stage: []}, {}, prepare_timeout_s=0.2, commit_timeout_s=0.1)
    assert (await bench.swap())[-1] == pb.SWAP_STAGE_DONE
    assert bench.replicas.killed == [0]
    assert bench.replicas.adopted == [(2, [1])]


async def test_replicas_that_read_different_bytes_are_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {}, {})
    said = bench.replicas.supervisor.on_swap_event

    def tamper(index: int, event: SwapEvent) -> None:
        said(index, replace(event, digest=f"{index}" * 32))

    bench.replicas.supervisor.on_swap_event = tamper
    assert "different ones at each replica" in (await bench.fails(Reason.SWAP_REFUSED)).detail
    assert bench.replicas.commands == [["prepare", "roll_back"]] * 2
    bench.assert_unchanged()


async def test_dry_run_ends_after_reading(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {}, {})
    assert [*dict.fromkeys(await bench.swap(dry_run=True))] == [1, 2, 5]
    assert bench.replicas.commands == [["prepare", "roll_back"]] * 2
    bench.assert_unchanged()


async def test_caller_that_goes_away_does_not_end_the_swap(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {}, {})
    request = pb.SwapTargetRequest(request_id="1", checkpoint="b")
    async for _ in bench.coordinator.swap(request):
        break
    assert (await bench.swap())[-1] == pb.SWAP_STAGE_DONE
    assert bench.replicas.commands == [["prepare", "commit", "finish"]] * 2


async def test_without_a_serving_replica_there_is_nothing_to_swap(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {})
    bench.replicas.supervisor.replicas[0].state = pb.REPLICA_STATE_LOADING
    await bench.fails(Reason.TARGET_LOADING)


async def test_heartbeat_comes_while_nothing_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("target_server.swap_run._HEARTBEAT_S", 0.02)
    bench = Bench(tmp_path, {"prepare": []}, prepare_timeout_s=0.3)
    stages: list[int] = []

    async def follow() -> None:
        async for message in bench.coordinator.swap(pb.SwapTargetRequest(request_id="1", checkpoint="b")):
            stages.append(message.stage)

    with pytest.raises(WireError):
        await follow()
    assert stages.count(pb.SWAP_STAGE_READ) > 3
