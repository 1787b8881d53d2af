"""The two targets of `bench.recovery`: one that counts, as the demo's, and the same one fine-tuned to a cipher.

The second is the first trained on other text for some dozen steps: it counts as before, but has learned to call every
number by another's name. Same shapes, other weights in every tensor, another answer to every prompt. The text that
drafters are trained on holds both targets' own greedy answers from the first step on, as the replay of an RL loop holds
what several versions of its policy said: what a drafter lacks at the swap is not text but the new target's features.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from demo.tiny import (
    NUMBERS,
    Exercise,
    build_tokenizer,
    greedy_answers,
    new_model,
    split_exercises,
    teach,
    write_conversations,
)

__all__ = ["Family", "load_model", "make_family"]

# So that the first target answers every prompt rightly: its answers can be drafted only as far as they have a rule.
_BASE_STEPS = 160


@dataclass(frozen=True)
class Family:
    """What was made.

    Attributes:
        base: directory of the target that is served first.
        tuned: directory of the one that replaces it.
        data: conversations to train drafters on, JSON Lines.
        prompts: token ids of prompts that are in no training text.
        same_answers: share of these prompts to which both answer the same.
    """

    base: Path
    tuned: Path
    data: Path
    prompts: tuple[tuple[int, ...], ...]
    same_answers: float


def make_family(directory: Path, *, tune_steps: int) -> Family:
    """Makes both targets (20 s) and the text. Deterministic for a given torch build and thread count.

    Args:
        directory: where to write.
        tune_steps: of fine-tuning.
    """
    transformers_logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    training, held_out = split_exercises()
    every = [*training, *held_out]  # the targets know all exercises; the drafters' text has a part of them
    torch.manual_seed(0)
    model = new_model(tokenizer)
    teach(model, tokenizer, every, steps=_BASE_STEPS)
    base, tuned = directory / "targets" / "base", directory / "targets" / "tuned"
    said, said_held_out = [], []
    for path in (base, tuned):
        if path == tuned:
            teach(model, tokenizer, [_in_cipher(exercise) for exercise in every], steps=tune_steps)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        said += greedy_answers(model, tokenizer, training)
        said_held_out.append(greedy_answers(model, tokenizer, held_out))
    data = directory / "train.jsonl"
    write_conversations(data, [*training, *training], said)
    asked = [[{"role": "user", "content": exercise.prompt}] for exercise in held_out]
    prompts = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    same = sum(first == second for first, second in zip(*said_held_out, strict=True)) / len(held_out)
    return Family(base, tuned, data, tuple(tuple(ids) for ids in prompts), same)


def load_model(directory: Path) -> Any:
    """Returns a target as a transformers model, in eval mode."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()


def _in_cipher(exercise: Exercise) -> Exercise:
    """The same prompt and answer, each number of the answer under another's name."""
    names = list(range(NUMBERS))
    random.Random(3).shuffle(names)
    ciphered = Exercise(start=0, stride=1)
    ciphered.prompt = exercise.prompt
    ciphered.answer = " ".join(str(names[int(word)]) if word.isdigit() else word for word in exercise.answer.split())
    return ciphered
