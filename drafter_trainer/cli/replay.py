"""`drafter-trainer replay DUMP`: does a dumped micro-batch again and says where it stops being finite."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drafter_trainer.errors import EXIT_DONE, EXIT_FAILED, UserError
from drafter_trainer.logging_setup import setup_logging

if TYPE_CHECKING:
    from drafter_trainer.dump import Dump
    from drafter_trainer.replay import Replay

__all__ = ["run"]

# More names than this say nothing more.
_NAMED = 6


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Prints what came out. Exit code 1 where it isn't what was seen then."""
    setup_logging(verbose=options.verbose)
    if flags:
        raise UserError("command line", flags[0], "not understood; see drafter-trainer replay --help")
    path: Path = options.dump
    if not (path / "dump.json").is_file():
        raise UserError("DUMP", path, "is no dump; give a directory under run.dir/bad")
    from drafter_trainer.devices import resolve_device  # noqa: PLC0415 - loads torch
    from drafter_trainer.dump import read_dump  # noqa: PLC0415
    from drafter_trainer.replay import checkpoint_weights, replay_dump  # noqa: PLC0415

    try:
        device = resolve_device(options.device)
    except (ValueError, RuntimeError) as error:
        raise UserError("--device", options.device, " ".join(str(error).split())) from error
    dump = read_dump(path)
    weights = checkpoint_weights(options.checkpoint) if options.checkpoint is not None else None
    replay = replay_dump(dump, weights=weights, device=device)
    print(json.dumps(replay.to_json()) if options.json else as_text(dump, replay))
    return EXIT_DONE if replay.reproduced else EXIT_FAILED


def as_text(dump: Dump, replay: Replay) -> str:
    """The result in words."""
    from drafter_trainer.tally import Culprit  # noqa: PLC0415

    culprit = dump.facts["culprit"]
    verdict = "reproduced" if replay.reproduced else "not reproduced"
    if replay.reproduced and not replay.exact:
        verdict += " to rounding"
    gradients = ", ".join(replay.bad_gradients[:_NAMED]) or "none"
    if len(replay.bad_gradients) > _NAMED:
        gradients += f" and {len(replay.bad_gradients) - _NAMED} more"
    lines = [
        f"step {dump.facts['step']}, {Culprit(**{**culprit, 'sample_ids': tuple(culprit['sample_ids'])})}",
        f"loss       {replay.loss!r}, recorded {replay.recorded_loss!r}: {verdict}",
        f"features   {replay.bad_features:,} of {dump.batch.features_TC.numel():,} values are not finite"
        + (f"; the first is {replay.first_bad_feature}" if replay.bad_features else ""),
        f"forward    {f'stops being finite in {replay.first_bad_module}' if replay.first_bad_module else 'is finite'}",
        f"gradient   norm {replay.grad_norm:g}; not finite: {gradients}",
    ]
    return "\n".join(lines)
