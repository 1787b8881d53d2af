"""Checkpoints: written so that a crash at any instant leaves the one before usable, read so that a torn one is noticed.

A checkpoint is a directory:

    model.safetensors        the drafter's fp32 weights (these are the masters; there's no second copy)
    optimizer.safetensors    the optimizer's tensors, `<optimizer>.<parameter>.<name>`
    average.safetensors      the moving average of the weights, fp32; only where one is kept
    state.json               everything else: step, plan position, schedule, counters, identity, target version, config
    manifest.json            size and CRC-32C of the files above; written last

No random state is needed: the plan and the anchors are drawn from (seed, epoch, sample), and the global generator is
set from (seed, step) before each step, so (seed, step) IS the state, for any number of ranks.

Order of writing, by phases that tests interrupt: `files` (each written and fsynced under a temporary directory),
`manifest`, `synced` (that directory fsynced), `renamed` (to its name, parent fsynced), `latest` (link replaced by
rename, parent fsynced), `pruned`. A value that is not finite is never written. No pickle anywhere. Never imports grpc
or config.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crc32c
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter_trainer.errors import CheckpointError

__all__ = ["Checkpoint", "CheckpointStore"]

logger = logging.getLogger(__name__)

FORMAT = 1
LATEST = "latest"
_STEP_NAME = re.compile(r"step-(\d+)")
_READ_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything a run needs to go on as if nothing had happened."""

    step: int
    """Steps done."""
    position: int
    """Plan position of the next micro-batch."""
    identity: dict[str, Any]
    """What decides the training, by dotted name; compared on resume."""
    facts: dict[str, Any]
    """For people and later tools: target, versions, config."""
    counters: dict[str, int]
    """Running totals (tokens, skipped steps)."""
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    """As ``DrafterOptimizer.state_dict`` gives it."""
    average: dict[str, Tensor] | None = None
    """As ``WeightAverage.state_dict`` gives it; None where none is kept."""

    @property
    def final_weights(self) -> dict[str, Tensor]:
        """What is evaluated and exported: the average where there is one, else the weights."""
        if self.average is None:
            return self.model
        return {name: self.average[name] for name in self.model}


class CheckpointStore:
    """The `checkpoints` directory of a run; used by one process at a time.

    Args:
        directory: Where checkpoints are.
        keep: How many are kept, the one just written and those before it. One that lies ahead is damaged (the run went
            back behind it) and doesn't count; it's replaced when the run gets there.
        on_phase: Told after each phase of writing; tests crash in it.
    """

    def __init__(self, directory: Path, *, keep: int, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        self._directory = directory
        self._keep = keep
        self._on_phase = on_phase

    def save(self, checkpoint: Checkpoint) -> Path:
        """Writes a checkpoint and moves `latest` to it.

        Raises:
            CheckpointError: A value is not finite, or the file system refused; the checkpoints before are as they were.
        """
        check_finite(checkpoint)
        try:
            return self._save(checkpoint)
        except OSError as error:
            raise CheckpointError(f"checkpoint of step {checkpoint.step} can't be written: {error}") from error

    def load_latest(self) -> Checkpoint | None:
        """The newest sound checkpoint; None when there's none at all.

        Raises:
            CheckpointError: There are some, and none is sound.
        """
        paths = self.paths()
        for path in reversed(paths):
            try:
                return read_checkpoint(path)
            except CheckpointError as error:
                logger.warning("%s; going back to the one before", error)
        if paths:
            raise CheckpointError(f"no checkpoint in {self._directory} is sound; start again in an empty run.dir")
        return None

    def paths(self) -> list[Path]:
        """Directories of all complete checkpoints, oldest first."""
        if not self._directory.is_dir():
            return []
        steps = {int(match[1]): p for p in self._directory.iterdir() if (match := _STEP_NAME.fullmatch(p.name))}
        return [steps[step] for step in sorted(steps)]

    def _save(self, checkpoint: Checkpoint) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        target = self._directory / f"step-{checkpoint.step}"
        temporary = self._directory / f".writing-{target.name}"
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that crashed here
        temporary.mkdir()
        write_files(temporary, checkpoint)
        self._on_phase("files")
        write_manifest(temporary)
        self._on_phase("manifest")
        sync_directory(temporary)
        self._on_phase("synced")
        if target.exists():  # a torn or outdated one of the same step
            shutil.rmtree(target)
        temporary.rename(target)
        sync_directory(self._directory)
        self._on_phase("renamed")
        self._point_latest_to(target)
        self._on_phase("latest")
        self._prune(target)
        self._on_phase("pruned")
        return target

    def _point_latest_to(self, target: Path) -> None:
        link = self._directory / f".{LATEST}"
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        link.replace(self._directory / LATEST)
        sync_directory(self._directory)

    def _prune(self, newest: Path) -> None:
        paths = self.paths()
        for path in paths[: max(paths.index(newest) + 1 - self._keep, 0)]:
            # Renamed first: a half-removed directory must not look like a checkpoint.
            doomed = path.with_name(f".removing-{path.name}")
            path.rename(doomed)
            shutil.rmtree(doomed)
        for leftover in self._directory.glob(".removing-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def check_finite(checkpoint: Checkpoint) -> None:
    """Refuses values that a resumed run could not recover from.

    Raises:
        CheckpointError: Names what is NaN or infinite.
    """
    moments, _ = split_tensors(checkpoint.optimizer)
    groups = {"model": checkpoint.model, "optimizer": moments, "average": checkpoint.average or {}}
    bad = [f"{group} {name}" for group, tensors in groups.items() for name, t in tensors.items() if not _is_finite(t)]
    if bad:
        names = f"{', '.join(bad[:3])}{f' and {len(bad) - 3} more' if len(bad) > 3 else ''}"
        raise CheckpointError(
            f"checkpoint of step {checkpoint.step} is not written: not finite: {names}; go on from the one before"
        )


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def write_files(directory: Path, checkpoint: Checkpoint) -> None:
    """Writes and syncs everything but the manifest."""
    tensors, optimizer_rest = split_tensors(checkpoint.optimizer)
    state = {
        "format": FORMAT,
        "step": checkpoint.step,
        "position": checkpoint.position,
        "identity": checkpoint.identity,
        "facts": checkpoint.facts,
        "counters": checkpoint.counters,
        "optimizer": optimizer_rest,
    }
    write_json(directory / "state.json", state)
    groups = {"model": checkpoint.model, "optimizer": tensors, "average": checkpoint.average}
    for name, values in groups.items():
        if values is None:
            continue
        path = directory / f"{name}.safetensors"
        save_file({key: value.contiguous() for key, value in values.items()}, path)
        # safetensors makes files that only their owner may read; whoever may read the state may read these.
        shutil.copymode(directory / "state.json", path)
        sync_file(path)


def write_manifest(directory: Path) -> None:
    """Writes size and checksum of every file in the directory."""
    files = {path.name: _digest(path) for path in sorted(directory.iterdir())}
    write_json(directory / "manifest.json", {"files": files})


def read_checkpoint(directory: Path) -> Checkpoint:
    """Reads and verifies one checkpoint.

    Raises:
        CheckpointError: It's torn, damaged or of another format.
    """
    try:
        _verify(directory)
        state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {directory} has format {state['format']}, this program reads {FORMAT}")
        tensors = load_file(directory / "optimizer.safetensors")
        return Checkpoint(
            step=state["step"],
            position=state["position"],
            identity=state["identity"],
            facts=state["facts"],
            counters=state["counters"],
            model=load_file(directory / "model.safetensors"),
            optimizer=join_tensors(state["optimizer"], tensors),
            average=load_file(average) if (average := directory / "average.safetensors").exists() else None,
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"checkpoint {directory} is torn: {error}") from error


def _verify(directory: Path) -> None:
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    for name, expected in manifest["files"].items():
        if _digest(directory / name) != expected:
            raise CheckpointError(f"checkpoint {directory} is damaged: {name} isn't what was written")


def _digest(path: Path) -> dict[str, int]:
    checksum, size = 0, 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            checksum = crc32c.crc32c(piece, checksum)
            size += len(piece)
    return {"bytes": size, "crc32c": checksum}


def split_tensors(values: Any) -> tuple[dict[str, Tensor], Any]:
    """Takes the tensors out of nested dicts and lists; JSON-ready rest with their names in their places."""
    tensors: dict[str, Tensor] = {}

    def strip(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value.detach()
            return {"__tensor__": path}
        if isinstance(value, dict):
            items = [[key, strip(item, f"{path}.{key}" if path else str(key))] for key, item in value.items()]
            return {"__dict__": items}  # as pairs: JSON would turn integer keys into text
        if isinstance(value, list | tuple):
            kind = "__tuple__" if isinstance(value, tuple) else "__list__"
            return {kind: [strip(item, f"{path}.{index}") for index, item in enumerate(value)]}
        return value

    return tensors, strip(values, "")


def join_tensors(rest: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of ``split_tensors``."""
    if not isinstance(rest, dict):
        return rest
    ((kind, content),) = rest.items()
    if kind == "__tensor__":
        return tensors[content]
    if kind == "__dict__":
        return {key: join_tensors(item, tensors) for key, item in content}
    items = [join_tensors(item, tensors) for item in content]
    return tuple(items) if kind == "__tuple__" else items


def differences(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields of two identities that differ: name -> (saved, current)."""
    as_json = json.loads(json.dumps(current))  # tuples become lists, as they did when saved
    names = sorted(saved.keys() | as_json.keys())
    return {name: (saved.get(name), as_json.get(name)) for name in names if saved.get(name) != as_json.get(name)}


def write_json(path: Path, values: Any) -> None:
    """Writes and syncs a JSON file."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def replace_json(path: Path, values: Any) -> None:
    """Writes a JSON file so that readers see the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    write_json(temporary, values)
    temporary.replace(path)
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Has the kernel write a file's bytes to the disk."""
    with _descriptor(path) as descriptor:
        os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Has the kernel write a directory's entries to the disk."""
    sync_file(path)


@contextlib.contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
