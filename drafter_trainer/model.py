"""The DFlash drafter: a small Qwen3-style decoder whose queries are block tokens only.

Owns the parameters, named as published drafters name them, and their arithmetic. Knows no process group, no loss and no
target: embeddings come in, final hidden rows go out, and the target's frozen head is applied elsewhere. Training and
decoding run the same attention over the same kind of keys; they differ only in where context keys come from.

Context tokens exist as keys and values alone: they are fused once (`fc`, `hidden_norm`), shared by all layers, and
never pass a layer's input norm, query or MLP. So their keys and values can be cached when decoding.

Shapes: T packed context tokens, C = taps * D, E hidden, A anchors, K block, Q = A*K block tokens, N query heads,
M key heads, H head dim, R rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafter_trainer.attention import BlockLayout, Visibility, attend
from drafter_trainer.drafter_config import DrafterConfig, default_target_layer_ids
from drafter_trainer.head import TargetHead
from drafter_trainer.initialisation import draw_weights
from drafter_trainer.rope import RotaryTable, apply_rotary
from drafter_trainer.stopwatch import OFF

__all__ = ["ContextCache", "Drafter", "DrafterConfig", "default_target_layer_ids"]

KeyValue = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain over the last dim, computed in fp32, returned in the input's dtype."""

    def __init__(self, size: int, *, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [*, size]."""
        accurate = torch.promote_types(x.dtype, torch.float32)
        gain = self.weight.to(accurate)
        return F.rms_norm(x.to(accurate), gain.shape, gain, self.epsilon).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention from block tokens to context and own block, with normed and rotated queries and keys."""

    def __init__(self, config: DrafterConfig, *, layer: int) -> None:
        super().__init__()
        size, head = config.hidden_size, config.head_dim
        self.head_dim = head
        self.visibility = Visibility(window=config.window_of(layer), causal=config.causal_of(layer))
        self.q_proj = nn.Linear(size, config.num_attention_heads * head, bias=False)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head, size, bias=False)
        self.q_norm = RMSNorm(head, epsilon=config.rms_norm_eps)
        self.k_norm = RMSNorm(head, epsilon=config.rms_norm_eps)

    def key_value(self, rows_RE: Tensor, rotary: KeyValue) -> KeyValue:
        """Project rows to keys (normed, rotated to `rotary`'s positions) and values, each [R, M, H]."""
        key = self.k_norm(self.k_proj(rows_RE).unflatten(-1, (-1, self.head_dim)))
        return apply_rotary(key, rotary), self.v_proj(rows_RE).unflatten(-1, (-1, self.head_dim))

    def forward(self, block_QE: Tensor, context_kv: KeyValue, *, layout: BlockLayout, rotary_Q: KeyValue) -> Tensor:
        """Attend from normed block rows; `context_kv` from `key_value`. Returns [Q, E]."""
        query = self.q_norm(self.q_proj(block_QE).unflatten(-1, (-1, self.head_dim)))
        query = apply_rotary(query, rotary_Q)
        block_kv = self.key_value(block_QE, rotary_Q)
        out_QNH = attend(query, context_kv, block_kv, layout=layout, visibility=self.visibility)
        out_QE: Tensor = self.o_proj(out_QNH.flatten(1))
        return out_QE


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [*, E] to [*, E]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm draft layer."""

    def __init__(self, config: DrafterConfig, *, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps)
        self.self_attn = Attention(config, layer=layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x_QE: Tensor, fused_TE: Tensor, *, layout: BlockLayout, rotary_T: KeyValue, rotary_Q: KeyValue
    ) -> Tensor:
        """Return the block rows after attention to the fused context and MLP, [Q, E].

        All of a training pass's work with this layer's weights happens in here: an engine that shards them gathers
        them around this call.
        """
        context_kv = self.self_attn.key_value(fused_TE, rotary_T)
        return self.over_keys(x_QE, context_kv, layout=layout, rotary_Q=rotary_Q)

    def over_keys(self, x_QE: Tensor, context_kv: KeyValue, *, layout: BlockLayout, rotary_Q: KeyValue) -> Tensor:
        """Return the same from the context's keys and values, which decoding caches."""
        x: Tensor = x_QE + self.self_attn(self.input_layernorm(x_QE), context_kv, layout=layout, rotary_Q=rotary_Q)
        y: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + y


@dataclass
class ContextCache:
    """Context keys and values of one sequence while decoding, one pair per layer, grown by `Drafter.context_kv`.

    Attributes:
        keys, values: Per layer [capacity, M, H]; only the first `length` rows are filled.
        length: Context tokens held; they are positions 0 to length - 1.
    """

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    length: int = 0

    def layer(self, index: int) -> KeyValue:
        """Return the filled keys and values of layer `index`; views, valid until the next append."""
        return self.keys[index][: self.length], self.values[index][: self.length]


class Drafter(nn.Module):
    """The drafter. Parameter names are the published ones: fc, hidden_norm, layers.i.…, norm.

    Attributes:
        config: Its shape.
        stopwatch: Times the parts of a step that uses this drafter.
        recompute_layers: Keep only each layer's input for the backward pass and run the layer again there: memory of
            one layer instead of all, for a third more time.
    """

    def __init__(self, config: DrafterConfig) -> None:
        """Build with untrained weights; call `initialise` (or load) before training."""
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, epsilon=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, layer=i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, epsilon=config.rms_norm_eps)
        self.rotary = RotaryTable(config)
        self.recompute_layers = False
        self.stopwatch = OFF

    def initialise(self, head: TargetHead, generator: torch.Generator) -> None:
        """Draw new weights such that the first loss is near ln V; see `initialisation`."""
        draw_weights(self, head, generator)

    def compile_parts(self) -> None:
        """Compile the layers' MLPs, forward and backward; names of parameters stay.

        Attention has a kernel of its own, compiled on CUDA (`attention_flex`), and elsewhere depends on values, so the
        forward as a whole can't be compiled for all shapes: torch 2.13 fails on it.
        """
        for layer in self.draft_layers():
            layer.mlp.compile(dynamic=True)

    def draft_layers(self) -> Iterator[Layer]:
        """Iterate over the layers in order."""
        return iter(cast("Iterable[Layer]", self.layers))

    def fuse(self, context_TC: Tensor) -> Tensor:
        """Fuse the taps of every context token, [T, E]; once per batch, shared by all layers."""
        fused_TE: Tensor = self.hidden_norm(self.fc(context_TC.to(self.fc.weight.dtype)))
        return fused_TE

    def forward(self, block_embeds: Tensor, context_TC: Tensor, *, layout: BlockLayout) -> Tensor:
        """Run all blocks over their contexts.

        Args:
            block_embeds: Embedded block tokens [Q, E], block by block in the layout's order.
            context_TC: The target's tapped states of the packed documents, any float dtype.
            layout: Where documents and blocks lie.

        Returns:
            Final hidden rows [Q, E], ready for the target's head.
        """
        device = block_embeds.device
        rotary_T = self.rotary(layout.position_T.to(device))
        rotary_Q = self.rotary(layout.position_Q.to(device))
        with self.stopwatch.inner_part("fuse"):
            fused_TE = self.fuse(context_TC)
        x_QE = block_embeds.to(fused_TE.dtype)
        with self.stopwatch.inner_part("layers"):
            for layer in self.draft_layers():
                run = partial(layer, layout=layout, rotary_T=rotary_T, rotary_Q=rotary_Q)
                if self.recompute_layers and torch.is_grad_enabled():
                    x_QE = checkpoint(run, x_QE, fused_TE, use_reentrant=False)
                else:
                    x_QE = run(x_QE, fused_TE)
        hidden_QE: Tensor = self.norm(x_QE)
        return hidden_QE

    @torch.no_grad()
    def context_kv(self, context_RC: Tensor, positions: Tensor, *, cache: ContextCache) -> None:
        """Append the keys and values of new context tokens to `cache`.

        Args:
            context_RC: Tapped states of the tokens that follow those in the cache.
            positions: Their positions; must be cache.length, cache.length + 1, …
            cache: Grown in place.
        """
        count = context_RC.shape[0]
        if positions.tolist() != list(range(cache.length, cache.length + count)):
            raise ValueError(f"context positions {positions.tolist()} do not follow {cache.length} cached tokens")
        fused = self.fuse(context_RC)
        rotary = self.rotary(positions.to(fused.device))
        for index, layer in enumerate(self.draft_layers()):
            key, value = layer.self_attn.key_value(fused, rotary)
            _append(cache.keys, index, key, cache.length)
            _append(cache.values, index, value, cache.length)
        cache.length += count

    @torch.no_grad()
    def draft(self, block_embeds: Tensor, start_position: int, cache: ContextCache) -> Tensor:
        """Run one block that starts at `start_position` over the cached context before it.

        Args:
            block_embeds: Embeddings [K', E] of the last emitted token and of K' - 1 mask tokens.
            start_position: Position of the first of them; equals the cache's length.
            cache: Context of positions 0 to start_position - 1; not changed.

        Returns:
            Final hidden rows [K', E].
        """
        if start_position != cache.length:
            raise ValueError(f"a block at position {start_position} needs as many cached tokens, not {cache.length}")
        layout = BlockLayout(
            (cache.length,), torch.zeros(1, dtype=torch.int64), torch.tensor([start_position]), block_embeds.shape[0]
        )
        rotary = self.rotary(layout.position_Q.to(block_embeds.device))
        x = block_embeds.to(self.fc.weight.dtype)
        for index, layer in enumerate(self.draft_layers()):
            x = layer.over_keys(x, cache.layer(index), layout=layout, rotary_Q=rotary)
        hidden: Tensor = self.norm(x)
        return hidden


def _append(tensors: list[Tensor], index: int, rows: Tensor, length: int) -> None:
    """Write `rows` behind the first `length` of tensors[index], doubling its room when it is full."""
    if index == len(tensors):
        tensors.append(rows.new_empty(0, *rows.shape[1:]))
    needed = length + rows.shape[0]
    if needed > tensors[index].shape[0]:
        grown = rows.new_empty(max(needed, 2 * tensors[index].shape[0]), *rows.shape[1:])
        grown[:length] = tensors[index][:length]
        tensors[index] = grown
    tensors[index][length:needed] = rows
