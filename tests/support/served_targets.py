"""Random targets as checkpoint directories, which a server loads."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.random_targets import ARCHITECTURES, VOCAB_SIZE, random_target

__all__ = ["ARCHITECTURES", "LAYERS", "VOCAB_SIZE", "some_ids", "write_target"]

LAYERS = 6


def write_target(directory: Path, architecture: str, *, dtype: torch.dtype = torch.float32, seed: int = 3) -> Path:
    """Writes a random checkpoint of an architecture into a new directory and returns it."""
    random_target(architecture, num_layers=LAYERS, seed=seed, scale=4.0, dtype=dtype).save_pretrained(directory)
    return directory


def some_ids(length: int, *, seed: int = 0) -> list[int]:
    """Random token ids."""
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
