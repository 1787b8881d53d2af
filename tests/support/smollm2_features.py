"""A few rows of SmolLM2-135M-Instruct's own features and head, small enough to lie beside the tests (370 kB).

`python -m tests.support.smollm2_features MODEL_DIR` makes the file anew from the demo's conversations. Of three of them
it holds the last tokens of the prompt and the first of the answer; of the head the rows of their tokens, of the mask
token and of the answers' most frequent tokens, so token ids are those rows' numbers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.head import TargetHead
from drafter_trainer.prepare import PrepareSettings, open_dataset
from drafter_trainer.target_runner import TargetRunner
from drafter_trainer.types import MicroBatch, TrainBatch, Version

__all__ = ["load_smollm2_batch", "smollm2_config"]

FILE = Path(__file__).parent / "smollm2-features.safetensors"
DATA = Path(__file__).parents[2] / "demo" / "data" / "smollm2-answers.jsonl"
TAPS, NUM_LAYERS, HIDDEN = (1, 27), 30, 576
MASK_ID = 16
CONVERSATIONS, PROMPT_TOKENS, ANSWER_TOKENS = 3, 4, 16
VOCAB = 192


def smollm2_config(num_layers: int) -> DrafterConfig:
    """A drafter of SmolLM2's width and rotary base; few heads and narrow MLPs, since Muon's time goes by width."""
    return DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        rope_theta=100_000.0,
        num_target_layers=NUM_LAYERS,
        target_layer_ids=TAPS,
        num_hidden_layers=num_layers,
        block_size=5,
        vocab_size=VOCAB,
        mask_token_id=0,
    )


def load_smollm2_batch() -> tuple[TargetHead, TrainBatch]:
    """The head's rows, and one packed batch of features, in fp32."""
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in load_file(FILE).items()
    }
    head = TargetHead({"embed_tokens": tensors["embed_tokens"], "final_norm": tensors["final_norm"]}, tied=True)
    lengths = (PROMPT_TOKENS + ANSWER_TOKENS,) * CONVERSATIONS
    mask_T = torch.tensor(([False] * PROMPT_TOKENS + [True] * ANSWER_TOKENS) * CONVERSATIONS)
    micro = MicroBatch(0, 0, tuple(range(CONVERSATIONS)), lengths, tensors["input_ids"].long(), mask_T)
    return head, TrainBatch(micro, tensors["features"].float(), Version(1, "d"), 0)


def write(model_dir: Path) -> None:
    """Runs the target and writes the file."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True).eval()
    whole = TargetHead.from_model(model)
    runner = TargetRunner(model, target_layer_ids=TAPS)
    ids, features = [], []
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        settings = PrepareSettings(max_length_tokens=256)
        dataset = open_dataset(DATA, tokenizer=model_dir, settings=settings, prepared_dir=Path(scratch) / "prepared")
        for index in range(CONVERSATIONS):
            tokens, mask = dataset.sample(index)
            first = int(mask.argmax())
            part = slice(first - PROMPT_TOKENS, first + ANSWER_TOKENS)
            tapped_TC = runner.prefill(torch.from_numpy(tokens.astype("int64"))).features_RC
            assert tapped_TC is not None, "the runner was told to tap"
            ids += tokens[part].tolist()
            features.append(tapped_TC[part])
        frequent = dataset.frequent_tokens(VOCAB).tolist()
    rows = list(dict.fromkeys([MASK_ID, *ids, *frequent]))[:VOCAB]
    save_file(
        {
            "input_ids": torch.tensor([rows.index(token) for token in ids], dtype=torch.int32),
            "features": torch.cat(features).to(torch.bfloat16),
            "embed_tokens": whole.embed_tokens_VD[rows].to(torch.bfloat16),
            "final_norm": model.model.norm.weight.detach().clone(),
        },
        FILE,
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))
