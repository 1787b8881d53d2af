"""A swap inside one replica, under load: which version made each batch (I3), and what a failure leaves (I8).

The front's commands are sent by the test; everything else is the product's, over real gRPC.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from target_server.config import ModelConfig
from target_server.control import SwapCommand, SwapEvent
from target_server.errors import DeadlineError, ReplicaFatalError
from target_server.loading import load_target
from target_server.versions import VersionRecord, files_mark, weights_digest
from target_server.weights import Placement
from tests.support.replica_thread import DIGEST, RunningReplica, running_replica
from tests.support.served_targets import some_ids, write_target
from tests.support.stream_client import ReceivedBatch, StreamClient, fetch_head, reason_of
from tests.support.target_variants import Oracle, scaled, write_variant

LIMITS = {"max_batch_token_count": 64, "max_tap_count": 2, "max_session_count": 4}
TAP = 4
SEQUENCES = [some_ids(length, seed=length) for length in (5, 9, 17, 33)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("versions")
    old = write_target(root / "old", "llama")
    return {
        "old": old,
        "one layer": write_variant(old, root / "layer", scaled("layers.2.")),
        "tied embeddings": write_variant(old, root / "embed", scaled("embed_tokens")),
    }


@pytest.fixture(scope="module")
def digests(checkpoints: dict[str, Path]) -> dict[str, str]:
    return {name: weights_digest(path) for name, path in checkpoints.items()}


@pytest.fixture(scope="module")
def oracle(checkpoints: dict[str, Path], digests: dict[str, str]) -> Oracle:
    return Oracle({DIGEST if name == "old" else digests[name]: path for name, path in checkpoints.items()})


@pytest.fixture
def replica(checkpoints: dict[str, Path]) -> Iterator[RunningReplica]:
    target = load_target(ModelConfig(path=checkpoints["old"]), ["cpu"])
    with running_replica(target, limits=LIMITS, buffers={"host_slot_count": 6}) as running:
        yield running


class Load(threading.Thread):
    """A client that always has requests outstanding and keeps every answer."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.batches: list[ReceivedBatch] = []
        self._address = address
        self._stop_asked = threading.Event()

    def run(self) -> None:
        with StreamClient(self._address) as client:
            client.open([TAP])
            client.grant(1 << 20)
            for number in range(4):
                self._ask(client, number)
            for number in range(4, 1_000_000):
                self.batches.append(client.receive_batch())
                client.grant(self.batches[-1].header.payload_bytes)
                if self._stop_asked.is_set():
                    return
                self._ask(client, number)

    @staticmethod
    def _ask(client: StreamClient, number: int) -> None:
        client.request(number, [SEQUENCES[number % len(SEQUENCES)]])

    def wait_for_more(self, count: int = 8) -> None:
        wanted, deadline = len(self.batches) + count, time.monotonic() + 30
        while len(self.batches) < wanted:
            assert time.monotonic() < deadline, "no batches"
            assert self.is_alive()
            time.sleep(0.005)

    def end(self) -> list[ReceivedBatch]:
        self._stop_asked.set()
        self.join(30)
        assert not self.is_alive()
        return self.batches


@pytest.fixture
def load(replica: RunningReplica) -> Iterator[Load]:
    running = Load(replica.address)
    running.start()
    running.wait_for_more()
    yield running
    running.end()


def tell(replica: RunningReplica, command: str, record: VersionRecord, *, swap: int = 1) -> None:
    replica.on_loop(lambda: replica.pipe.swap(SwapCommand(command, swap, record.to_json())))


def answer(replica: RunningReplica) -> SwapEvent:
    """The next event of a swap that is no progress."""
    while True:
        event = replica.pipe.events.get(timeout=30)
        if event.kind == "swap" and event.swap is not None and event.swap["stage"] != "reading":
            return SwapEvent(**event.swap)


def prepare(replica: RunningReplica, path: Path, *, number: int = 2, swap: int = 1) -> VersionRecord:
    tell(replica, "prepare", VersionRecord(0, "", path), swap=swap)
    said = answer(replica)
    assert said.stage == "prepared", said
    return VersionRecord(number, said.digest, path, said.mark)


def swap_to(replica: RunningReplica, path: Path, *, number: int = 2) -> VersionRecord:
    record = prepare(replica, path, number=number, swap=number)
    for command, stage in (("commit", "committed"), ("finish", "finished")):
        tell(replica, command, record, swap=number)
        assert answer(replica).stage == stage
    return record


def assert_rows(batches: list[ReceivedBatch], oracle: Oracle) -> None:
    """Every batch is what its own version computes, bit for bit, and of the request that it answers."""
    for batch in batches:
        ids = SEQUENCES[batch.header.request_id % len(SEQUENCES)]
        expected = oracle.rows(batch.header.version.digest, ids, TAP)
        assert torch.equal(batch.rows_TLD[:, 0], expected), batch.header


@pytest.mark.parametrize("name", ["one layer", "tied embeddings"])
def test_every_batch_is_wholly_of_the_version_it_names(
    name: str,
    replica: RunningReplica,
    load: Load,
    checkpoints: dict[str, Path],
    digests: dict[str, str],
    oracle: Oracle,
) -> None:
    # I3, cases 102 and 104
    there = swap_to(replica, checkpoints[name])
    assert (there.digest, there.mark) == (digests[name], files_mark(checkpoints[name]))
    load.wait_for_more()
    back = swap_to(replica, checkpoints["old"], number=3)
    load.wait_for_more()
    batches = load.end()
    assert_rows([batch for batch in batches if batch.header.version.number < 3], oracle)
    numbers = [batch.header.version.number for batch in batches]
    assert numbers == sorted(numbers)
    assert set(numbers) == {1, 2, 3}
    assert sorted(batch.header.request_id for batch in batches) == list(range(len(batches)))
    assert {batch.header.version.digest for batch in batches if batch.header.version.number == 3} == {back.digest}
    replica.wait_for(sessions=0, in_flight=0, slots_free=6)


def test_head_is_of_the_version_asked_for(
    replica: RunningReplica, checkpoints: dict[str, Path], oracle: Oracle, tmp_path: Path
) -> None:
    # case 107
    own = write_variant(checkpoints["old"], tmp_path / "own", scaled("embed_tokens", "model.norm"))
    new = swap_to(replica, own)
    fresh = Oracle({new.digest: own})
    for asked, digest, source in (
        ({}, new.digest, fresh),
        ({"number": 1}, DIGEST, oracle),
        ({"digest": DIGEST}, DIGEST, oracle),
    ):
        description, tensors = fetch_head(replica.address, **asked)
        assert description.version.digest == digest
        expected = source.head(digest)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    swap_to(replica, checkpoints["old"], number=3)
    assert fetch_head(replica.address, number=2)[0].version.digest == new.digest
    (own / "model.safetensors").touch()  # somebody wrote to it
    with pytest.raises(grpc.RpcError) as gone:
        fetch_head(replica.address, number=2)
    assert reason_of(gone.value) == "VERSION_MISMATCH"
    with pytest.raises(grpc.RpcError) as unknown:
        fetch_head(replica.address, number=4)
    assert reason_of(unknown.value) == "VERSION_MISMATCH"


def test_failure_of_the_copy_leaves_the_old_version_serving(
    replica: RunningReplica, load: Load, checkpoints: dict[str, Path], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    # I8
    put = Placement._put

    def fail_late(placement: Placement, sources: Any, **how: Any) -> None:
        put(placement, sources, **how)
        raise OSError(28, "No space left on device")

    record = prepare(replica, checkpoints["one layer"])
    monkeypatch.setattr(Placement, "_put", fail_late)
    tell(replica, "commit", record)
    failed = answer(replica)
    assert (failed.stage, failed.detail) == ("failed", "OSError: [Errno 28] No space left on device")
    load.wait_for_more()
    batches = load.end()
    assert_rows(batches, oracle)
    assert {batch.header.version.number for batch in batches} == {1}
    assert fetch_head(replica.address)[0].version.number == 1


def test_swap_that_others_could_not_do_is_taken_back(
    replica: RunningReplica, load: Load, checkpoints: dict[str, Path], oracle: Oracle
) -> None:
    # I8
    record = prepare(replica, checkpoints["one layer"])
    tell(replica, "commit", record)
    assert answer(replica).stage == "committed"
    seen = len(load.batches)
    time.sleep(0.2)
    assert len(load.batches) <= seen + 4, "a replica that waits makes no batches"
    tell(replica, "roll_back", record)
    assert answer(replica).stage == "rolled_back"
    load.wait_for_more()
    assert {batch.header.version.number for batch in load.end()} == {1}
    assert_rows(load.batches, oracle)
    swap_to(replica, checkpoints["one layer"])  # and the next one works


def test_what_can_not_be_served_is_refused_while_serving(
    replica: RunningReplica, load: Load, checkpoints: dict[str, Path], oracle: Oracle, tmp_path: Path
) -> None:
    # I8, case 105
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.5.mlp.down_proj.weight"][3, 3] = torch.nan

    bad = write_variant(checkpoints["old"], tmp_path / "nan", poison)
    other = write_variant(checkpoints["old"], tmp_path / "rope", lambda _tensors: None)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 5e5
    (other / "config.json").write_text(json.dumps(config))
    for swap, (path, expected) in enumerate(
        (
            (
                bad,
                "checkpoint: model.layers.5.mlp.down_proj.weight: found a NaN or an infinity, expected finite values",
            ),
            (other, "checkpoint: config.json rope_parameters.rope_theta: found 500000.0, expected 10000.0"),
            (tmp_path / "none", "checkpoint: files: found "),
        )
    ):
        tell(replica, "prepare", VersionRecord(0, "", path), swap=swap)
        said = answer(replica)
        assert said.stage == "refused"
        assert said.detail.startswith(expected)
    load.wait_for_more()
    assert_rows(load.end(), oracle)


def test_replica_that_is_never_told_the_end_of_a_swap_ends_itself(checkpoints: dict[str, Path]) -> None:
    # I7
    target = load_target(ModelConfig(path=checkpoints["old"]), ["cpu"])
    with running_replica(target, limits=LIMITS, swap={"commit_timeout_s": 0.3}) as replica:
        record = prepare(replica, checkpoints["one layer"])
        tell(replica, "commit", record)
        assert answer(replica).stage == "committed"
        replica.thread.join(30)
    assert isinstance(replica.result, DeadlineError)


def test_replica_that_can_not_go_back_ends_itself(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # I8: the front starts it again with the version that counts.
    def fail(_placement: Placement, *_arguments: Any, **_more: Any) -> None:
        raise OSError(5, "Input/output error")

    target = load_target(ModelConfig(path=checkpoints["old"]), ["cpu"])
    with running_replica(target, limits=LIMITS) as replica:
        record = prepare(replica, checkpoints["one layer"])
        monkeypatch.setattr(Placement, "apply", fail)
        monkeypatch.setattr(Placement, "undo", fail)
        tell(replica, "commit", record)
        replica.thread.join(30)
    assert isinstance(replica.result, ReplicaFatalError)


def test_command_of_another_swap_is_ignored(replica: RunningReplica, checkpoints: dict[str, Path]) -> None:
    record = prepare(replica, checkpoints["one layer"], swap=7)
    tell(replica, "commit", replace(record, number=9), swap=6)
    tell(replica, "roll_back", record, swap=7)
    assert answer(replica).stage == "rolled_back"
    assert fetch_head(replica.address)[0].version.number == 1
