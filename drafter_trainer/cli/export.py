"""`drafter-trainer export`: a checkpoint as serving engines load it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter_trainer.cli.settings import read_settings, require
from drafter_trainer.errors import EXIT_DONE, UserError

if TYPE_CHECKING:
    from drafter_trainer.checkpoint import Checkpoint

__all__ = ["load_checkpoint", "run", "target_text", "trained_for"]


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
        trained_for=(target := trained_for(checkpoint)),
    )
    print(f"step {checkpoint.step} of the drafter for {target_text(target)} is in {output}")
    return EXIT_DONE


def trained_for(checkpoint: Checkpoint) -> dict[str, Any]:
    """The target that a checkpoint was last trained on, and how many of its versions came before."""
    target = checkpoint.facts["target"]
    facts = {name: target[name] for name in ("name", "version", "digest")}
    return {**facts, "earlier_versions": len(target["history"]) - 1}


def target_text(target: Mapping[str, Any]) -> str:
    """A target in words."""
    earlier = f", after {target['earlier_versions']} earlier ones" if target["earlier_versions"] else ""
    return f"{target['name']} (weights {target['digest']}, version {target['version']}{earlier})"


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
    """The target's factor on its embedding, as kept with its heads; engines read the bare table.

    It's the architecture's, and the same for all versions of a run's target.
    """
    from safetensors import safe_open  # noqa: PLC0415

    heads = run_dir / "heads"
    name = f"head-{checkpoint.facts['target']['digest']}.safetensors"
    found = [heads / name] if (heads / name).is_file() else sorted(heads.glob("head-*.safetensors"))
    if not found:
        raise UserError("run.dir", run_dir, f"{name} is missing from its heads; give the whole run directory")
    with safe_open(found[0], framework="numpy") as file:
        return float(json.loads(file.metadata()["facts"])["embedding_scale"])
