"""Rows of a dataset to conversations: one shape, whatever the row's schema.

Owns which row schemas are understood and why a row is refused. A row is never repaired by guessing and never dropped in
silence: `DroppedError` says why, and preparation counts it. Standard library only.

    {"messages": [{"role", "content", ...}]}           OpenAI; a bare list counts as messages
    {"conversations": [{"from", "value"}]}             ShareGPT
    {"instruction", "input", "output"}                 Alpaca; the input belongs to the question

Where a row has several of these, the first that holds an answer is taken: some datasets keep a stub beside the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

__all__ = ["MALFORMED", "Conversation", "DropReason", "DroppedError", "parse_prompt", "parse_row"]

_T = TypeVar("_T")

# "from" names that ShareGPT-like datasets use.
_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
# What templates read of a message besides role and content.
_PASSED_ON = ("reasoning_content", "thinking", "tool_calls", "tool_call_id", "name")


class DropReason(StrEnum):
    """Why a row or a sample isn't trained on."""

    BLANK_LINE = "blank line"
    INVALID_JSON = "not valid JSON"
    UNKNOWN_SCHEMA = "no messages, conversations or instruction/output in the row"
    NO_MESSAGES = "no messages"
    MALFORMED_MESSAGE = "a message without role or content"
    UNKNOWN_ROLE = "unknown role, map it with data.role_aliases"
    ASSISTANT_FIRST = "an answer without a question before it"
    NO_ANSWER = "no answer"
    EMPTY_ANSWER = "an empty answer"
    TEMPLATE_ERROR = "the chat template refused it"
    PROMPT_NOT_A_PREFIX = "the template renders an answer otherwise than it prompts for one"
    ANSWER_NOT_RENDERED = "the template leaves out a part of the answer"
    HISTORY_REWRITTEN = "the template rewrites earlier turns (data.rewritten_history is drop)"
    UNSTABLE_BORDER = "prompt and answer can't be tokenised apart"
    TOO_LONG = "longer than data.max_length_tokens"
    ANSWER_TOO_LATE = "its answers begin too late for data.max_length_tokens"
    TOO_FEW_SUPERVISED = "fewer supervised tokens than data.min_supervised_tokens"
    NO_ADJACENT_SUPERVISED = "no two adjacent supervised tokens"


MALFORMED = frozenset(
    {
        DropReason.INVALID_JSON,
        DropReason.UNKNOWN_SCHEMA,
        DropReason.NO_MESSAGES,
        DropReason.MALFORMED_MESSAGE,
        DropReason.UNKNOWN_ROLE,
    }
)
"""Rows that are no conversations. Many of them mean that the file is another than was meant."""


class DroppedError(Exception):
    """A row or sample that isn't trained on; `detail` is worth showing once."""

    def __init__(self, reason: DropReason, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else str(reason))


@dataclass(frozen=True)
class Conversation:
    """Messages up to the last answer, in the form chat templates take."""

    messages: tuple[dict[str, Any], ...]
    tools: Any = field(default=None)
    """Tool definitions for the template, or None."""

    @property
    def answers(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]


def parse_row(line: bytes, *, role_aliases: Mapping[str, str]) -> Conversation:
    """One line of a dataset as a conversation.

    Raises:
        DroppedError: The line holds none that could be trained on.
    """
    row = _load(line)
    return _first_good(row, lambda raw: _conversation(raw, row, role_aliases))


def parse_prompt(line: bytes, *, role_aliases: Mapping[str, str]) -> tuple[Conversation, str]:
    """One line as a prompt: the messages up to the last question, and the row's `source`, if it has one.

    Raises:
        DroppedError: The line holds no question.
    """
    row = _load(line)
    messages = _first_good(row, lambda raw: _messages(raw, row, role_aliases))
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DroppedError(DropReason.NO_MESSAGES)
    return Conversation(tuple(messages), _tools(row.get("tools"))), str(row.get("source", ""))


def _load(line: bytes) -> Mapping[str, Any]:
    if not line.strip():
        raise DroppedError(DropReason.BLANK_LINE)
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError too
        raise DroppedError(DropReason.INVALID_JSON, str(error)) from error
    row = {"messages": row} if isinstance(row, list) else row
    if not isinstance(row, dict):
        raise DroppedError(DropReason.UNKNOWN_SCHEMA, f"a {type(row).__name__}")
    return row


def _first_good(row: Mapping[str, Any], check: Callable[[Any], _T]) -> _T:
    """What `check` makes of the first schema it accepts; the refusal of the first one if it accepts none."""
    refusal: DroppedError | None = None
    for read in (read for key, read in _SCHEMAS.items() if key in row):
        try:
            return check(read(row))
        except DroppedError as error:
            refusal = refusal or error
    raise refusal or DroppedError(DropReason.UNKNOWN_SCHEMA, ", ".join(list(row)[:8]))


def _alpaca(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    question = [text for text in (row["instruction"], row.get("input")) if isinstance(text, str) and text.strip()]
    return [
        {"role": "user", "content": "\n\n".join(question)},
        {"role": "assistant", "content": row.get("output")},
    ]


_SCHEMAS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "messages": lambda row: row["messages"],
    "conversations": lambda row: row["conversations"],
    "instruction": _alpaca,
}


def _conversation(raw: Any, row: Mapping[str, Any], aliases: Mapping[str, str]) -> Conversation:
    messages = _messages(raw, row, aliases)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise DroppedError(DropReason.NO_ANSWER)
    if next(m["role"] for m in messages if m["role"] not in ("system", "developer")) == "assistant":
        raise DroppedError(DropReason.ASSISTANT_FIRST)
    for message in messages:
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            raise DroppedError(DropReason.EMPTY_ANSWER)
    return Conversation(tuple(messages), _tools(row.get("tools")))


def _messages(raw: Any, row: Mapping[str, Any], aliases: Mapping[str, str]) -> list[dict[str, Any]]:
    if not isinstance(raw, list) or not raw:
        raise DroppedError(DropReason.NO_MESSAGES)
    messages = [_message(entry, _ALIASES | dict(aliases)) for entry in raw]
    if isinstance(row.get("system"), str) and row["system"].strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages


def _message(entry: Any, aliases: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise DroppedError(DropReason.MALFORMED_MESSAGE, f"a {type(entry).__name__}")
    said = entry.get("role", entry.get("from"))
    if not isinstance(said, str):
        raise DroppedError(DropReason.MALFORMED_MESSAGE, "no role")
    role = aliases.get(said, said)
    if role not in _ROLES:
        raise DroppedError(DropReason.UNKNOWN_ROLE, said)
    message = {key: entry[key] for key in _PASSED_ON if entry.get(key) is not None}
    if "reasoning_content" not in message and isinstance(entry.get("reasoning"), str):
        message["reasoning_content"] = entry["reasoning"]
    if "tool_calls" in message:
        message["tool_calls"] = _decoded_calls(message["tool_calls"])
    content = _text(entry.get("content", entry.get("value")))
    if content is None and not message.get("tool_calls"):
        raise DroppedError(DropReason.MALFORMED_MESSAGE, f"content of {said} is missing, null or not text")
    return {"role": role, "content": content or "", **message}


def _decoded_calls(calls: Any) -> Any:
    """Tool calls with arguments as values: OpenAI's rows hold them as JSON text, which templates would quote again."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DroppedError(DropReason.MALFORMED_MESSAGE, "tool_calls is no list of calls")
    decoded = [dict(call) for call in calls]
    for call in decoded:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                call["function"] = function | {"arguments": json.loads(function["arguments"])}
            except json.JSONDecodeError as error:
                raise DroppedError(DropReason.INVALID_JSON, f"tool call's arguments: {error}") from error
    return decoded


def _text(content: Any) -> str | None:
    """Text content, whole or in parts; None for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            return None
        texts.append(part["text"])
    return "".join(texts)


def _tools(tools: Any) -> Any:
    """Tool definitions; some datasets keep them as a JSON string."""
    if not isinstance(tools, str):
        return tools or None
    try:
        return json.loads(tools) or None
    except json.JSONDecodeError as error:
        raise DroppedError(DropReason.INVALID_JSON, f"tools: {error}") from error
