"""Makes a tiny target that knows one thing, counting, and a dataset of its own greedy answers.

    python -m demo.tiny DIRECTORY

writes DIRECTORY/target (a Hugging Face directory: Qwen3 of 4 blocks, 0.3 M parameters, with tokenizer and chat
template), DIRECTORY/train.jsonl and DIRECTORY/held-out.jsonl. Everything the demo needs of a target is real, only
small: a drafter can learn from its hidden states what comes next, so acceptance rises above 1 within seconds.

Owns the counting language. It must never write a directory half: everything is built beside it and renamed.
Deterministic for a given torch build: seeds are fixed and one thread computes.

Shape letters: B prompts, S tokens, V vocab.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

__all__ = [
    "MASK_TOKEN_ID",
    "NUMBERS",
    "Exercise",
    "build_tokenizer",
    "ensure_tiny_target",
    "exercises",
    "greedy_answers",
    "new_model",
    "split_exercises",
    "teach",
    "write_conversations",
]

MASK_TOKEN_ID = 3  # "<mask>": in the vocabulary, never in any text
_SPECIAL = ("<pad>", "<start>", "<end>", "<mask>")
_WORDS = ("system", "user", "assistant", "count", "up", "down", "from", "by", "then", "done")
NUMBERS = 24  # counting wraps around after this many
_ANSWER_NUMBERS = 20
_HELD_OUT_EVERY = 4
_VOCAB_SIZE = 48  # model rows; the tokenizer has fewer, as real checkpoints do
_TEMPLATE = (
    "{% for message in messages %}<start> {{ message['role'] }} {{ message['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<start> assistant {% endif %}"
)


class Exercise:
    """One prompt of the counting language and the answer that teaches it."""

    def __init__(self, *, start: int, stride: int) -> None:
        self.prompt = f"count {'up' if stride > 0 else 'down'} from {start} by {abs(stride)}"
        self.answer = " ".join(str((start + i * stride) % NUMBERS) for i in range(_ANSWER_NUMBERS)) + " done"


def exercises() -> list[Exercise]:
    """Every start with every stride, in a fixed random order."""
    all_of_them = [Exercise(start=start, stride=s) for start in range(NUMBERS) for s in (1, 2, -1, -2)]
    random.Random(0).shuffle(all_of_them)
    return all_of_them


def split_exercises() -> tuple[list[Exercise], list[Exercise]]:
    """The exercises to train on, and those held out."""
    every = exercises()
    return [exercise for i, exercise in enumerate(every) if i % _HELD_OUT_EVERY], every[::_HELD_OUT_EVERY]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token; the chat template is the usual kind with <start>, <end> around each message."""
    vocab = {word: i for i, word in enumerate((*_SPECIAL, *_WORDS, *map(str, range(NUMBERS))))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        mask_token="<mask>",
        chat_template=_TEMPLATE,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def ensure_tiny_target(directory: Path, *, say: Callable[[str], None] = print) -> Path:
    """Makes `directory` on the first call (some ten seconds) and returns it.

    Leaves torch's global random state, default dtype and thread count as they were.
    """
    if directory.is_dir():
        return directory
    say("making a tiny target that can count (once) ...")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=directory.parent) as scratch, torch.random.fork_rng([]):
        built = Path(scratch) / directory.name
        built.mkdir()
        _build(built)
        built.rename(directory)
    return directory


def _build(directory: Path) -> None:
    tokenizer = build_tokenizer()
    training, held_out = split_exercises()
    torch.manual_seed(0)
    model = new_model(tokenizer)
    teach(model, tokenizer, training)
    transformers_logging.disable_progress_bar()  # of writing one small file
    model.save_pretrained(directory / "target")
    tokenizer.save_pretrained(directory / "target")
    write_conversations(directory / "train.jsonl", training, greedy_answers(model, tokenizer, training))
    write_conversations(directory / "held-out.jsonl", held_out, None)


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untrained target, from torch's global random state."""
    config = Qwen3Config(
        vocab_size=_VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.05,
        dtype=torch.float32,
    )
    return Qwen3ForCausalLM(config)


def teach(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    training: Sequence[Exercise],
    *,
    steps: int = 120,
    lr: float = 4e-3,
) -> None:
    """Trains the target on the exercises: every conversation has the same length, so no padding and no mask."""
    ids_BS = torch.tensor([_conversation_ids(tokenizer, exercise) for exercise in training])
    batch = 16
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        batch_BS = ids_BS[torch.randint(len(ids_BS), (batch,), generator=generator)]
        loss = model(input_ids=batch_BS, labels=batch_BS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


def _conversation_ids(tokenizer: PreTrainedTokenizerFast, exercise: Exercise) -> list[int]:
    messages = [{"role": "user", "content": exercise.prompt}, {"role": "assistant", "content": exercise.answer}]
    return tokenizer.apply_chat_template(messages, return_dict=False)


@torch.inference_mode()
def greedy_answers(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, training: Sequence[Exercise]
) -> list[str]:
    """The target's own greedy answers: all prompts have the same length and go through in one batch."""
    prompts = [[{"role": "user", "content": exercise.prompt}] for exercise in training]
    prompt_BS = torch.tensor(tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False))
    answer_BS = model.generate(
        prompt_BS, attention_mask=torch.ones_like(prompt_BS), do_sample=False, max_new_tokens=_ANSWER_NUMBERS + 4
    )[:, prompt_BS.shape[1] :]
    return [tokenizer.decode(row, skip_special_tokens=True) for row in answer_BS]


def write_conversations(path: Path, prompts: Sequence[Exercise], answers: Sequence[str] | None) -> None:
    """Writes JSON Lines; prompts alone where there are no answers."""
    with path.open("w", encoding="utf-8") as file:
        for index, exercise in enumerate(prompts):
            messages = [{"role": "user", "content": exercise.prompt}]
            if answers is not None:
                messages.append({"role": "assistant", "content": answers[index]})
            file.write(json.dumps({"messages": messages, "source": "counting"}) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m demo.tiny`; used where the target must be there before the programs start."""
    parser = argparse.ArgumentParser(prog="python -m demo.tiny", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where to write; left alone when it exists")
    directory = parser.parse_args(arguments).directory
    torch.set_num_threads(1)
    ensure_tiny_target(directory, say=lambda line: print(line, file=sys.stderr, flush=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
