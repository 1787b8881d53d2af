from __future__ import annotations

import json
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_trainer.conversations import DroppedError, DropReason, parse_row
from drafter_trainer.templates import ChatTokenizer, TokenizedSample
from tests.support import tiny_tokenizer as tiny

SPLIT_TEMPLATES = {"QWEN3": tiny.QWEN3, "QWEN35": tiny.QWEN35}
PLAIN_TEMPLATES = {
    name: getattr(tiny, name) for name in ("CHATML", "CHATML_DEFAULT_SYSTEM", "CHATML_GENERATION_TAGS", "STRICT")
}


def turns(*texts: str, **last) -> list[dict]:
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    messages[-1] |= last
    return messages


def tokenized(template: str, messages, *, options=None, split=True):
    tokenizer = tiny.build_tiny_tokenizer(template)
    chat = ChatTokenizer(tokenizer, options=options or {}, split_rewritten=split)
    return tokenizer, chat.tokenize(parse_row(json.dumps(messages).encode(), role_aliases={}))


def supervised(tokenizer, sample: TokenizedSample) -> list[str]:
    """Text of each supervised stretch."""
    pairs = zip(sample.input_ids, sample.loss_mask, strict=True)
    groups = ((flag, [i for i, _ in group]) for flag, group in groupby(pairs, key=lambda pair: pair[1]))
    return [tokenizer.decode(ids) for flag, ids in groups if flag]


def dropped(template: str, messages, **options) -> DroppedError:
    with pytest.raises(DroppedError) as caught:
        tokenized(template, messages, **options)
    return caught.value


@pytest.mark.parametrize("template", PLAIN_TEMPLATES.values(), ids=PLAIN_TEMPLATES)
def test_answers_and_their_closing_tokens_are_supervised_and_nothing_else(template):  # cases 23, 24
    tokenizer, samples = tokenized(template, turns("one?", "two", "and?", "three"))
    assert [supervised(tokenizer, sample) for sample in samples] == [["two<|im_end|>", "three<|im_end|>"]]


@pytest.mark.parametrize("template", PLAIN_TEMPLATES.values(), ids=PLAIN_TEMPLATES)
def test_tokens_are_the_templates_own(template):
    messages = turns("one?", "two", "and?", "three")
    tokenizer, [sample] = tokenized(template, messages)
    whole = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    # All but the line break after the last closing token, which nobody ever sees.
    assert sample.input_ids == whole[: len(sample.input_ids)]
    assert tokenizer.decode(whole[len(sample.input_ids) :]) == "\n"


@pytest.mark.parametrize("template", [*PLAIN_TEMPLATES.values(), *SPLIT_TEMPLATES.values()])
def test_generation_prompt_is_never_supervised(template):  # case 24
    messages = turns("one?", "two", "and?", "three")
    tokenizer, samples = tokenized(template, messages)
    prompts = [messages[:1], messages[:3]]
    by_end = {len(s.input_ids): s for s in samples}
    for prompt in prompts:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        mine = [s for s in by_end.values() if s.input_ids[: len(ids)] == ids]
        assert mine, "some sample begins exactly with what serving sends"
        for sample in mine:
            header = len(tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"])
            assert not any(sample.loss_mask[len(ids) - header : len(ids)])


@pytest.mark.parametrize("written", ["content", "reasoning_content"])  # case 21
def test_thinking_is_supervised(written):
    if written == "content":
        messages = turns("one?", "<think>\nbecause\n</think>\n\ntwo")
    else:
        messages = turns("one?", "two", reasoning_content="because")
    tokenizer, [sample] = tokenized(tiny.QWEN3, messages)
    assert supervised(tokenizer, sample) == ["<think>\nbecause\n</think>\n\ntwo<|im_end|>"]
    tokenizer, [sample] = tokenized(tiny.QWEN35, messages)
    assert supervised(tokenizer, sample) == ["because\n</think>\n\ntwo<|im_end|>"], "the prompt holds the opening tag"


@pytest.mark.parametrize("template", SPLIT_TEMPLATES.values(), ids=SPLIT_TEMPLATES)
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_empty_think_block_of_the_template_is_not_supervised(template, options):  # case 24
    tokenizer, [sample] = tokenized(template, turns("one?", "two"), options=options)
    assert tokenizer.decode(sample.input_ids).endswith("</think>\n\ntwo<|im_end|>")
    assert supervised(tokenizer, sample) == ["two<|im_end|>"]


def test_empty_think_block_that_the_row_holds_is_supervised():
    tokenizer, [sample] = tokenized(tiny.QWEN3, turns("one?", "<think>\n\n</think>\n\ntwo"))
    assert supervised(tokenizer, sample) == ["<think>\n\n</think>\n\ntwo<|im_end|>"]


@pytest.mark.parametrize("template", SPLIT_TEMPLATES.values(), ids=SPLIT_TEMPLATES)
def test_rewritten_history_gives_each_turn_what_serving_would_send(template):  # case 22
    messages = turns("a?", "x", "b?", "y", "c?", "z")
    for answer in messages[1::2]:
        answer["reasoning_content"] = f"think of {answer['content']}"
    tokenizer, samples = tokenized(template, messages)
    assert len(samples) == 3
    for sample, index in zip(samples, (1, 3, 5), strict=True):
        prompt = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert sample.input_ids[: len(prompt_ids)] == prompt_ids
        assert sample.loss_mask.index(True) == len(prompt_ids)
        assert [text.count("think of") for text in supervised(tokenizer, sample)] == [1]


@pytest.mark.parametrize("template", SPLIT_TEMPLATES.values(), ids=SPLIT_TEMPLATES)
def test_rewritten_history_can_be_dropped_instead(template):  # case 22
    messages = turns("a?", "x", "b?", "y")
    messages[1]["reasoning_content"] = "because"
    assert dropped(template, messages, split=False).reason is DropReason.HISTORY_REWRITTEN


def test_template_that_leaves_out_thinking_is_refused():  # case 22
    assert dropped(tiny.R1, turns("a?", "<think>\nhm\n</think>\n\nx")).reason is DropReason.PROMPT_NOT_A_PREFIX
    assert dropped(tiny.CHATML, turns("a?", "x", reasoning_content="hm")).reason is DropReason.ANSWER_NOT_RENDERED
    dropping = tiny.CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    assert dropped(dropping, turns("a?", "<think>hm</think>x")).reason is DropReason.ANSWER_NOT_RENDERED


def test_templates_errors_are_the_rows():  # case 18
    error = dropped(tiny.STRICT, [{"role": "system", "content": "s"}, *turns("a?", "x")])
    assert error.reason is DropReason.TEMPLATE_ERROR
    assert "roles must alternate" in error.detail
    assert dropped("{{ messages[7].content }}", turns("a?", "x")).reason is DropReason.TEMPLATE_ERROR
    assert dropped("{{ messages[0].content + 1 }}", turns("a?", "x")).reason is DropReason.TEMPLATE_ERROR
    assert dropped(tiny.CHATML, turns("a?", "\ud800")).reason is DropReason.TEMPLATE_ERROR


def test_answer_without_closing_token_ends_with_its_text():
    tokenizer, samples = tokenized(tiny.PLAIN_TEXT, turns("one?", "two", "and?", "three"))
    # Apart: the prompt's last space stands alone when it is sent, and merges with "two" once that is history.
    assert [supervised(tokenizer, sample) for sample in samples] == [["two"], ["three"]]


def test_token_across_the_border_keeps_the_prompt_as_serving_sends_it():
    """An answer that begins with a line break would merge with the prompt's."""
    tokenizer, [sample] = tokenized(tiny.CHATML, turns("one?", "\ntwo"))
    prompt = tokenizer("<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)[
        "input_ids"
    ]
    assert sample.input_ids[: len(prompt)] == prompt
    assert supervised(tokenizer, sample) == ["\ntwo<|im_end|>"]


def test_default_system_prompt_is_context():
    tokenizer, [sample] = tokenized(tiny.CHATML_DEFAULT_SYSTEM, turns("one?", "two"))
    assert tokenizer.decode(sample.input_ids).startswith("<|im_start|>system\nyou answer<|im_end|>")
    assert supervised(tokenizer, sample) == ["two<|im_end|>"]


words = st.text(st.sampled_from("ab ,.\n<>/é水"), min_size=1, max_size=12).filter(lambda text: text.strip())


@given(st.lists(words, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
def test_any_text_is_supervised_whole(texts):
    tokenizer, samples = tokenized(tiny.CHATML, turns(*texts))
    found = [text for sample in samples for text in supervised(tokenizer, sample)]
    assert found == [f"{answer}<|im_end|>" for answer in texts[1::2]]
