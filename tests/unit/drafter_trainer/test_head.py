"""The target's frozen ends against transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from drafter_trainer.head import TargetHead, final_norm_offset
from tests.support.drafters import random_head
from tests.support.tiny_targets import ARCHITECTURES, tiny_target

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        LlamaConfig(**SIZES, tie_word_embeddings=False),
        Gemma3TextConfig(**SIZES, final_logit_softcapping=3.0),
    ],
    ids=["tied", "untied", "scaled and capped"],
)
def test_embeddings_and_logits_equal_the_targets(config: Any) -> None:  # cases 37, 57
    model = AutoModelForCausalLM.from_config(config).eval()
    head = TargetHead.from_model(model)
    assert head.tied == config.tie_word_embeddings
    ids = torch.randint(0, 61, (1, 9))
    with torch.no_grad():
        assert torch.equal(head.embed(ids), model.get_input_embeddings()(ids))
        out = model(ids, output_hidden_states=True)
        torch.testing.assert_close(head.logits(out.hidden_states[-1]), out.logits)


def test_nothing_in_it_can_be_trained() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    head = TargetHead.from_model(model)
    assert not isinstance(head, torch.nn.Module)
    assert not head.embed(torch.tensor([1])).requires_grad
    assert not head.logits(torch.randn(1, 16)).requires_grad


def test_conversion_keeps_the_tie_and_the_facts() -> None:  # case 59
    rows = torch.randn(10, 4)
    head = TargetHead({"embed_tokens": rows}, tied=True, logit_softcap=2.0, embedding_scale=3.0).to(
        dtype=torch.bfloat16
    )
    assert head.lm_head_weight_VD is head.embed_tokens_VD
    assert head.dtype == torch.bfloat16
    assert (head.logit_softcap, head.embedding_scale) == (2.0, 3.0)
    assert head.to(dtype=torch.bfloat16).embed_tokens_VD.data_ptr() == head.embed_tokens_VD.data_ptr()


def test_missing_or_misshapen_tensors_are_refused() -> None:  # case 57
    with pytest.raises(ValueError, match="lm_head"):
        TargetHead({"embed_tokens": torch.zeros(4, 2)}, tied=False)
    with pytest.raises(ValueError, match=r"\(5, 2\)"):
        TargetHead({"embed_tokens": torch.zeros(4, 2), "lm_head": torch.zeros(5, 2)}, tied=False)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_last_blocks_output_normed_here_gives_the_targets_own_logits(architecture: str) -> None:  # case 37
    """The teacher of distillation. Gemma and Qwen3.5 store the norm's gain as a distance from 1."""
    model = copy.deepcopy(tiny_target(architecture))
    with torch.no_grad():
        model.get_decoder().norm.weight.add_(torch.linspace(-0.3, 0.3, 64))
        raw: list[torch.Tensor] = []
        hook = (
            model.get_decoder()
            .layers[-1]
            .register_forward_hook(
                lambda _module, _inputs, output: raw.append(output[0] if isinstance(output, tuple) else output)
            )
        )
        logits = model(torch.arange(3, 40)[None]).logits
        hook.remove()
        head = TargetHead.from_model(model)
        ours = head.logits(head.normed(raw[0]))
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)


def test_a_final_norm_of_an_unknown_target_is_not_guessed() -> None:
    assert final_norm_offset("CohereForCausalLM") is None
    assert final_norm_offset("Qwen3ForCausalLM") == 0.0
    assert final_norm_offset("Qwen3_5ForConditionalGeneration") == 1.0
    assert random_head().with_norm_offset(1.0).final_norm_offset == 1.0
    with pytest.raises(ValueError, match="no weight"):
        random_head().normed(torch.zeros(1, 24))
