"""The drafter's shape, read from and written to the published `config.json` layout.

Owns the translation between one flat frozen value and the layouts engines read: z-lab's (block size at the top), the
newer one (all of it under `dflash_config`), transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).
Both are always written: readers look in either place and guess silently when they find nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["DrafterConfig", "default_target_layer_ids"]

FULL, SLIDING = "full_attention", "sliding_attention"


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Spread taps over blocks 1 to N - 3 of N, as the published trainers do; the middle block for a single tap.

    Ids are 0-based decoder blocks; a tap is the block's output.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = (num_target_layers - 3) - 1
    return tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape of a drafter. Names are those of the published config.

    Attributes:
        hidden_size: Width of drafter and target, D.
        intermediate_size: Width of the MLP.
        num_hidden_layers: Draft layers.
        num_attention_heads, num_key_value_heads, head_dim: Attention geometry; need not be the target's.
        num_target_layers: Decoder blocks of the target.
        target_layer_ids: Tapped blocks, 0-based, in the order their states are concatenated.
        mask_token_id: Row of the target's embedding that stands for "to be drafted".
        block_size: K, tokens of a block with its anchor.
        vocab_size: Rows of the target's embedding.
        max_position_embeddings: Longest sequence the positions were made for.
        rms_norm_eps: Epsilon of every norm.
        rope_theta, rope_scaling, partial_rotary_factor: Rotary positions; scaling as in transformers, None for none.
        layer_types: "full_attention" or "sliding_attention" for every draft layer; all full when empty.
        sliding_window: Keys a sliding layer's query sees, its own position included.
        is_causal: None: sliding layers are causal within the block and full ones are not; otherwise so for all.
        initializer_range: Standard deviation of new weight matrices.
        bos_token_id, eos_token_id: Copied for engines that ask.
        tie_word_embeddings: Whether the target ties its head (the drafter has neither end).
        dtype: Type of exported weights.
        extra: Keys of a published config that mean nothing here and are written back unchanged.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    vocab_size: int
    max_position_embeddings: int = 40960
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: Mapping[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        object.__setattr__(self, "layer_types", tuple(self.layer_types) or (FULL,) * self.num_hidden_layers)
        self._check_counts()
        self._check_layers()

    def _check_counts(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"block_size is {self.block_size}: a block needs its anchor and at least one draft slot")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is no row of an embedding of {self.vocab_size}")
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids is empty: name at least one block of the target")
        wrong = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if wrong:
            raise ValueError(f"target_layer_ids {wrong} are not in a target of {self.num_target_layers} layers")

    def _check_layers(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types names {len(self.layer_types)} layers of {self.num_hidden_layers}")
        unknown = set(self.layer_types) - {FULL, SLIDING}
        if unknown:
            raise ValueError(f"layer_types {sorted(unknown)} are neither {FULL} nor {SLIDING}")
        if SLIDING in self.layer_types and (self.sliding_window or 0) < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}: sliding layers need a window of at least 1")

    def window_of(self, layer: int) -> int | None:
        """Return the window of draft layer `layer`, None where it attends to everything."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def causal_of(self, layer: int) -> bool:
        """Return whether draft layer `layer` is causal within the block."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    @classmethod
    def from_json(cls, published: Mapping[str, Any]) -> DrafterConfig:
        """Read a published config, whichever of the known layouts it has.

        Raises:
            ValueError: A needed key is missing, or a value is impossible.
        """
        flat = {**published, **(published.get("dflash_config") or {})}
        flat.update(_rope_fields(published))
        flat["dtype"] = flat.get("dtype") or flat.get("torch_dtype") or "bfloat16"
        heads = flat.get("num_attention_heads")
        if flat.get("head_dim") is None and heads:
            flat["head_dim"] = flat.get("hidden_size", 0) // heads
        known = {f.name for f in fields(cls)} - {"extra"}
        needed = [name for name in _NEEDED if flat.get(name) is None]
        if needed:
            raise ValueError(f"the drafter's config lacks {', '.join(needed)}")
        extra = {k: v for k, v in published.items() if k not in known | _WRITTEN}
        values = {k: v for k, v in flat.items() if k in known and (v is not None or k in _NULLABLE)}
        return cls(**values, extra=extra)

    def to_json(self) -> dict[str, Any]:
        """Return the published config: a plain dict ready for `json.dump`."""
        rope = {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}
        if self.partial_rotary_factor != 1.0:
            rope["partial_rotary_factor"] = self.partial_rotary_factor
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_PLAIN}
        if self.is_causal is not None:
            plain["is_causal"] = self.is_causal
        return {
            **self.extra,
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            **plain,
            "layer_types": list(self.layer_types),
            "rope_scaling": dict(self.rope_scaling) if self.rope_scaling else None,
            "rope_parameters": rope,
            "use_sliding_window": SLIDING in self.layer_types,
            "max_window_layers": self.num_hidden_layers,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_cache": True,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_size": self.block_size,
            },
        }


_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_target_layers",
    "target_layer_ids",
    "mask_token_id",
    "block_size",
    "vocab_size",
)
_NULLABLE = {"rope_scaling", "sliding_window", "is_causal", "bos_token_id", "eos_token_id"}
# Written by name or by a rule of their own, or living in `dflash_config`.
_NOT_PLAIN = {"extra", "layer_types", "rope_scaling", "is_causal", "mask_token_id", "target_layer_ids"}
_WRITTEN = {
    "architectures",
    "model_type",
    "auto_map",
    "rope_parameters",
    "use_sliding_window",
    "max_window_layers",
    "hidden_act",
    "attention_bias",
    "attention_dropout",
    "use_cache",
    "dflash_config",
    "torch_dtype",
}


def _rope_fields(published: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary fields from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    parameters = dict(published.get("rope_parameters") or {})
    scaling = dict(published.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or published.get("rope_theta") or scaling.pop("rope_theta", None)
    partial = parameters.pop("partial_rotary_factor", None) or published.get("partial_rotary_factor")
    scaling = {**scaling, **parameters}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    found: dict[str, Any] = {"rope_scaling": scaling if kind != "default" else None}
    if theta is not None:
        found["rope_theta"] = float(theta)
    if partial is not None:
        found["partial_rotary_factor"] = float(partial)
    return found
