"""`drafter-trainer export`: a checkpoint as serving engines load it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drafter_trainer.cli.settings import read_settings, require
from drafter_trainer.errors import EXIT_DONE, UserError

if TYPE_CHECKING:
    from drafter_trainer.checkpoint import Checkpoint

__all__ = ["load_checkpoint", "run"]


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Exports run.dir's latest checkpoint, or the one that is named."""
    config = read_settings(options, flags)
    if config is None:
        return EXIT_DONE
    require(config, "run.dir")
    run_dir = config.run.dir
    assert run_dir is not None, "required above"
    checkpoint = load_checkpoint(run_dir, options.checkpoint)
    output = options.output or run_dir / "export"
    import torch  # noqa: PLC0415 - after everything that can be wrong with the options

    from drafter_trainer.drafter_config import DrafterConfig  # noqa: PLC0415
    from drafter_trainer.export import export_drafter  # noqa: PLC0415

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[options.dtype]
    export_drafter(
        DrafterConfig.from_json(checkpoint.facts["drafter_config"]),
        checkpoint.final_weights,
        output,
        dtype=dtype,
        embedding_scale=_embedding_scale(checkpoint, run_dir),
    )
    print(f"step {checkpoint.step} of {checkpoint.facts['target']['name']}'s drafter is in {output}")
    return EXIT_DONE


def load_checkpoint(run_dir: Path, named: Path | None) -> Checkpoint:
    """The named checkpoint, else the newest sound one of the run."""
    directory = named or run_dir
    if not directory.is_dir():
        field = "--checkpoint" if named else "run.dir"
        raise UserError(field, directory, "no such directory; give one that training wrote")
    from drafter_trainer.checkpoint import CheckpointStore, read_checkpoint  # noqa: PLC0415 - loads torch

    if named is not None:
        return read_checkpoint(named)
    checkpoint = CheckpointStore(directory / "checkpoints", keep=1).load_latest()
    if checkpoint is None:
        raise UserError("run.dir", directory, "holds no checkpoint yet; give the directory of a run that has one")
    return checkpoint


def _embedding_scale(checkpoint: Checkpoint, run_dir: Path) -> float:
    """The target's factor on its embedding, as kept with its head; engines read the bare table."""
    from safetensors import safe_open  # noqa: PLC0415

    head = run_dir / "heads" / f"head-{checkpoint.facts['target']['digest']}.safetensors"
    if not head.is_file():
        raise UserError("run.dir", run_dir, f"{head.name} is missing from its heads; give the whole run directory")
    with safe_open(head, framework="numpy") as file:
        return float(json.loads(file.metadata()["facts"])["embedding_scale"])
