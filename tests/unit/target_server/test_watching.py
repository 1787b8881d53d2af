"""Which checkpoint of a watched directory is served, and when."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from target_server.config import SwapConfig
from target_server.watching import CheckpointWatch


def write(directory: Path, written_s: int) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"w": torch.ones(3)}, directory / "model.safetensors")
    os.utime(directory / "model.safetensors", (written_s, written_s))
    return directory


@pytest.fixture
def served(tmp_path: Path) -> Path:
    return write(tmp_path / "step-10", 10)


def watch(directory: Path, **settings: object) -> CheckpointWatch:
    return CheckpointWatch(directory, SwapConfig(watch_settle_s=5, **settings))


def test_checkpoint_is_complete_when_nothing_has_changed_for_a_while(served: Path) -> None:
    seen = watch(served.parent)
    new = write(served.parent / "step-20", 20)
    assert seen.newest(served, 100.0) is None
    assert seen.newest(served, 104.9) is None
    write(new, 21)  # still being written
    assert seen.newest(served, 105.0) is None
    assert seen.newest(served, 110.0) == new


def test_shards_that_the_index_names_are_waited_for(served: Path) -> None:
    seen = watch(served.parent)
    new = write(served.parent / "step-20", 20)
    index = {"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}}
    (new / "model.safetensors.index.json").write_text(json.dumps(index))
    seen.newest(served, 100.0)
    assert seen.newest(served, 200.0) is None
    save_file({"v": torch.ones(3)}, new / "model-2.safetensors")
    seen.newest(served, 201.0)
    assert seen.newest(served, 206.0) == new


def test_marker_counts_alone_where_it_is_asked_for(served: Path) -> None:
    seen = watch(served.parent, watch_marker="DONE")
    new = write(served.parent / "step-20", 20)
    seen.newest(served, 100.0)
    assert seen.newest(served, 200.0) is None
    (new / "DONE").touch()
    assert seen.newest(served, 200.1) == new


def test_only_the_newest_is_taken_and_none_that_is_older_than_the_served(served: Path) -> None:
    seen = watch(served.parent, watch_marker="config.json")
    write(served.parent / "step-5", 5)
    assert seen.newest(served, 100.0) is None
    write(served.parent / "step-20", 20)
    newest = write(served.parent / "step-30", 30)
    assert seen.newest(served, 100.0) == newest
    assert seen.newest(newest, 100.0) is None


def test_one_that_was_tried_is_not_tried_again_unless_its_files_change(served: Path) -> None:
    seen = watch(served.parent, watch_marker="config.json")
    new = write(served.parent / "step-20", 20)
    assert seen.newest(served, 100.0) == new
    seen.tried(new)
    assert seen.newest(served, 100.0) is None
    write(new, 22)
    assert seen.newest(served, 100.0) == new


def test_directory_that_vanishes_is_no_failure(served: Path, tmp_path: Path) -> None:
    assert watch(tmp_path / "none").newest(served, 0.0) is None
