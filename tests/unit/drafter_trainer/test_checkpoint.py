"""Checkpoints under crashes: written in a process that dies at each phase, read after tearing."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_trainer.checkpoint import Checkpoint, CheckpointStore, differences, join_tensors, split_tensors
from drafter_trainer.errors import CheckpointError

PHASES = ("files", "manifest", "synced", "renamed", "latest", "pruned")

# Every Python call that changes the file system reports itself to audit hooks under one of these names.
CHANGING_CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.chmod", "shutil.rmtree")

# Writes step 1, then dies in step 2: at each named phase, and before each call that changes the file system, which
# prints how many there are. Forked, because importing torch takes seconds.
CRASHING = """
import os, signal, sys
from pathlib import Path
from drafter_trainer.checkpoint import CheckpointStore
from tests.unit.drafter_trainer.test_checkpoint import CHANGING_CALLS, PHASES, checkpoint

def crash(directory, phase, call):
    CheckpointStore(directory, keep=1).save(checkpoint(1))
    calls = 0
    def die_at_phase(reached):
        if reached == phase:
            os.kill(os.getpid(), signal.SIGKILL)
    def die_at_call(event, arguments):
        nonlocal calls
        if event in CHANGING_CALLS:
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(die_at_call)
    CheckpointStore(directory, keep=1, on_phase=die_at_phase).save(checkpoint(2))

def dies(name, *, phase="", call=-1):
    if (child := os.fork()) == 0:
        crash(Path(sys.argv[1]) / name, phase, call)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL), name
    return status != 0

for phase in PHASES:
    assert dies(phase, phase=phase), phase
call = 1
while dies(f"call-{call}", call=call):
    call += 1
print(call - 1)
"""


@dataclasses.dataclass(frozen=True)
class Crashed:
    """What processes left behind that died: a directory of checkpoints for each phase and call."""

    directory: Path
    calls: int


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Crashed:
    directory = tmp_path_factory.mktemp("crashed")
    command = [sys.executable, "-c", CRASHING, str(directory)]
    done = subprocess.run(command, check=True, timeout=110, stdout=subprocess.PIPE, text=True)
    return Crashed(directory, int(done.stdout))


def checkpoint(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    weights = {"fc.weight": torch.randn(4, 3, generator=generator)}
    moments = {0: {"step": torch.tensor(float(step)), "exp_avg": torch.randn(4, 3, generator=generator)}}
    groups = [{"lr": 0.1 / 3, "betas": (0.9, 0.999), "params": [0], "fused": None}]
    return Checkpoint(
        step=step,
        position=3 * step,
        identity={"run.seed": 1, "taps": (0, 2)},
        facts={"target": {"name": "tiny"}},
        counters={"tokens": 100 * step},
        model=weights,
        optimizer={"optimizers": [{"state": moments, "param_groups": groups}], "step_count": step},
    )


def assert_equal(loaded: Checkpoint | None, saved: Checkpoint) -> None:
    assert loaded is not None
    assert (loaded.step, loaded.position, loaded.counters) == (saved.step, saved.position, saved.counters)
    assert torch.equal(loaded.model["fc.weight"], saved.model["fc.weight"])
    ours, theirs = loaded.optimizer["optimizers"][0], saved.optimizer["optimizers"][0]
    assert ours["param_groups"] == theirs["param_groups"]
    assert all(torch.equal(ours["state"][0][name], theirs["state"][0][name]) for name in ("step", "exp_avg"))


def test_what_is_saved_comes_back_bit_equal_with_its_python_types(tmp_path: Path) -> None:  # case 89
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    assert store.load_latest() is None
    store.save(checkpoint(1))
    assert_equal(store.load_latest(), checkpoint(1))


def test_files_are_as_readable_as_the_umask_allows(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    before = os.umask(0o027)
    try:
        store.save(checkpoint(1))
    finally:
        os.umask(before)
    (directory,) = store.paths()
    assert {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()} == dict.fromkeys(
        ("manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"), 0o640
    )


def test_only_the_newest_are_kept_and_latest_points_to_the_last(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10):
        store.save(checkpoint(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-10", "step-2"]
    assert os.readlink(tmp_path / "latest") == "step-10"


def test_an_average_is_kept_and_is_what_is_evaluated_and_exported(tmp_path: Path) -> None:
    saved = checkpoint(1)
    assert saved.final_weights is saved.model
    average = {"fc.weight": saved.model["fc.weight"] / 2, "updates": torch.tensor(7)}
    CheckpointStore(tmp_path, keep=1).save(dataclasses.replace(saved, average=average))
    loaded = CheckpointStore(tmp_path, keep=1).load_latest()
    assert loaded is not None
    assert loaded.average is not None
    assert int(loaded.average["updates"]) == 7
    assert loaded.final_weights.keys() == saved.model.keys()
    assert torch.equal(loaded.final_weights["fc.weight"], average["fc.weight"])
    assert torch.equal(loaded.model["fc.weight"], saved.model["fc.weight"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["model", "optimizer", "average"])
def test_a_value_that_is_not_finite_is_never_written(where: str, bad: float, tmp_path: Path) -> None:  # I4, cases 7, 8
    store = CheckpointStore(tmp_path, keep=1)
    store.save(checkpoint(1))
    poisoned = dataclasses.replace(checkpoint(2), average={"fc.weight": torch.zeros(2)})
    tensors = {
        "model": poisoned.model["fc.weight"],
        "optimizer": poisoned.optimizer["optimizers"][0]["state"][0]["exp_avg"],
        "average": (poisoned.average or {})["fc.weight"],
    }
    tensors[where].view(-1)[0] = bad
    with pytest.raises(CheckpointError, match=f"step 2 is not written: not finite: {where} "):
        store.save(poisoned)
    assert_equal(store.load_latest(), checkpoint(1))
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "latest"}


@pytest.mark.parametrize("phase", PHASES)
def test_a_crash_at_any_phase_leaves_a_sound_checkpoint(phase: str, crashed: Crashed) -> None:  # I6, cases 86, 89
    complete = PHASES.index(phase) >= PHASES.index("renamed")
    assert_sound(crashed.directory / phase, step=2 if complete else 1)


def test_a_crash_before_any_system_call_leaves_a_sound_checkpoint(crashed: Crashed) -> None:  # I6, cases 86, 89
    assert crashed.calls > 20
    steps = []
    for call in range(1, crashed.calls + 1):
        directory = crashed.directory / f"call-{call}"
        found = CheckpointStore(directory, keep=1).load_latest()
        assert found is not None
        steps.append(found.step)
        assert_sound(directory, step=found.step)
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


def assert_sound(directory: Path, *, step: int) -> None:
    """The newest checkpoint is whole; the next run writes over whatever the crash left, and cleans up."""
    store = CheckpointStore(directory, keep=1)
    assert_equal(store.load_latest(), checkpoint(step))
    store.save(checkpoint(2))
    store.save(checkpoint(3))
    assert sorted(path.name for path in directory.iterdir()) == ["latest", "step-3"]
    assert_equal(store.load_latest(), checkpoint(3))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["cut", "flip", "missing"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    name: str, harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(checkpoint(1))
    path = store.save(checkpoint(2)) / name
    content, middle = path.read_bytes(), path.stat().st_size // 2
    if harm == "missing":
        path.unlink()
    else:
        rest = b"" if harm == "cut" else bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes(content[:middle] + rest)
    assert_equal(store.load_latest(), checkpoint(1))
    assert "going back to the one before" in caplog.text


def test_no_sound_checkpoint_at_all_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    (store.save(checkpoint(1)) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is sound"):
        store.load_latest()


def test_another_format_is_not_read(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path, keep=2).save(checkpoint(1))
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 99}))
    (path / "manifest.json").write_text(json.dumps({"files": {}}))
    with pytest.raises(CheckpointError):
        CheckpointStore(tmp_path, keep=2).load_latest()


def test_a_full_disk_is_told_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(checkpoint(1))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left"):
            store.save(checkpoint(2))
    assert_equal(store.load_latest(), checkpoint(1))


@pytest.mark.parametrize(
    "value", [1, None, "x", [1, (2, 3)], {"a": {1: 2.5, "b": ()}}, {"state": {}, "groups": [{"betas": (0.9, 0.95)}]}]
)
def test_nested_values_without_tensors_survive(value: Any) -> None:
    tensors, rest = split_tensors(value)
    assert not tensors
    assert join_tensors(json.loads(json.dumps(rest)), {}) == value


def test_differences_name_changed_missing_and_new_fields_only() -> None:
    saved = {"same": [1, 2], "changed": 1, "gone": 5}
    current = {"same": (1, 2), "changed": 2, "new": None, "also new": 0}
    assert differences(saved, current) == {"also new": (None, 0), "changed": (1, 2), "gone": (5, None)}


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_checkpoint_ahead_never_costs_a_sound_one(tmp_path: Path, keep: int) -> None:  # I6
    """After going back behind a torn checkpoint, the newest by number isn't the newest that's any good."""
    CheckpointStore(tmp_path, keep=9).save(checkpoint(10))
    CheckpointStore(tmp_path, keep=9).save(checkpoint(20))
    (tmp_path / "step-20" / "model.safetensors").write_bytes(b"torn")
    store = CheckpointStore(tmp_path, keep=keep)
    assert_equal(store.load_latest(), checkpoint(10))
    for step in (12, 14):
        store.save(checkpoint(step))
        assert_equal(store.load_latest(), checkpoint(step))
    sound = [path.name for path in store.paths() if path.name != "step-20"]
    assert sound == ["step-12", "step-14"][-keep:]
    store.save(checkpoint(20))
    assert_equal(store.load_latest(), checkpoint(20))
    assert len(store.paths()) == keep
