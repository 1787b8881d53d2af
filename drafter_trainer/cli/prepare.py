"""`drafter-trainer prepare`: conversations to a prepared dataset, with a summary of what was kept and dropped."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from drafter_trainer.cli.inspect import describe_dataset
from drafter_trainer.cli.progress import shown_progress
from drafter_trainer.cli.settings import read_settings, require
from drafter_trainer.config import TrainerConfig
from drafter_trainer.dataset import TokenDataset
from drafter_trainer.errors import EXIT_DONE
from drafter_trainer.prepare import open_configured_dataset

__all__ = ["open_with_progress", "run"]


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Prepares `data.path`, or says that it is prepared already."""
    config = read_settings(options, flags)
    if config is not None:
        print(describe_dataset(open_with_progress(config)), end="")
    return EXIT_DONE


def open_with_progress(config: TrainerConfig) -> TokenDataset:
    """The dataset of `data.path`, prepared first where that is needed, with progress for whoever watches."""
    require(config, "data.path")
    with shown_progress() as on_progress:
        return open_configured_dataset(config, on_progress=on_progress)
