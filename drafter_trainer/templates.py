"""Conversations to token ids and loss masks, exactly as serving would see them.

Owns what is supervised: the tokens the target itself would emit for an answer, its closing token included, and nothing
else. Not the generation prompt, not a think block the template adds by itself, not the line break after the closing
token. It never trusts a template: what it can't prove is dropped with a reason, never masked by guess.

Templates rarely carry {% generation %} tags, so each answer is found by rendering, with any template:

    prompt   = render(messages before the answer, with the generation prompt)       what serving sends
    turn     = render(messages up to the answer)              must begin with prompt; the rest is the tail
    probe    = render(the same with a marker as the answer)   prompt | lead-in | marker | closing
    tail     = [lead-in] answer closing      of the closing, what goes up to its first special token is emitted

A lead-in that is more than white space is the template's own and not supervised, unless the row wrote it.

Conversations of several turns become one sample as long as each next prompt begins, token for token, with the sample so
far. A template that rewrites history (drops earlier thinking, for one) breaks that: then each answer gets a sample of
its own, after the very prompt that serving would send for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jinja2

from drafter_trainer.conversations import Conversation, DroppedError, DropReason

__all__ = ["ChatTokenizer", "TokenizedSample"]

# Survives any template: one word, no markup. Answers that hold it are not expected.
_MARKER = "q7Answer7Marker7q"
# The generation prompt may already hold the answer's first tag: this much of it is searched too.
_PROMPT_TAIL_CHARS = 64


@dataclass(frozen=True)
class TokenizedSample:
    """One sequence to train on; both lists have its length."""

    input_ids: list[int]
    loss_mask: list[bool]


class ChatTokenizer:
    """Renders and tokenises conversations with the target's own tokenizer.

    Args:
        tokenizer: The target's, with a chat template.
        options: Extra variables for the template.
        split_rewritten: What to do where the template rewrites history: one sample a turn, or drop.
    """

    def __init__(self, tokenizer: Any, *, options: Mapping[str, Any], split_rewritten: bool = True) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options)
        self._split_rewritten = split_rewritten
        special = set(tokenizer.all_special_tokens)
        special |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        # Longest first: of two that begin at the same place the longer one is meant.
        alternatives = sorted((re.escape(token) for token in special if token), key=len, reverse=True)
        self._special = re.compile("|".join(alternatives)) if alternatives else None

    def tokenize(self, conversation: Conversation) -> list[TokenizedSample]:
        """All samples of a conversation, at least one.

        Raises:
            DroppedError: The template refuses the conversation, or its answers can't be told from their surroundings.
        """
        samples: list[TokenizedSample] = []
        for index in conversation.answers:
            prompt_ids, answer_ids = self._turn(conversation, index)
            begun = samples.pop() if samples else TokenizedSample([], [])
            if prompt_ids[: len(begun.input_ids)] != begun.input_ids:
                if not self._split_rewritten:
                    raise DroppedError(DropReason.HISTORY_REWRITTEN)
                samples.append(begun)
                begun = TokenizedSample([], [])
            unsupervised = len(prompt_ids) - len(begun.input_ids)
            samples.append(
                TokenizedSample(
                    prompt_ids + answer_ids,
                    begun.loss_mask + [False] * unsupervised + [True] * len(answer_ids),
                )
            )
        return samples

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation that ends with a question, as serving would send it.

        Raises:
            DroppedError: The template refuses it.
        """
        return self._ids(self._render(conversation, prompting=True))

    def _turn(self, conversation: Conversation, index: int) -> tuple[list[int], list[int]]:
        """Token ids before and of the answer at `index`."""
        before, answer = conversation.messages[:index], conversation.messages[index]
        prompt = self._render(replace(conversation, messages=before), prompting=True)
        turn = self._render(replace(conversation, messages=(*before, answer)))
        if not turn.startswith(prompt):
            raise DroppedError(DropReason.PROMPT_NOT_A_PREFIX, f"prompt ends {prompt[-40:]!r}")
        lead_in, closing = self._probe(conversation, before, prompt)
        tail = turn[len(prompt) :]
        if not tail.endswith(closing):
            raise DroppedError(DropReason.ANSWER_NOT_RENDERED, f"it ends {tail[-40:]!r}, not {closing!r}")
        _check_complete(answer, prompt[-_PROMPT_TAIL_CHARS:] + tail)
        body = tail[: len(tail) - len(closing)]
        prompt_ids, answer_ids = self._encode(prompt, body + self._emitted_part(closing))
        if not _squeeze(lead_in) or not tail.startswith(lead_in) or _brings(answer, lead_in):
            return prompt_ids, answer_ids
        led = 0
        while led < len(answer_ids) and lead_in.startswith(self._text(answer_ids[: led + 1])):
            led += 1  # a token that lies across the end belongs to the answer: the model emits it whole
        return prompt_ids + answer_ids[:led], answer_ids[led:]

    def _probe(self, conversation: Conversation, before: tuple[dict[str, Any], ...], prompt: str) -> tuple[str, str]:
        """What the template puts between prompt and answer, and after the answer."""
        marked = {"role": "assistant", "content": _MARKER}
        text = self._render(replace(conversation, messages=(*before, marked)))
        lead_in, found, closing = text.removeprefix(prompt).partition(_MARKER)
        if not found or not text.startswith(prompt):
            raise DroppedError(DropReason.PROMPT_NOT_A_PREFIX, f"prompt ends {prompt[-40:]!r}")
        return lead_in, closing

    def _emitted_part(self, closing: str) -> str:
        """The closing up to its first special token, where generation stops; nothing if it has none."""
        stop = self._special.search(closing) if self._special else None
        return closing[: stop.end()] if stop else ""

    def _render(self, conversation: Conversation, *, prompting: bool = False) -> str:
        try:
            # As text: what comes back for tokenize=True has changed between versions of transformers.
            text: str = self._tokenizer.apply_chat_template(
                list(conversation.messages),
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=prompting,
                **self._options,
            )
            text.encode()  # half a surrogate pair can't be tokenised: a UnicodeEncodeError here
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            # A template is a program that the row makes fail: its errors are the row's, of whatever type.
            raise DroppedError(DropReason.TEMPLATE_ERROR, str(error)) from error
        return text

    def _encode(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        prompt_ids, all_ids = self._ids(prompt), self._ids(prompt + answer)
        if all_ids[: len(prompt_ids)] == prompt_ids:
            return prompt_ids, all_ids[len(prompt_ids) :]
        # Tokenised whole, a token lies across the border; serving tokenises the prompt alone.
        answer_ids = self._ids(answer)
        if self._text(prompt_ids + answer_ids) != self._text(all_ids):
            raise DroppedError(DropReason.UNSTABLE_BORDER, f"{prompt[-20:]!r} before {answer[:20]!r}")
        return prompt_ids, answer_ids

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def _check_complete(answer: Mapping[str, Any], rendered: str) -> None:
    """Every word of the answer must be rendered: what serving emits is all of it, thinking included."""
    rendered = _squeeze(rendered)
    for key in ("reasoning_content", "thinking", "content"):
        said = answer.get(key)
        if isinstance(said, str) and _squeeze(said) not in rendered:
            raise DroppedError(DropReason.ANSWER_NOT_RENDERED, f"{key} {' '.join(said.split())[:40]!r}")


def _brings(answer: Mapping[str, Any], lead_in: str) -> bool:
    """Whether the lead-in was written in the row itself (an answer that begins with its own empty think block)."""
    return _squeeze(answer["content"]).startswith(_squeeze(lead_in))


def _squeeze(text: str) -> str:
    """Without white space, which templates trim and add."""
    return "".join(text.split())
