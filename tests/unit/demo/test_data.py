"""The demo's data files: complete, balanced, and held out for true."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import demo
from demo.make_held_out import normalised

DATA = Path(demo.__file__).parent / "data"


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_bytes().splitlines()]


def test_held_out_prompts_are_not_in_the_training_file() -> None:
    training = {normalised(row["messages"][0]["content"]) for row in _rows("smollm2-answers.jsonl")}
    held_out = [normalised(row["messages"][0]["content"]) for row in _rows("held-out-prompts.jsonl")]
    assert len(set(held_out)) == len(held_out)
    assert not training.intersection(held_out)


def test_first_42_held_out_prompts_cover_every_source_equally() -> None:
    sources = {row["source"] for row in _rows("smollm2-answers.jsonl")}
    counts = Counter(row["source"] for row in _rows("held-out-prompts.jsonl")[:42])
    assert counts == dict.fromkeys(sources, 6)


def test_every_training_conversation_is_a_prompt_and_an_answer() -> None:
    rows = _rows("smollm2-answers.jsonl")
    assert len(rows) == 770
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in rows)
    assert all(row["messages"][1]["content"] for row in rows)


def test_held_out_file_has_prompts_only() -> None:
    assert all([m["role"] for m in row["messages"]] == ["user"] for row in _rows("held-out-prompts.jsonl"))


def test_normalised_ignores_case_and_punctuation_only() -> None:
    assert normalised(" What's   2+2?") == normalised("what s 2 2")
    assert normalised("gcd of 12, 4") != normalised("gcd of 12, 5")
