"""Puts other weights into a loaded model, in place: every parameter and buffer gets the bytes of another checkpoint.

How a stored tensor becomes a live one is transformers' business. For most architectures it is the identity, name by
name, and then it is done here without transformers: on the CPU a parameter takes over the pages of the mapped file
(replicas go on sharing them, and nothing is copied), on an accelerator, or where the element type is converted, it is
copied into. Where transformers rearranges what is stored (fused experts), the other checkpoint is loaded as at a start,
and its tensors are moved over. Live tensors that share memory (tied weights) are one group and stay so.

`Placement.apply` and `Placement.undo` must run while nothing uses the model; everything else may run beside a forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from target_server.checkpoint import weight_files
from target_server.config import ModelConfig
from target_server.errors import UserError
from target_server.loading import LoadedTarget, load_target

__all__ = ["Placement", "WeightMap", "map_weights", "open_weights"]

# Elements of each tensor that are compared to tell whether it is stored as it is used.
_SAMPLES = 64


@dataclass(frozen=True)
class _Group:
    """Live tensors that are one: the same memory under one or several names."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class WeightMap:
    """Which stored tensor each live one comes from.

    Attributes:
        groups: every live tensor that a checkpoint decides, each once.
        stored_names: for each group the stored tensor; None when transformers rearranges what is stored.
    """

    groups: tuple[_Group, ...]
    stored_names: tuple[str, ...] | None

    def stored_name_of(self, tensor: torch.Tensor) -> str | None:
        """Returns the stored tensor that a live one comes from; None where that is not known."""
        if self.stored_names is None:
            return None
        for group, name in zip(self.groups, self.stored_names, strict=True):
            if any(live.data_ptr() == tensor.data_ptr() and live.shape == tensor.shape for live in group.tensors):
                return name
        return None


def open_weights(path: Path) -> dict[str, torch.Tensor]:
    """Maps a checkpoint's tensors by their stored names: nothing is read before it is used.

    The mappings outlive a removal of the files. Like every served checkpoint's, the files must not be overwritten.

    Raises:
        UserError: files are missing or damaged.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as content:
                tensors.update({name: content.get_tensor(name) for name in content.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError("checkpoint", file, "can't be mapped; copy it again") from error
    return tensors


def map_weights(target: LoadedTarget, checkpoint: Path) -> WeightMap:
    """Finds out how a model's tensors are stored in the checkpoint that it was just loaded from.

    Raises:
        UserError: the files are damaged.
    """
    groups: dict[tuple[Any, ...], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in target.model.state_dict(keep_vars=True).items():
        key = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        groups.setdefault(key, []).append((name, tensor))
    found = tuple(_Group(tuple(n for n, _ in members), tuple(t for _, t in members)) for members in groups.values())
    stored = open_weights(checkpoint)
    names = [next((name for name in group.names if _is_stored_as(group, stored.get(name))), "") for group in found]
    return WeightMap(found, tuple(names) if all(names) else None)


class Placement:
    """Another checkpoint's weights, ready to be put into a model, and the way back."""

    def __init__(
        self, target: LoadedTarget, weights: WeightMap, settings: ModelConfig, *, old: Path, new: Path
    ) -> None:
        """Maps what can be mapped beforehand.

        Args:
            target: the model.
            weights: its map.
            settings: how it was loaded.
            old: checkpoint that it holds now.
            new: checkpoint that it is to hold; its tensors have the same names, shapes and types.

        Raises:
            UserError: the new checkpoint's files are missing or damaged.
        """
        self._target = target
        self._weights = weights
        self._settings = settings
        self._old, self._new = old, new
        self._mapped = open_weights(new) if weights.stored_names is not None else None
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copied = False

    def apply(self) -> None:
        """Puts the new weights in. Whatever it raises, `undo` brings the old ones back."""
        self._put(self._mapped if self._mapped is not None else self._load(self._new), remember=True)
        _synchronize(self._target)

    def undo(self) -> None:
        """Puts the old weights back, as far as `apply` had come.

        Raises:
            Exception: they can't be read any more; then the model is a mixture and must not be used.
        """
        # The last first: a tensor of two names may have been taken twice.
        for tensor, data in reversed(self._before):
            tensor.data = data
        self._before.clear()
        if self._copied:
            old = open_weights(self._old) if self._weights.stored_names is not None else self._load(self._old)
            self._put(old, remember=False)
            self._copied = False
        _synchronize(self._target)

    def _put(self, sources: Mapping[str, torch.Tensor], *, remember: bool) -> None:
        for index, group in enumerate(self._weights.groups):
            source = sources[self._source_name(index)]
            if _shares_pages(group, source):
                for tensor in group.tensors:
                    if remember:
                        self._before.append((tensor, tensor.data))
                        tensor.data = source
            else:
                # Noted first: a copy that fails half way must be undone too.
                self._copied = True
                group.tensors[0].data.copy_(source)

    def _source_name(self, index: int) -> str:
        if self._weights.stored_names is not None:
            return self._weights.stored_names[index]
        return self._weights.groups[index].names[0]

    def _load(self, checkpoint: Path) -> dict[str, torch.Tensor]:
        """Loads a checkpoint beside the model as at a start. Changes torch's default type meanwhile."""
        settings = self._settings.model_copy(update={"path": checkpoint})
        other: dict[str, torch.Tensor] = load_target(settings, ["cpu"]).model.state_dict()
        return other


def _is_stored_as(group: _Group, stored: torch.Tensor | None) -> bool:
    """Whether a stored tensor is the live one, converted to its type at most: by shape and a sample of its elements."""
    live = group.tensors[0]
    if stored is None or stored.shape != live.shape:
        return False
    count = min(_SAMPLES, live.numel())
    if not count:
        return True
    # Not evenly spread: steps of 65 through a square of 64 would see its diagonal alone, the same when transposed.
    index = torch.randint(live.numel(), (count,), generator=torch.Generator().manual_seed(live.numel()))
    ours = live.detach().reshape(-1)[index.to(live.device)].cpu()
    theirs = stored.reshape(-1)[index].to(live.dtype)
    return bool(torch.equal(ours, theirs))


def _shares_pages(group: _Group, source: torch.Tensor) -> bool:
    live = group.tensors[0]
    return live.device.type == "cpu" and source.dtype == live.dtype and live.is_contiguous() and source.is_contiguous()


def _synchronize(target: LoadedTarget) -> None:
    """Waits for copies to the devices: an error of one must show here, and no forward may start before its end."""
    devices = {tensor.device for tensor in target.model.state_dict().values()}
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
