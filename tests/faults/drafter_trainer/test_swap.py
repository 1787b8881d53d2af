"""The target is replaced while a run goes on: nothing is lost, mixed, or trained against another version's head.

Real processes. The trainer is stopped (SIGSTOP) while the target is swapped, so that a swap is always in mid-run and
always meets batches that are on their way; its receiver goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from target_server.versions import weights_digest
from tests.support.forking_trainer import ForkedRun, ForkingTrainer
from tests.support.swap_oracle import digests_by_position, load_models, replay
from tests.support.swapping import swap
from tests.support.target_variants import scaled, write_variant
from tests.support.training_world import (
    Server,
    TrainingWorld,
    assert_same_run,
    final_state,
    read_records,
)

pytestmark = pytest.mark.timeout(600)

STEPS = 24


@dataclasses.dataclass(frozen=True)
class Family:
    """Checkpoints of one shape, below one root."""

    world: TrainingWorld
    checkpoints: dict[str, Path]

    def digest(self, name: str) -> str:
        return weights_digest(self.checkpoints[name])

    def models(self) -> dict[str, Any]:
        return load_models({self.digest(name): path for name, path in self.checkpoints.items()})


@pytest.fixture(scope="module")
def family(training_world: TrainingWorld, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Untied ends: the target, a copy of it, one with another layer, one with another lm_head."""
    root = tmp_path_factory.mktemp("untied")
    one = Path(shutil.copytree(training_world.target, root / "one"))
    return Family(
        dataclasses.replace(training_world, target=one),
        {
            "one": one,
            "copy": write_variant(one, root / "copy", lambda tensors: None),
            "layer": write_variant(one, root / "layer", scaled("layers.1.")),
            "lm_head": write_variant(one, root / "lm_head", scaled("lm_head")),
        },
    )


@pytest.fixture(scope="module")
def tied_family(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Tied ends: the target, and one with other embeddings, which are its head too."""
    root = tmp_path_factory.mktemp("tied")

    def tie(tensors: dict[str, Any]) -> None:
        del tensors["lm_head.weight"]

    one = write_variant(family.checkpoints["one"], root / "one", tie)
    config = json.loads((one / "config.json").read_text())
    (one / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    ends = write_variant(one, root / "ends", scaled("embed_tokens", "model.norm"))
    return Family(dataclasses.replace(family.world, target=one), {"one": one, "ends": ends})


@pytest.fixture(scope="module")
def server(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(family.world, tmp_path_factory.mktemp("server"), replicas=2) as untied:
        assert untied.port
        yield untied


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkingTrainer]:
    """Starts runs quickly."""
    with ForkingTrainer(tmp_path_factory.mktemp("trainers")) as forking:
        yield forking


@contextlib.contextmanager
def held(run: ForkedRun) -> Iterator[None]:
    """The trainer does nothing for the time of a block; what it has asked for goes on coming."""
    os.kill(run.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(run.pid, signal.SIGCONT)


def reach(run: ForkedRun, run_dir: Path, step: int, timeout_s: float = 300.0) -> None:
    """Waits until a step is recorded."""
    deadline_s = time.monotonic() + timeout_s
    while not any(record["step"] >= step for record in read_records(run_dir / "metrics.jsonl")):
        assert not run.ended.is_set(), run.text()
        assert time.monotonic() < deadline_s, run.text()
        time.sleep(0.005)


def run_with_swaps(
    trainers: ForkingTrainer, server: Server, family: Family, flags: list[str], run_dir: Path, swaps: dict[int, str]
) -> str:
    """A run in which the target is swapped after given steps; what it said."""
    run = trainers.start(flags)
    before = len(run.text())
    for step, name in swaps.items():
        reach(run, run_dir, step)
        with held(run):
            swap(server, family.checkpoints[name])  # type: ignore[arg-type]
    assert run.wait() == 0, run.text()
    return run.text()[before:]


def back_to_one(server: Server, family: Family) -> None:
    swap(server, family.checkpoints["one"])  # type: ignore[arg-type]


def assert_learned_what_each_version_made(run_dir: Path, flags: list[str], family: Family, *, ranks: int = 1) -> None:
    """The oracle's run, which gets every batch from an in-process model of the version that is on record for it."""
    digests = digests_by_position(run_dir, num_ranks=ranks)
    oracle_dir = run_dir.with_name("oracle")
    again = [str(oracle_dir) if flag == str(run_dir) else flag for flag in flags]
    replay(again, family.models(), digests, first=family.digest("one"))
    assert_same_run(run_dir, final_state(oracle_dir))


def versions_by_step(run_dir: Path) -> list[list[int]]:
    return [record["target_versions"] for record in read_records(run_dir / "metrics.jsonl")]


def test_a_swap_to_an_identical_copy_changes_not_a_bit(
    server: Server, family: Family, trainers: ForkingTrainer, tmp_path: Path
) -> None:  # I3, case 101
    back_to_one(server, family)
    undisturbed = family.world.flags(server.address, tmp_path / "undisturbed" / "run", run__steps=STEPS)
    run_with_swaps(trainers, server, family, undisturbed, tmp_path / "undisturbed" / "run", {})
    run_dir = tmp_path / "swapped" / "run"
    flags = family.world.flags(server.address, run_dir, run__steps=STEPS)
    text = run_with_swaps(trainers, server, family, flags, run_dir, {6: "copy"})
    versions = versions_by_step(run_dir)
    assert versions[0] != versions[-1]
    assert "the same weights begins with step" in text
    assert_same_run(run_dir, final_state(tmp_path / "undisturbed" / "run"))


def test_every_batch_has_the_features_and_the_head_of_its_own_version(
    server: Server, family: Family, trainers: ForkingTrainer, tmp_path: Path
) -> None:  # I1, I3, cases 102, 104, 107
    back_to_one(server, family)
    run_dir = tmp_path / "run"
    flags = family.world.flags(server.address, run_dir, run__steps=STEPS, batch__accumulation=2)
    text = run_with_swaps(trainers, server, family, flags, run_dir, {3: "layer", 9: "lm_head", 15: "one"})
    first, *_, last = versions_by_step(run_dir)
    assert last == [first[0] + 3]
    # What was on its way when the target was swapped was trained, not thrown away.
    assert all(record["asked_again"] == 0 for record in read_records(run_dir / "metrics.jsonl"))
    digests = digests_by_position(run_dir)
    assert set(digests.values()) == {family.digest(name) for name in ("one", "layer", "lm_head")}
    assert text.count("begins with step") == text.count("ends with step") == 3
    assert_learned_what_each_version_made(run_dir, flags, family)
    state = json.loads((run_dir / "checkpoints" / "latest" / "state.json").read_text())
    history = state["facts"]["target"]["history"]
    assert [span["digest"] for span in history] == [family.digest(n) for n in ("one", "layer", "lm_head", "one")]
    assert state["identity"]["target.digest"] == family.digest("one")


def test_no_step_mixes_versions_where_that_is_wanted_also_with_tied_ends(
    tied_family: Family, trainers: ForkingTrainer, tmp_path: Path
) -> None:  # I3, cases 102, 104, 107
    run_dir = tmp_path / "run"
    with Server(tied_family.world, tmp_path / "server", replicas=2) as server:
        flags = tied_family.world.flags(
            server.address, run_dir, run__steps=16, batch__accumulation=3, target__requests_ahead=7,
            target__on_target_change="finish_step_then_follow",
        )  # fmt: skip
        run_with_swaps(trainers, server, tied_family, flags, run_dir, {5: "ends"})
        assert all(len(versions) == 1 for versions in versions_by_step(run_dir))
        # Of the seven batches on their way, the last one begins a step that had to be made again.
        assert sum(record["asked_again"] for record in read_records(run_dir / "metrics.jsonl")) > 0
        assert len(set(digests_by_position(run_dir).values())) == 2
        assert_learned_what_each_version_made(run_dir, flags, tied_family)


def test_stop_leaves_a_checkpoint_and_goes_on_only_when_told(
    server: Server, family: Family, trainers: ForkingTrainer, tmp_path: Path
) -> None:
    back_to_one(server, family)
    run_dir = tmp_path / "run"
    flags = family.world.flags(server.address, run_dir, run__steps=STEPS, target__on_target_change="stop")
    run = trainers.start(flags)
    reach(run, run_dir, 4)
    with held(run):
        swap(server, family.checkpoints["lm_head"])  # type: ignore[arg-type]
    assert run.wait() == 2, run.text()
    last = run.text().splitlines()[-1]
    one, other = family.digest("one"), family.digest("lm_head")
    assert last.startswith("drafter-trainer: target.on_target_change: stop: the target has changed: target.digest was ")
    assert f"was {one}" in last
    assert f"is {other}" in last
    assert set(digests_by_position(run_dir).values()) == {one}
    done = len(read_records(run_dir / "metrics.jsonl"))
    assert (run_dir / "checkpoints" / "latest").resolve().name == f"step-{done}"

    again = trainers.start(flags)
    assert again.wait() == 2
    assert f"target.digest was '{one}', is '{other}'" in again.text().splitlines()[-1]
    told = trainers.start([*flags, "--run.allow_changed", "target.digest"])
    assert told.wait() == 0, told.text()
    assert_learned_what_each_version_made(run_dir, [*flags, "--target.on_target_change", "follow"], family)


def test_a_server_started_again_with_another_checkpoint_is_followed_and_one_of_another_shape_is_not(
    family: Family, trainers: ForkingTrainer, tmp_path: Path
) -> None:  # cases 103, 106
    run_dir = tmp_path / "run"
    # A root of its own: a server that was swapped remembers what it served last.
    layer = Path(shutil.copytree(family.checkpoints["layer"], tmp_path / "other" / "layer"))
    one = Path(shutil.copytree(family.checkpoints["one"], tmp_path / "first" / "one"))
    with Server(dataclasses.replace(family.world, target=one), tmp_path / "server") as first:
        flags = family.world.flags(first.address, run_dir, run__steps=STEPS)
        run = trainers.start(flags)
        reach(run, run_dir, 4)
        os.kill(run.pid, signal.SIGSTOP)
        port = first.port
    with Server(dataclasses.replace(family.world, target=layer), tmp_path / "server", port=port) as second:
        assert second.port == port
        os.kill(run.pid, signal.SIGCONT)
        assert run.wait() == 0, run.text()
        assert set(digests_by_position(run_dir).values()) == {family.digest("one"), family.digest("layer")}
        assert_learned_what_each_version_made(run_dir, flags, family)
        # Another run, for what comes next.
        run_dir = tmp_path / "another" / "run"
        run = trainers.start(family.world.flags(second.address, run_dir, run__steps=400))
        reach(run, run_dir, 4)
        os.kill(run.pid, signal.SIGSTOP)
    narrow = write_narrow(family.world.target, tmp_path / "narrow" / "one")
    with Server(dataclasses.replace(family.world, target=narrow), tmp_path / "server", port=port):
        os.kill(run.pid, signal.SIGCONT)
        assert run.wait() == 2, run.text()
    last = run.text().splitlines()[-1]
    assert last.startswith(f"drafter-trainer: target.addresses: 127.0.0.1:{port}: another target is served there now: ")
    assert "layer_count was 4, is 3; vocab_size was 640, is 641" in last
    done = len(read_records(run_dir / "metrics.jsonl"))
    assert (run_dir / "checkpoints" / "latest").resolve().name == f"step-{done}"


def test_ranks_that_were_told_different_versions_stop_together_or_follow_together(
    family: Family, trainers: ForkingTrainer, tmp_path: Path
) -> None:  # I1, I3, case 106
    # A root of its own: a server that was swapped remembers what it served last.
    one = Path(shutil.copytree(family.checkpoints["one"], tmp_path / "targets" / "one"))
    two = Path(shutil.copytree(family.checkpoints["lm_head"], tmp_path / "targets" / "two"))
    world = dataclasses.replace(family.world, target=one)
    port, run_dir = free_port(), tmp_path / "run"
    flags = world.flags(f"127.0.0.1:{port}", run_dir, run__steps=6, target__on_target_change="stop")
    # Both wait for a server that isn't there yet.
    ranks = start_ranks(trainers, flags)
    ranks[0].wait_for_line("waiting for the target-server")  # it alone says so; they have met
    os.kill(ranks[1].pid, signal.SIGSTOP)
    with Server(world, tmp_path / "server", port=port) as server:
        assert server.port == port
        # The first rank asks twice a second; it's then held up by the other one, which has to agree.
        time.sleep(2.0)
        swap(server, two)  # type: ignore[arg-type]
        os.kill(ranks[1].pid, signal.SIGCONT)
        assert [rank.wait(60) for rank in ranks] == [2, 2], "\n".join(rank.text() for rank in ranks)
        # Both began with what the first one was told, and both saw the first batches come from something else.
        was = f"target.digest was {weights_digest(one)} (version 1), is {weights_digest(two)} (version 2)"
        assert all(was in rank.text() for rank in ranks)
        assert digests_by_position(run_dir, num_ranks=2) == {}

        following = [*flags, "--target.on_target_change", "follow"]
        ranks = start_ranks(trainers, following)
        assert [rank.wait(60) for rank in ranks] == [0, 0], "\n".join(rank.text() for rank in ranks)
        assert set(digests_by_position(run_dir, num_ranks=2).values()) == {weights_digest(two)}


def start_ranks(trainers: ForkingTrainer, flags: list[str]) -> list[ForkedRun]:
    """Two ranks of one run."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return [trainers.start(flags, environment=environment) for environment in environments]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_narrow(target: Path, directory: Path) -> Path:
    """A target whose features are as wide, but which has another vocabulary and depth."""
    import transformers  # noqa: PLC0415 - takes seconds

    shutil.copytree(target, directory)
    config = transformers.AutoConfig.from_pretrained(directory)
    config.vocab_size, config.num_hidden_layers = 641, 3
    config.layer_types = config.layer_types[:3]
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory
