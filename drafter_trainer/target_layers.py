"""Starts a drafter's layers as copies of the target's last ones.

A drafter borrows the target's head, and its context keys and values come from the target's states; the target's last
blocks are layers that already turn such states into rows for that head. From them a drafter learns faster than from
random weights where steps are few: after 240 steps on SmolLM2-135M's answers (docs/log.md) it accepted 1.5 tokens a
round where the random start accepted 1.4.

    layer i        block N - L + i of the target: projections, MLP and norms
    q_norm, k_norm the target's own; where it has none, per dimension the size that a white input would give its queries
                   and keys, so that attention starts as sharp as the target's
    fc             passes the last tap on, so that layer 0's context is about what its block has seen in the target
    hidden_norm    the input norm of the first copied block
    norm           the target's final norm

Owns the mapping and what must fit. Reads safetensors only; loads no model. Everything stays trainable.

Shapes: E hidden, H head dim, L drafter layers, N target blocks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from drafter_trainer.model import Drafter, Layer

__all__ = ["TargetLayersError", "copy_target_layers"]

# Pre-norm blocks of SwiGLU and grouped-query attention with plain RMSNorm gains: the drafter's own kind.
_KINDS = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_REST = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")


class TargetLayersError(ValueError):
    """The target's blocks can't start this drafter; the message says why."""


@torch.no_grad()
def copy_target_layers(drafter: Drafter, target_dir: Path) -> None:
    """Overwrites the drafter's weights with the target's.

    Args:
        drafter: Any weights; its geometry must be the target's.
        target_dir: Hugging Face directory of the target, safetensors.

    Raises:
        TargetLayersError: Another kind of block, other sizes, or files that aren't there.
    """
    reader = _Reader(target_dir)
    first = reader.num_layers - len(drafter.layers)
    if first < 0:
        raise TargetLayersError(f"the target has {reader.num_layers} blocks for {len(drafter.layers)} drafter layers")
    for index, layer in enumerate(drafter.layers):
        assert isinstance(layer, Layer)
        _copy_layer(layer, reader, f"model.layers.{first + index}", head_dim=drafter.config.head_dim)
    size = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -size:] = torch.eye(size)
    _assign(drafter.hidden_norm.weight, reader.tensor(f"model.layers.{first}.input_layernorm.weight"), "hidden_norm")
    _assign(drafter.norm.weight, reader.tensor("model.norm.weight"), "norm")


def _copy_layer(layer: Layer, reader: _Reader, prefix: str, *, head_dim: int) -> None:
    for name in (*_PROJECTIONS, *_REST):
        _assign(layer.get_parameter(f"{name}.weight"), reader.tensor(f"{prefix}.{name}.weight"), name)
    gain_E = layer.input_layernorm.weight
    for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        own = reader.tensor_or_none(f"{prefix}.self_attn.{norm}.weight")
        if own is None:
            weight = layer.get_parameter(f"self_attn.{projection}.weight")
            own = (weight * gain_E).square().sum(1).view(-1, head_dim).mean(0).sqrt()
        _assign(layer.get_parameter(f"self_attn.{norm}.weight"), own, norm)


def _assign(parameter: Tensor, value: Tensor, name: str) -> None:
    if parameter.shape != value.shape:
        theirs, ours = list(value.shape), list(parameter.shape)
        raise TargetLayersError(f"{name} is {theirs} in the target and {ours} in the drafter")
    parameter.copy_(value)


class _Reader:
    """Tensors of a Hugging Face directory by name, whole or sharded."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        config = self._json("config.json")
        kind = config.get("model_type")
        if kind not in _KINDS:
            raise TargetLayersError(f"its model_type is {kind!r}, not one of {', '.join(sorted(_KINDS))}")
        self.num_layers: int = config["num_hidden_layers"]
        index = directory / "model.safetensors.index.json"
        self._file_of: dict[str, str] | None = self._json(index.name)["weight_map"] if index.exists() else None

    def tensor(self, name: str) -> Tensor:
        """The tensor, fp32."""
        found = self.tensor_or_none(name)
        if found is None:
            raise TargetLayersError(f"{name} is not in it")
        return found

    def tensor_or_none(self, name: str) -> Tensor | None:
        """The tensor, fp32, or None when the checkpoint has no such name."""
        file = "model.safetensors" if self._file_of is None else self._file_of.get(name)
        if file is None:
            return None
        try:
            with safe_open(self._directory / file, framework="pt") as opened:
                return opened.get_tensor(name).float() if name in opened.keys() else None  # noqa: SIM118
        except OSError as error:
            raise TargetLayersError(f"{file} can't be read ({error})") from error

    def _json(self, name: str) -> dict[str, Any]:
        try:
            read: dict[str, Any] = json.loads((self._directory / name).read_text())
        except (OSError, ValueError) as error:
            raise TargetLayersError(f"{name} can't be read ({error})") from error
        return read
