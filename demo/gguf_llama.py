"""Turns a Llama model in a GGUF file into a Hugging Face directory: safetensors weights, config, tokenizer.

Owns the mapping of names, the undoing of GGUF's rotary permutation and the rebuilding of the byte-level BPE tokenizer.
It must never leave a half-written directory behind: it writes into one that its caller renames.

Facts that force the design: transformers can load such a file too, but reads its vocabulary three times (41 s against
10 s here), needs `accelerate`, and refuses to save what it loaded. GGUF stores a tensor's sizes innermost first and,
for Llama, the rows of the query and key projections in llama.cpp's interleaved rotary order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

__all__ = ["convert_gguf_llama", "hf_name", "undo_rotary_permutation"]

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3  # gguf's TokenType.CONTROL: never split, never part of ordinary text


def convert_gguf_llama(source: Path, destination: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes `source` as a Hugging Face directory.

    Args:
        source: a GGUF file of architecture "llama" with a GPT-2 style (byte-level BPE) vocabulary.
        destination: an existing directory.
        dtype: element type of the written weights; they are dequantised in float32 and rounded once.

    Raises:
        ValueError: another architecture or kind of vocabulary.
    """
    reader = GGUFReader(str(source))

    def field(name: str, default: Any = None) -> Any:
        entry = reader.fields.get(name)
        return default if entry is None else entry.contents()

    if field("general.architecture") != "llama" or field("tokenizer.ggml.model") != "gpt2":
        raise ValueError(f"{source}: not a llama model with a byte-level BPE vocabulary")
    tensors = _read_tensors(reader, field, dtype)
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    config = _build_config(field, tied="lm_head.weight" not in tensors, dtype=dtype)
    config.save_pretrained(destination)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(destination)
    _build_tokenizer(field).save_pretrained(destination)


def hf_name(gguf_name: str) -> str:
    """Maps a GGUF tensor name ("blk.3.attn_q.weight") to transformers' ("model.layers.3.self_attn.q_proj.weight").

    Raises:
        KeyError: a tensor that a Llama model does not have.
    """
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if block:
        return f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}.weight"
    return f"{_TOP_NAMES[gguf_name.removesuffix('.weight')]}.weight"


def undo_rotary_permutation(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Puts the rows of a query or key projection back from interleaved pairs into two halves.

    Args:
        weight: [num_heads * head_dim, width], rows of each head ordered (0, half, 1, half + 1, ...).
        num_heads: heads of this projection.

    Returns:
        The same shape, rows of each head ordered (0, 1, ..., head_dim - 1) as transformers' Llama wants them.
    """
    rows, width = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, width).transpose(1, 2).reshape(rows, width)


def _read_tensors(reader: GGUFReader, field: Callable[[str], Any], dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    tensors = {}
    for entry in reader.tensors:
        # dequantize returns rows in storage order, outermost first: already transformers' shape.
        weight = torch.tensor(dequantize(entry.data, entry.tensor_type))
        kind = entry.name.split(".")[-2]
        if kind in heads:
            weight = undo_rotary_permutation(weight, heads[kind])
        tensors[hf_name(entry.name)] = weight.to(dtype).contiguous()
    return tensors


def _build_config(field: Callable[..., Any], *, tied: bool, dtype: torch.dtype) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(field("tokenizer.ggml.tokens")),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=float(field("llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(field("llama.rope.freq_base", 10_000.0))},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=tied,
        dtype=dtype,
    )


def _build_tokenizer(field: Callable[..., Any]) -> PreTrainedTokenizerFast:
    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # "smollm" in llama.cpp: each digit stands alone, then GPT-2's pattern.
    splits = [pre_tokenizers.Digits(individual_digits=True)] if field("tokenizer.ggml.pre") == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, field("tokenizer.ggml.token_type"), strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])

    def named(key: str) -> str | None:
        index = field(f"tokenizer.ggml.{key}_token_id")
        return None if index is None else tokens[index]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        chat_template=field("tokenizer.chat_template"),
        model_max_length=field("llama.context_length"),
        clean_up_tokenization_spaces=False,
    )
