"""Rotary position tables from the drafter's own config.

Owns inverse frequencies (always fp32: bf16 frequencies misplace positions beyond a few hundred), partial rotary and
scaling. Scaling formulas are transformers' own, so that an exported drafter rotates alike when served.

Shapes: R rows, H head dim, P rotated dims (even, <= H).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from drafter_trainer.drafter_config import DrafterConfig

__all__ = ["RotaryTable", "apply_rotary"]


class RotaryTable:
    """Cosines and sines of absolute positions. Not a module: no buffer may enter the published state dict."""

    def __init__(self, config: DrafterConfig) -> None:
        """Compute the inverse frequencies of `config`."""
        self.inverse_frequency, self.attention_scaling = _frequencies(config)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each fp32 [R, P], of integer positions [R], on the positions' device."""
        if self.inverse_frequency.device != positions.device:
            self.inverse_frequency = self.inverse_frequency.to(positions.device)
        angle = positions[:, None].float() * self.inverse_frequency
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling


def apply_rotary(rows_RNH: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first P dims of every head, halves paired (neox style): [R, N, H] in the rows' dtype."""
    cos, sin = (part[:, None].to(rows_RNH.dtype) for part in table)
    rotated = cos.shape[-1]
    x, rest = rows_RNH[..., :rotated], rows_RNH[..., rotated:]
    first, second = x.chunk(2, dim=-1)
    x = x * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([x, rest], dim=-1) if rest.shape[-1] else x


def _frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    scaling: dict[str, Any] = dict(config.rope_scaling or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        rotated = int(config.head_dim * config.partial_rotary_factor)
        exponent = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
        return 1.0 / config.rope_theta**exponent, 1.0
    return _scaled_frequencies(config, kind, scaling)


def _scaled_frequencies(config: DrafterConfig, kind: str, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    # Imported here: only scaled tables need transformers, whose import takes seconds.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    if kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"rope_scaling type {kind!r} is not one of default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")
    parameters = {
        **scaling,
        "rope_type": kind,
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": config.partial_rotary_factor,
    }
    view = SimpleNamespace(
        rope_parameters=parameters,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        standardize_rope_params=lambda: None,
    )
    frequency, attention_scaling = ROPE_INIT_FUNCTIONS[kind](view, torch.device("cpu"))
    return frequency.float(), float(attention_scaling)
