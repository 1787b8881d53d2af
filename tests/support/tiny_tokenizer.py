"""A real tokenizer in miniature: byte-level BPE trained in half a second, with the chat templates people use.

No downloads. About 400 tokens, ids below `VOCAB_SIZE`; a target with a larger vocabulary has free rows, as in Qwen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 500
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_WORDS = tuple(
    word
    for line in (
        "the river flows into a lake and some water stays while other water goes on to the sea where boats wait",
        "hello what is one two three plus minus equals answer question because think user assistant system yes no",
    )
    for word in line.split()
)

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)

# SmolLM2's way: a default system prompt where the row has none.
CHATML_DEFAULT_SYSTEM = (
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nyou answer<|im_end|>\\n' }}{%- endif %}" + CHATML
)

# The same with the tags that mark answers in newer templates; nobody here needs them.
CHATML_GENERATION_TAGS = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{ m.content + '<|im_end|>' }}{%- endif %}{{ '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Mistral's and Gemma's way: roles must alternate, or the template raises.
STRICT = (
    "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{%- endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)

_SPLIT_THINK = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- if ns.last < 0 %}{{ raise_exception('No user query found in messages.') }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role != 'assistant' %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- else %}{%- set content = m.content %}{%- set reasoning = m.reasoning_content or '' %}"
    "{%- if not reasoning and '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
)

# Qwen3's way: only answers after the last question keep their think block, empty ones included.
QWEN3 = (
    _SPLIT_THINK + "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{ '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{%- else %}{{ '<|im_start|>assistant\\n' + content }}{%- endif %}{{ '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)

# Qwen3.5's way: as before, and the opening tag stands in the generation prompt.
QWEN35 = (
    _SPLIT_THINK + "{%- if loop.index0 > ns.last %}"
    "{{ '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}"
    "{%- else %}{{ '<|im_start|>assistant\\n' + content }}{%- endif %}{{ '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)

# DeepSeek-R1's way: history loses its thinking, the last answer too; the opening tag stands in the generation prompt.
R1 = (
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)

# No closing token at all: nothing tells where an answer ends but the next role.
PLAIN_TEXT = (
    "{%- for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant: ' }}{%- endif %}"
)


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(_WORDS), "\n".join(_WORDS), "<think>\n\n</think>\n\n"], trainer)
    text: str = tokenizer.to_str()
    return text


def build_tiny_tokenizer(template: str | None = CHATML, **special: Any) -> PreTrainedTokenizerFast:
    """A fresh tokenizer. `special` overrides its tokens, such as mask_token="<|mask|>" or pad_token="<|im_end|>"."""
    roles = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} | special
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_trained()), **roles)
    tokenizer.chat_template = template
    return tokenizer


def write_tiny_tokenizer(directory: Path, template: str | None = CHATML, **special: Any) -> Path:
    """Saves one to `directory`, as a target's would lie there; returns the directory."""
    build_tiny_tokenizer(template, **special).save_pretrained(directory)
    return directory


def conversations(count: int, *, seed: int = 0, turns: int = 1, max_words: int = 40) -> list[dict[str, Any]]:
    """Rows of random words in the `messages` form."""
    rng = random.Random(seed)

    def words() -> str:
        return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(2, max_words)))

    return [
        {"messages": [{"role": r, "content": words()} for _ in range(turns) for r in ("user", "assistant")]}
        for _ in range(count)
    ]


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Writes one JSON value a line; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
