"""The drafter and its loss in the most obvious form: one dense mask over context + blocks, all logits at once.

The oracle of the fast paths, and what the benchmark's step is measured against. Written from the architecture's
description, sharing nothing with the product but the parameters' names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter_trainer.drafter_config import DrafterConfig


def dense_mask(
    lengths: tuple[int, ...],
    blocks: list[tuple[int, int]],
    *,
    block_size: int,
    window: int | None,
    causal: bool,
) -> Tensor:
    """Who sees which of [context; block tokens], bool [Q, T + Q], rule by rule; `blocks` are (document, anchor)."""
    key_document = torch.cat([torch.full((length,), d) for d, length in enumerate(lengths)])
    key_position = torch.cat([torch.arange(length) for length in lengths])
    block = torch.arange(len(blocks)).repeat_interleave(block_size)
    slot = torch.arange(block_size).repeat(len(blocks))
    document = torch.tensor([d for d, _ in blocks])[block]
    anchor = torch.tensor([a for _, a in blocks])[block]
    position = anchor + slot

    context = (key_document == document[:, None]) & (key_position < anchor[:, None])
    own = block == block[:, None]
    if window is not None:
        context &= position[:, None] - key_position < window
        own &= position[:, None] - position < window
    if causal:
        own &= slot <= slot[:, None]
    return torch.cat([context, own], dim=1)


def dense_hidden(
    config: DrafterConfig,
    weights: Mapping[str, Tensor],
    block_embeds: Tensor,
    context: Tensor,
    *,
    lengths: tuple[int, ...],
    blocks: list[tuple[int, int]],
) -> Tensor:
    """Final hidden rows [Q, E] of all blocks."""
    size = config.block_size
    fused = _norm(context @ weights["fc.weight"].T, weights["hidden_norm.weight"], config)
    positions = torch.cat(
        [torch.arange(length) for length in lengths] + [torch.arange(anchor, anchor + size) for _, anchor in blocks]
    )
    x = block_embeds
    for i in range(config.num_hidden_layers):
        layer = {k.removeprefix(f"layers.{i}."): w for k, w in weights.items() if k.startswith(f"layers.{i}.")}
        mask = dense_mask(lengths, blocks, block_size=size, window=config.window_of(i), causal=config.causal_of(i))
        x = x + _attention(config, layer, _norm(x, layer["input_layernorm.weight"], config), fused, positions, mask)
        y = _norm(x, layer["post_attention_layernorm.weight"], config)
        gate = F.silu(y @ layer["mlp.gate_proj.weight"].T)
        x = x + (gate * (y @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return _norm(x, weights["norm.weight"], config)


def _attention(
    config: DrafterConfig, layer: Mapping[str, Tensor], x: Tensor, fused: Tensor, positions: Tensor, mask: Tensor
) -> Tensor:
    queries, keys = x.shape[0], fused.shape[0] + x.shape[0]
    both = torch.cat([fused, x])
    q = (x @ layer["self_attn.q_proj.weight"].T).view(queries, -1, config.head_dim)
    k = (both @ layer["self_attn.k_proj.weight"].T).view(keys, -1, config.head_dim)
    v = (both @ layer["self_attn.v_proj.weight"].T).view(keys, -1, config.head_dim)
    q = _rotate(_norm(q, layer["self_attn.q_norm.weight"], config), positions[-queries:], config)
    k = _rotate(_norm(k, layer["self_attn.k_norm.weight"], config), positions, config)
    shared = config.num_attention_heads // config.num_key_value_heads
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    scores = torch.einsum("qnh,knh->nqk", q, k) / config.head_dim**0.5
    p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("nqk,knh->qnh", p, v).reshape(queries, -1) @ layer["self_attn.o_proj.weight"].T


def _norm(x: Tensor, gain: Tensor, config: DrafterConfig) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * gain


def _rotate(x: Tensor, positions: Tensor, config: DrafterConfig) -> Tensor:
    """Rotary positions without scaling: dims i and i + P/2 of the first P turn by position / theta^(2i/P)."""
    rotated = int(config.head_dim * config.partial_rotary_factor)
    half = rotated // 2
    frequency = torch.tensor([config.rope_theta ** (-2 * i / rotated) for i in range(half)])
    angle = (positions[:, None] * frequency)[:, None].to(x.dtype)
    first, second, rest = x[..., :half], x[..., half:rotated], x[..., rotated:]
    turned = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
    return torch.cat([*turned, rest], dim=-1)


def dense_loss(hidden: Tensor, lm_head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return sum(w * CE) over all block tokens, with the logits of every one of them held."""
    losses = F.cross_entropy((hidden @ lm_head.T).float(), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum()
