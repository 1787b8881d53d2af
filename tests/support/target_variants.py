"""Other versions of a checkpoint, as a fine-tune or an RL loop writes them, and what each of them computes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from target_server.config import ModelConfig
from target_server.loading import LoadedTarget, load_target

WEIGHTS = "model.safetensors"


def write_variant(checkpoint: Path, directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Writes a copy of a checkpoint whose tensors were changed in place by the callable; returns the directory."""
    shutil.copytree(checkpoint, directory)
    tensors = load_file(checkpoint / WEIGHTS)
    change(tensors)
    (directory / WEIGHTS).unlink()
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


def scaled(*parts: str, factor: float = 1.25) -> Callable[[dict[str, Tensor]], None]:
    """A change of the tensors whose name holds one of the parts; a power of two would change no direction."""

    def change(tensors: dict[str, Tensor]) -> None:
        names = [name for name in tensors if any(part in name for part in parts)]
        assert names, f"no tensor has {parts} in its name"
        for name in names:
            # Not in proportion: a norm would hide that.
            noise = torch.linspace(0.5, factor, tensors[name].numel()).view(tensors[name].shape)
            tensors[name] = (tensors[name] * noise).to(tensors[name].dtype)

    return change


class Oracle:
    """What each version computes, from models that were never swapped.

    Attributes:
        targets: by the digest of the weights.
    """

    def __init__(self, checkpoints: Mapping[str, Path], **settings: object) -> None:
        self.targets: dict[str, LoadedTarget] = {
            digest: load_target(ModelConfig(path=path, **settings), ["cpu"]) for digest, path in checkpoints.items()
        }
        self._rows: dict[tuple[str, tuple[int, ...], int], Tensor] = {}

    def rows(self, digest: str, ids: Sequence[int], tap: int) -> Tensor:
        """The rows of one sequence after one block, by a plain forward with `output_hidden_states`."""
        key = (digest, tuple(ids), tap)
        if key not in self._rows:
            with torch.no_grad():
                hidden = self.targets[digest].model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
            self._rows[key] = hidden[tap + 1][0]
        return self._rows[key]

    def head(self, digest: str) -> dict[str, Tensor]:
        """The tensors of the head by their names on the wire."""
        target = self.targets[digest]
        tensors = {"embed_tokens": target.model.get_input_embeddings().weight, "final_norm": target.decoder.norm.weight}
        if not target.description.tie_word_embeddings:
            tensors["lm_head"] = target.model.get_output_embeddings().weight
        return tensors
