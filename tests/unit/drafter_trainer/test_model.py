"""The drafter against the dense oracle, the published layout and its own decoding entry."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafter_trainer.anchors import draw_anchors
from drafter_trainer.head import TargetHead
from drafter_trainer.loss import build_block_targets, drafter_loss
from drafter_trainer.model import ContextCache, Drafter, DrafterConfig
from drafter_trainer.types import TrainBatch, Version
from tests.support.attention_oracles import layout_of
from tests.support.dense_reference import dense_hidden
from tests.support.drafters import layouts, random_batch, random_drafter, random_head, random_micro, tiny_config

FULL, SLIDING = "full_attention", "sliding_attention"


def random_inputs(config: DrafterConfig, tokens: int, blocks: int) -> tuple[Tensor, Tensor]:
    embeds = torch.randn(blocks * config.block_size, config.hidden_size)
    return embeds, torch.randn(tokens, len(config.target_layer_ids) * config.hidden_size)


@settings(max_examples=25)
@given(
    layouts(),
    st.fixed_dictionaries(
        {
            "block_size": st.integers(2, 5),
            "num_hidden_layers": st.integers(1, 3),
            "num_key_value_heads": st.sampled_from([1, 2, 4]),
            "partial_rotary_factor": st.sampled_from([0.5, 1.0]),
            "is_causal": st.sampled_from([None, False, True]),
            "sliding_window": st.integers(1, 12),
            "sliding": st.booleans(),
        }
    ),
)
def test_drafter_equals_dense_oracle_in_outputs_and_all_gradients(
    drawn: tuple[tuple[int, ...], list[tuple[int, int]]], options: dict[str, Any]
) -> None:
    sliding = options.pop("sliding")
    types = tuple(SLIDING if sliding and i % 2 == 0 else FULL for i in range(options["num_hidden_layers"]))
    config = tiny_config(**options, layer_types=types)
    lengths, blocks = drawn
    drafter = random_drafter(config)
    embeds, context = random_inputs(config, sum(lengths), len(blocks))
    embeds.requires_grad_()
    context.requires_grad_()
    inputs = [*drafter.parameters(), embeds, context]
    upstream = torch.randn(embeds.shape)

    ours = drafter(embeds, context, layout=layout_of(lengths, blocks, config.block_size))
    dense = dense_hidden(config, dict(drafter.named_parameters()), embeds, context, lengths=lengths, blocks=blocks)
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(dense, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-5 * max(1.0, float(b.abs().max())), rtol=1e-5)


@pytest.mark.parametrize("anchors", [1, 3, 33, 200])
def test_any_number_of_blocks_works(anchors: int) -> None:  # case 41
    config = tiny_config(block_size=5)
    drafter = random_drafter(config)
    blocks = [(0, a) for a in range(anchors)]
    embeds, context = random_inputs(config, anchors, anchors)
    ours = drafter(embeds, context, layout=layout_of((anchors,), blocks, 5))
    dense = dense_hidden(config, dict(drafter.named_parameters()), embeds, context, lengths=(anchors,), blocks=blocks)
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)


def test_target_states_at_or_after_the_anchor_change_nothing() -> None:  # case 39
    config = tiny_config()
    drafter = random_drafter(config)
    lengths, blocks = (12, 9), [(0, 3), (0, 5), (0, 6), (1, 4)]
    layout = layout_of(lengths, blocks, config.block_size)
    embeds, context = random_inputs(config, 21, len(blocks))
    before = drafter(embeds, context, layout=layout).unflatten(0, (-1, config.block_size))
    for number, (document, anchor) in enumerate(blocks):
        row = sum(lengths[:document]) + anchor
        other = context.clone()
        other[row:] += 10 * torch.randn_like(other[row:])
        other[: sum(lengths[:document])] += 10
        after = drafter(embeds, other, layout=layout).unflatten(0, (-1, config.block_size))
        assert torch.equal(before[number], after[number])
        other = context.clone()
        other[row - 1] += 1
        after = drafter(embeds, other, layout=layout).unflatten(0, (-1, config.block_size))
        assert not torch.allclose(before[number], after[number])


def test_positions_are_absolute() -> None:  # case 55
    """The same tokens one position further give another result only through their distance, which RoPE keeps."""
    config = tiny_config()
    drafter = random_drafter(config)
    embeds, context = random_inputs(config, 8, 1)
    whole = drafter(embeds, context, layout=layout_of((8,), [(0, 8)], 4))
    cache = ContextCache()
    drafter.context_kv(context, torch.arange(8), cache=cache)
    cos, _ = drafter.rotary(torch.arange(8, 12))
    layout = layout_of((8,), [(0, 8)], 4)
    assert layout.position_T.tolist() == list(range(8))
    assert layout.position_Q.tolist() == [8, 9, 10, 11]
    torch.testing.assert_close(cos, drafter.rotary(layout.position_Q)[0])
    torch.testing.assert_close(drafter.draft(embeds, 8, cache), whole, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="position 9"):
        drafter.draft(embeds, 9, cache)


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("window", [None, 6])
def test_decoding_entry_equals_training_entry(layers: int, window: int | None) -> None:  # cases 38, 55
    types = (SLIDING if window else FULL,) * layers
    config = tiny_config(num_hidden_layers=layers, layer_types=types, sliding_window=window)
    drafter = random_drafter(config)
    anchors = [1, 4, 5, 11, 19]
    embeds, context = random_inputs(config, 20, len(anchors))
    layout = layout_of((20,), [(0, a) for a in anchors], config.block_size)
    trained = drafter(embeds, context, layout=layout).unflatten(0, (-1, config.block_size))
    cache = ContextCache()
    for number, anchor in enumerate(anchors):
        new = torch.arange(cache.length, anchor)
        drafter.context_kv(context[new], new, cache=cache)
        block = embeds.unflatten(0, (-1, config.block_size))[number]
        torch.testing.assert_close(drafter.draft(block, anchor, cache), trained[number], atol=1e-5, rtol=1e-5)


def test_context_must_follow_the_cache() -> None:
    config = tiny_config()
    drafter, cache = random_drafter(config), ContextCache()
    rows = random_inputs(config, 3, 1)[1]
    drafter.context_kv(rows, torch.arange(3), cache=cache)
    with pytest.raises(ValueError, match="do not follow 3"):
        drafter.context_kv(rows, torch.arange(4, 7), cache=cache)


def test_parameters_are_named_as_published() -> None:
    config = tiny_config(num_hidden_layers=5)
    names = set(Drafter(config).state_dict())
    layer = {
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
    }
    expected = {f"layers.{i}.{part}.weight" for i in range(5) for part in layer}
    assert names == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert len(names) == 58


@pytest.mark.parametrize(
    ("hidden", "intermediate", "heads", "key_heads", "head_dim", "millions"),
    [
        (896, 4864, 14, 2, 64, 78.6),
        (2560, 9728, 32, 8, 128, 537),
        (4096, 12288, 32, 8, 128, 1049),
        (5120, 17408, 32, 8, 128, 1730),
    ],
)
def test_published_shapes_have_their_published_sizes(
    hidden: int, intermediate: int, heads: int, key_heads: int, head_dim: int, millions: float
) -> None:
    config = tiny_config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        num_hidden_layers=5,
        num_target_layers=64,
        target_layer_ids=(1, 16, 31, 46, 61),
    )
    with torch.device("meta"):
        drafter = Drafter(config)
    assert sum(p.numel() for p in drafter.parameters()) / 1e6 == pytest.approx(millions, rel=2e-3)


def test_autocast_is_near_float32() -> None:
    config = tiny_config()
    drafter = random_drafter(config)
    embeds, context = random_inputs(config, 30, 4)
    layout = layout_of((30,), [(0, 2), (0, 9), (0, 17), (0, 29)], 4)
    exact = drafter(embeds, context, layout=layout)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = drafter(embeds, context, layout=layout)
    rounded.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in drafter.parameters())
    torch.testing.assert_close(rounded.float(), exact, atol=0.1 * float(exact.detach().abs().max()), rtol=0)


def first_loss(config: DrafterConfig, head: TargetHead, batch: TrainBatch) -> float:
    drafter = Drafter(config)
    drafter.initialise(head, torch.Generator().manual_seed(0))
    anchors = draw_anchors(batch.micro, num_anchors=16, seed=0)
    targets = build_block_targets(batch.micro, anchors, block_size=config.block_size, gamma=4.0)
    output = drafter_loss(drafter, head, batch, anchors, targets)
    output.loss_sum.backward()
    assert all(p.grad is not None and p.grad.any() for p in drafter.parameters()), "a parameter has no gradient"
    return output.loss_sum.item() / output.weight_sum


@pytest.mark.parametrize("row_norm", [0.5, 5.0, 100.0])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layers", [1, 5])
def test_first_loss_is_near_ln_v_on_any_head(row_norm: float, tied: bool, layers: int) -> None:
    config = tiny_config(vocab_size=2000, hidden_size=64, num_hidden_layers=layers)
    rows = torch.randn(2, 2000, 64) * row_norm / 8
    rows[:, :, :8] += row_norm / 4  # rows of real heads share a direction
    head = TargetHead({"embed_tokens": rows[0], "lm_head": rows[1]}, tied=tied)
    batch = random_batch(random_micro((60, 90)), config)
    assert first_loss(config, head, batch) == pytest.approx(math.log(2000), rel=0.1)


@pytest.mark.parametrize("facts", [{"logit_softcap": 30.0}, {"embedding_scale": 8.0}, {"logit_scale": 4.0}], ids=str)
def test_first_loss_is_near_ln_v_whatever_the_head_does(facts: dict[str, float]) -> None:
    config = tiny_config(vocab_size=2000, hidden_size=64)
    head = random_head(vocab=2000, hidden=64, **facts)
    assert first_loss(config, head, random_batch(random_micro((60, 90)), config)) == pytest.approx(
        math.log(2000), rel=0.1
    )


def test_first_loss_is_near_ln_v_on_a_real_target() -> None:
    """Embeddings, head and hidden states of a transformers model with head rows as large as trained ones."""
    config = tiny_config(vocab_size=2000, hidden_size=64, target_layer_ids=(0, 2), num_target_layers=4)
    sizes = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4, "tie_word_embeddings": True}
    target = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    micro = random_micro((80,))
    with torch.no_grad():
        states = target.model(micro.input_ids_T[None], output_hidden_states=True).hidden_states
    batch = TrainBatch(micro, torch.cat([states[1][0], states[3][0]], dim=-1), Version(1, "0" * 32), 0)
    assert first_loss(config, TargetHead.from_model(target), batch) == pytest.approx(math.log(2000), rel=0.1)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    weights = []
    for seed in (3, 3, 4):
        drafter = Drafter(tiny_config())
        torch.manual_seed(seed * 1000 + len(weights))
        drafter.initialise(random_head(), torch.Generator().manual_seed(seed))
        weights.append(torch.cat([p.detach().flatten() for p in drafter.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_recomputed_layers_give_the_same_gradients() -> None:
    config = tiny_config(num_hidden_layers=3)
    drafter = random_drafter(config)
    embeds, context = random_inputs(config, 20, 3)
    layout = layout_of((20,), [(0, 2), (0, 9), (0, 17)], 4)
    gradients = []
    for recompute in (False, True):
        drafter.recompute_layers = recompute
        gradients.append(
            torch.autograd.grad(drafter(embeds, context, layout=layout).square().sum(), drafter.parameters())
        )
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it itself
def test_compiled_parts_give_the_same_gradients_for_all_shapes() -> None:
    config = tiny_config(num_hidden_layers=1)
    plain, compiled = random_drafter(config), random_drafter(config)
    compiled.compile_parts()
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    for tokens, blocks in ((20, [(0, 2), (0, 9)]), (31, [(0, 4), (0, 9), (0, 17)])):
        embeds, context = random_inputs(config, tokens, len(blocks))
        gradients = [
            torch.autograd.grad(
                drafter(embeds, context, layout=layout_of((tokens,), blocks, 4)).square().sum(), drafter.parameters()
            )
            for drafter in (plain, compiled)
        ]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
