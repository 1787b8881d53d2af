"""Keeps a micro-batch that made something not finite, so that it can be looked at and done again.

A dump is a directory:

    dump.json            what happened, and the settings of the arithmetic
    batch.safetensors    features, token ids, loss mask, anchors
    model.safetensors    the drafter's fp32 weights at that step; where each rank holds only a part of them, they are
                         put together at the step's end (a bad step changes none), and missing if the run ended before
    head.safetensors     the target's head of the batch's version (a hard link to the run's own)

Each holds the drafter's weights, so only the first few of a run are kept. Never fails a run: a disk that is full costs
the dump. No pickle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from drafter_trainer.anchors import Anchors
from drafter_trainer.checkpoint import write_json
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.errors import UserError
from drafter_trainer.loss import Distillation
from drafter_trainer.model import Drafter
from drafter_trainer.step_records import BadBatch, StepSettings
from drafter_trainer.types import MicroBatch, TrainBatch, Version
from drafter_trainer.vocabulary import VocabSampler

__all__ = ["Dump", "DumpWriter", "read_dump"]

logger = logging.getLogger(__name__)

FORMAT = 1
WEIGHTS = "model.safetensors"
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class DumpWriter:
    """Writes dumps of one run; an engine's ``on_bad``.

    Args:
        directory: Where dumps go, one directory each.
        drafter: Whose weights they hold.
        settings: The arithmetic's.
        heads_dir: The run's heads, by version digest.
        most: Dumps kept; later ones are only counted.
    """

    def __init__(
        self, directory: Path, *, drafter: Drafter, settings: StepSettings, heads_dir: Path, most: int
    ) -> None:
        self._directory = directory
        self._drafter = drafter
        self._settings = settings
        self._heads_dir = heads_dir
        self._most = most
        self._without_weights: list[Path] = []

    def __call__(self, bad: BadBatch) -> None:
        """Writes one, unless there are enough."""
        there = len(list(self._directory.glob("step-*"))) if self._directory.is_dir() else 0
        if there >= self._most:
            return
        name = f"step-{bad.step}-position-{bad.culprit.position}"
        temporary = self._directory / f".writing-{name}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            self._write(temporary, bad)
            shutil.rmtree(self._directory / name, ignore_errors=True)  # of a run that was resumed before it
            dump = temporary.rename(self._directory / name)
        except OSError as error:
            logger.warning("the batch at plan position %d can't be kept: %s", bad.culprit.position, error)
            shutil.rmtree(temporary, ignore_errors=True)
            return
        if not (dump / WEIGHTS).exists():
            self._without_weights.append(dump)
        logger.warning("kept: drafter-trainer replay %s", dump)

    def add_weights(self, weights: dict[str, Tensor]) -> None:
        """Adds the whole weights to dumps that were written without, since each rank holds only a part of them."""
        for dump in self._without_weights:
            temporary = dump / f".{WEIGHTS}"
            try:
                _save(temporary, weights)
                temporary.rename(dump / WEIGHTS)
            except OSError as error:
                logger.warning("the weights of %s can't be kept: %s", dump, error)
                temporary.unlink(missing_ok=True)
        self._without_weights.clear()

    def _write(self, directory: Path, bad: BadBatch) -> None:
        batch, anchors, settings = bad.fed.batch, bad.prepared.anchors, self._settings
        tensors = {
            "features_TC": batch.features_TC,
            "input_ids_T": batch.micro.input_ids_T,
            "loss_mask_T": batch.micro.loss_mask_T.to(torch.uint8),
            **{f"anchors.{field.name}": getattr(anchors, field.name) for field in dataclasses.fields(anchors)},
        }
        if batch.last_TD is not None:
            tensors["last_TD"] = batch.last_TD
        if settings.sampler is not None:
            tensors["sampler.always"] = settings.sampler.always
        _save(directory / "batch.safetensors", tensors)
        weights = self._drafter.state_dict()
        if not any(isinstance(weight, DTensor) for weight in weights.values()):
            _save(directory / WEIGHTS, weights)
        head = self._heads_dir / f"head-{batch.target_version.digest}.safetensors"
        if head.is_file():
            _link(head, directory / "head.safetensors")
        write_json(directory / "dump.json", self._facts(bad))

    def _facts(self, bad: BadBatch) -> dict[str, Any]:
        settings, batch = self._settings, bad.fed.batch
        sampler = settings.sampler
        return {
            "format": FORMAT,
            "step": bad.step,
            "culprit": dataclasses.asdict(bad.culprit),
            # As text: JSON has no NaN.
            "loss_sum": repr(bad.loss_sum),
            "weight_sum": bad.weight_sum,
            "epoch": batch.micro.epoch,
            "lengths": batch.micro.lengths,
            "target_version": list(batch.target_version),
            "final_norm_offset": settings.final_norm_offset,
            "drafter_config": self._drafter.config.to_json(),
            "gamma": settings.gamma,
            "dpace_alpha": settings.dpace_alpha,
            "chunk_rows": settings.chunk_rows,
            "distillation": dataclasses.asdict(settings.distillation) if settings.distillation else None,
            "sampler": {"rows": sampler.rows, "seed": sampler.seed} if sampler is not None else None,
            "compute_dtype": str(settings.compute_dtype),
            "device": settings.device.type,
        }


@dataclasses.dataclass(frozen=True)
class Dump:
    """A dump as read."""

    directory: Path
    facts: dict[str, Any]
    batch: TrainBatch
    anchors: Anchors
    weights: dict[str, Tensor] | None
    """None where each rank held only a part of them, and the run ended before they were put together."""
    sampler: VocabSampler | None

    @property
    def config(self) -> DrafterConfig:
        """The drafter's shape."""
        return DrafterConfig.from_json(self.facts["drafter_config"])

    @property
    def loss_sum(self) -> float:
        """The number that was seen, of this micro-batch alone."""
        return float(self.facts["loss_sum"])

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of products then."""
        return _DTYPES[self.facts["compute_dtype"]]

    @property
    def distillation(self) -> Distillation | None:
        """As it was."""
        values = self.facts["distillation"]
        return Distillation(**values) if values else None

    @property
    def head_path(self) -> Path:
        """The target's head."""
        return self.directory / "head.safetensors"


def read_dump(directory: Path) -> Dump:
    """Reads a dump.

    Raises:
        UserError: It's none, or a part is missing.
    """
    try:
        facts = json.loads((directory / "dump.json").read_text(encoding="utf-8"))
        if facts["format"] != FORMAT:
            raise UserError("DUMP", directory, f"has format {facts['format']}, this program reads {FORMAT}")
        tensors = load_file(directory / "batch.safetensors")
        model = directory / WEIGHTS
        weights = load_file(model) if model.exists() else None
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        fix = f"is no dump ({error}); give a directory under run.dir/bad"
        raise UserError("DUMP", directory, fix) from error
    culprit = facts["culprit"]
    micro = MicroBatch(
        position=culprit["position"],
        epoch=facts["epoch"],
        sample_ids=tuple(culprit["sample_ids"]),
        lengths=tuple(facts["lengths"]),
        input_ids_T=tensors["input_ids_T"],
        loss_mask_T=tensors["loss_mask_T"].bool(),
    )
    version = Version(*facts["target_version"])
    batch = TrainBatch(micro, tensors["features_TC"], version, culprit["replica_index"], tensors.get("last_TD"))
    anchors = Anchors(**{field.name: tensors[f"anchors.{field.name}"] for field in dataclasses.fields(Anchors)})
    sampler = VocabSampler(**facts["sampler"], always=tensors["sampler.always"]) if facts["sampler"] else None
    return Dump(directory, facts, batch, anchors, weights, sampler)


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(str(error)) from error


def _link(source: Path, target: Path) -> None:
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)
