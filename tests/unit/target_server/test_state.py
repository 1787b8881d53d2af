"""Which version a server goes on with after a restart."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from target_server.config import ServerConfig
from target_server.errors import UserError
from target_server.state import VersionStore, check_swap_directories, checkpoint_root
from target_server.versions import Version, VersionRecord, files_mark, weights_digest

STATE = ".a.target-state.json"


def write(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"w": torch.full((2,), float(ord(directory.name[0])))}, directory / "model.safetensors")
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        write(tmp_path / name)
    return tmp_path


def config(root: Path, name: str = "a", **swap: object) -> ServerConfig:
    return ServerConfig(model={"path": root / name}, swap=swap)


def record(root: Path, name: str, number: int) -> VersionRecord:
    path = root / name
    return VersionRecord(number, weights_digest(path), path, files_mark(path))


def started(root: Path, name: str = "a", **swap: object) -> VersionStore:
    """A store whose first replica has loaded."""
    store = VersionStore(config(root, name, **swap))
    current = store.current
    digest = weights_digest(current.checkpoint)
    number = current.number + (current.digest not in ("", digest))
    store.loaded(replace(current, number=number, digest=digest, mark=files_mark(current.checkpoint)))
    return store


def test_server_that_never_swaps_writes_nothing(root: Path) -> None:
    store = started(root)
    assert store.current == record(root, "a", 1)
    assert sorted(path.name for path in root.iterdir()) == ["a", "b", "c"]


def test_swapped_version_is_served_after_a_restart(root: Path) -> None:
    store = started(root)
    store.commit(record(root, "b", 2), "first")
    store.commit(record(root, "c", 3), "second")
    again = started(root)
    assert again.current == record(root, "c", 3)
    assert again.earlier == (record(root, "b", 2), record(root, "a", 1))
    finished = again.finished("first")
    assert finished is not None
    assert (finished.checkpoint, finished.version) == (root / "b", Version(2, weights_digest(root / "b")))
    assert again.finished("third") is None


def test_full_disk_changes_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # I8
    store = started(root)
    store.commit(record(root, "b", 2), "first")
    before = (root / STATE).read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.commit(record(root, "c", 3), "second")
    assert store.current == record(root, "b", 2)
    assert store.finished("second") is None
    assert (root / STATE).read_bytes() == before
    assert sorted(path.name for path in root.iterdir()) == [STATE, "a", "b", "c"]


def test_files_that_changed_in_place_are_another_version(root: Path) -> None:
    store = started(root)
    store.commit(record(root, "b", 2), "first")
    (root / "b" / "model.safetensors").write_bytes((root / "c" / "model.safetensors").read_bytes())
    again = started(root)
    assert (again.current.number, again.current.digest) == (3, weights_digest(root / "c"))
    assert started(root).current == again.current


def test_number_grows_when_the_user_configures_another_checkpoint(root: Path) -> None:
    file = root / "state.json"
    started(root, state_file=file)
    assert file.is_file(), "a state file that was asked for is always written"
    assert started(root, "b", state_file=file).current == record(root, "b", 2)
    assert started(root, "b", state_file=file).current == record(root, "b", 2)
    again = started(root, "a", state_file=file)
    assert (again.current, again.earlier[0]) == (record(root, "a", 3), record(root, "b", 2))


def test_checkpoint_that_is_gone_is_named(root: Path) -> None:
    store = started(root)
    store.commit(record(root, "b", 2), "first")
    (root / "b" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"names version 2 in .*/b: holds no .*; or remove the file") as refused:
        VersionStore(config(root))
    assert refused.value.field == "swap.state_file"


@pytest.mark.parametrize("content", ["", "{}", '{"format": 2}', "[1]", '{"format": 1, "configured": 3}'])
def test_damaged_file_is_refused_in_one_line(content: str, root: Path) -> None:
    (root / STATE).write_text(content)
    with pytest.raises(UserError, match="is no state of a target server") as refused:
        VersionStore(config(root))
    assert "\n" not in str(refused.value)


def test_file_that_another_server_writes_refuses_swaps(root: Path) -> None:
    one, other = started(root), started(root)
    one.check_writable()
    one.commit(record(root, "b", 2), "first")
    one.check_writable()
    with pytest.raises(UserError, match="another server writes it too"):
        other.check_writable()


def test_place_that_can_not_be_written_refuses_swaps(root: Path) -> None:
    store = VersionStore(config(root, state_file=Path("/proc/none/state.json")))
    with pytest.raises(UserError, match=r"swap.state_file: .*: can't be written"):
        store.check_writable()


def test_root_is_where_the_model_lies_unless_given(root: Path) -> None:
    (root / "link").symlink_to(root / "a")
    assert checkpoint_root(config(root, "link")) == root
    assert checkpoint_root(config(root, checkpoint_root=root / "b")) == root / "b"


def test_directories_for_swaps_must_be_there(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_swap_directories(config(root, watch_dir=root / "b"))
    for swap, message in (
        ({"watch_dir": root / "none"}, "swap.watch_dir: .*none: no such directory"),
        ({"checkpoint_root": root / "none"}, "swap.checkpoint_root: .*none: no such directory"),
        ({"watch_dir": tmp_path_factory.mktemp("elsewhere")}, "swap.watch_dir: .*: lies outside of"),
    ):
        with pytest.raises(UserError, match=message):
            check_swap_directories(config(root, **swap))
