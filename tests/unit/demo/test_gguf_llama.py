"""The converter against a model that was written to GGUF here, tensor by tensor, as llama.cpp's converter does."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter, TokenType
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from demo.gguf_llama import convert_gguf_llama, hf_name, undo_rotary_permutation

HEADS, KV_HEADS, WIDTH = 4, 2, 32
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def _vocabulary() -> list[str]:
    # The byte-level alphabet writes a space as Ġ and a newline as Ċ; printable ASCII stands for itself.
    return [*SPECIAL, *sorted(set(string.printable[:94])), "Ġ", "Ċ", "in", "Ġin", "ĊĊ", "12"]


def _model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(_vocabulary()),
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of a projection's rows: the first and second half of each head alternate."""
    rows = weight.reshape(heads, 2, -1, weight.shape[1])
    return torch.stack([rows[:, 0], rows[:, 1]], dim=2).reshape(weight.shape)


def _write_gguf(path: Path, model: LlamaForCausalLM, *, architecture: str = "llama") -> None:
    writer = GGUFWriter(path, architecture)
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens = _vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if t in SPECIAL else TokenType.NORMAL for t in tokens])
    writer.add_token_merges(["i n", "Ġ in", "Ċ Ċ", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    gguf_names = {hf_name(name): name for name in _gguf_names(config.num_hidden_layers)}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":  # tied: GGUF leaves it out
            continue
        gguf_name = gguf_names[name]
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(gguf_name.split(".")[-2])
        writer.add_tensor(gguf_name, (weight if heads is None else _interleaved(weight, heads)).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_names(layers: int) -> list[str]:
    parts = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    return ["token_embd.weight", "output_norm.weight", *(f"blk.{i}.{p}.weight" for i in range(layers) for p in parts)]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    torch.manual_seed(0)
    model, folder = _model(), tmp_path_factory.mktemp("gguf")
    _write_gguf(folder / "model.gguf", model)
    (folder / "out").mkdir()
    convert_gguf_llama(folder / "model.gguf", folder / "out", dtype=torch.float32)
    return model, folder / "out"


def test_converted_model_computes_the_same_logits(converted: tuple[LlamaForCausalLM, Path]) -> None:
    model, directory = converted
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.randint(0, model.config.vocab_size, (2, 17))
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_converted_tokenizer_splits_digits_before_anything_else(converted: tuple[LlamaForCausalLM, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    # "12" is in the vocabulary with a merge, and yet digits stand alone; so the newlines before them stay together.
    assert tokenizer.tokenize("in in\n\n12") == ["in", "Ġin", "ĊĊ", "1", "2"]
    assert tokenizer.decode(tokenizer("in in\n\n12").input_ids) == "in in\n\n12"


def test_converted_tokenizer_knows_special_tokens_and_template(converted: tuple[LlamaForCausalLM, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "in"}], return_dict=False)
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids[-2] == tokenizer.eos_token_id == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nin\n"


def test_undoing_the_rotary_permutation_gives_the_original_rows() -> None:
    weight = torch.randn(HEADS * 8, WIDTH)
    assert torch.equal(undo_rotary_permutation(_interleaved(weight, HEADS), HEADS), weight)
    assert not torch.equal(_interleaved(weight, HEADS), weight)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    _write_gguf(tmp_path / "model.gguf", _model(), architecture="mamba")
    with pytest.raises(ValueError, match="not a llama model"):
        convert_gguf_llama(tmp_path / "model.gguf", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_tensor_that_llama_does_not_have_is_refused() -> None:
    with pytest.raises(KeyError):
        hf_name("blk.0.ssm_conv1d.weight")
