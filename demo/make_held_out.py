"""Makes `data/held-out-prompts.jsonl`: prompts of the same seven sources as the training file, none of them in it.

Kept for the record; the demo reads only the file. Needs `pip install reasoning-gym==0.1.25 chatterbot-corpus==1.3.3`:

    python -m demo.make_held_out

Deterministic: the same packages give the same file. Procedural prompts use a seed far from any that the training file
can have used and are still compared with it; dialogue prompts are questions that the training file does not ask.
Sources are interleaved, so that every prefix of the file is balanced.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["main", "normalised"]

_DATA = Path(__file__).parent / "data"
_TRAINING = _DATA / "smollm2-answers.jsonl"
_HELD_OUT = _DATA / "held-out-prompts.jsonl"
_SEED = 910_417
_PROMPTS_PER_SOURCE = 12
_PROCEDURAL = ("simple_equations", "gcd", "gsm_symbolic", "letter_counting", "chain_sum", "fraction_simplification")


def normalised(prompt: str) -> str:
    """Lower case, letters and digits only: two prompts that differ in no more than punctuation are the same one."""
    return re.sub(r"[^a-z0-9]+", " ", prompt.lower()).strip()


def main() -> None:
    """Writes the file."""
    seen = {normalised(json.loads(line)["messages"][0]["content"]) for line in _TRAINING.read_bytes().splitlines()}
    columns = [[(source, prompt) for prompt in _fresh(_procedural(source), seen)] for source in _PROCEDURAL]
    columns.append([("chatterbot", prompt) for prompt in _fresh(_dialogue(), seen)])
    rows = [row for group in zip(*columns, strict=True) for row in group]
    with _HELD_OUT.open("w", encoding="utf-8") as file:
        for source, prompt in rows:
            message = {"messages": [{"role": "user", "content": prompt}], "source": source}
            file.write(json.dumps(message, ensure_ascii=False) + "\n")
    print(f"wrote {len(rows)} prompts of {len(columns)} sources to {_HELD_OUT}")


def _fresh(prompts: Iterator[str], seen: set[str]) -> list[str]:
    kept: list[str] = []
    for prompt in prompts:
        if normalised(prompt) not in seen:
            seen.add(normalised(prompt))
            kept.append(prompt)
        if len(kept) == _PROMPTS_PER_SOURCE:
            return kept
    raise SystemExit(f"only {len(kept)} prompts that are not in the training file")


def _procedural(source: str) -> Iterator[str]:
    import reasoning_gym  # noqa: PLC0415  # only this script needs it

    for item in reasoning_gym.create_dataset(source, size=10 * _PROMPTS_PER_SOURCE, seed=_SEED):
        yield item["question"]


def _dialogue() -> Iterator[str]:
    import chatterbot_corpus  # noqa: PLC0415  # only this script needs it
    import yaml  # noqa: PLC0415

    folder = Path(chatterbot_corpus.__file__).parent / "data" / "english"
    openings = []
    for path in sorted(folder.glob("*.yml")):
        for conversation in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            opening = str(conversation[0]).strip()
            if 12 <= len(opening) <= 200:
                openings.append(opening)
    random.Random(_SEED).shuffle(openings)
    yield from openings


if __name__ == "__main__":
    main()
