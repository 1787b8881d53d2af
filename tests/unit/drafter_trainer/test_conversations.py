from __future__ import annotations

import json

import pytest

from drafter_trainer.conversations import DroppedError, DropReason, parse_prompt, parse_row

QA = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
SHARED = [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "two"}]


def parsed(row, **aliases):
    return parse_row(json.dumps(row).encode(), role_aliases=aliases)


def said(row, **aliases):
    return [(message["role"], message["content"]) for message in parsed(row, **aliases).messages]


def reason(line: bytes) -> DropReason:
    with pytest.raises(DroppedError) as caught:
        parse_row(line, role_aliases={})
    return caught.value.reason


@pytest.mark.parametrize("row", [{"messages": QA}, QA, {"conversations": SHARED}, {"conversations": QA}])
def test_schemas_give_the_same_conversation(row):
    assert said(row) == [("user", "one?"), ("assistant", "two")]


@pytest.mark.parametrize(  # case 16
    ("line", "expected"),
    [
        (b"", DropReason.BLANK_LINE),
        (b"  \r\n", DropReason.BLANK_LINE),
        (b"{nope", DropReason.INVALID_JSON),
        (b'{"messages": "\xff"}', DropReason.INVALID_JSON),
        (b"[" * 100_000, DropReason.INVALID_JSON),
        (b"[]", DropReason.NO_MESSAGES),
        (b'{"messages": []}', DropReason.NO_MESSAGES),
        (b'{"messages": null}', DropReason.NO_MESSAGES),
        (b'"text"', DropReason.UNKNOWN_SCHEMA),
        (b'{"text": "x"}', DropReason.UNKNOWN_SCHEMA),
        (b'[{"role": "assistant", "content": "two"}]', DropReason.ASSISTANT_FIRST),
        (b'[{"role": "system", "content": "s"}, {"role": "assistant", "content": "two"}]', DropReason.ASSISTANT_FIRST),
        (b'[{"role": "system", "content": "s"}]', DropReason.NO_ANSWER),
        (b'[{"role": "user", "content": "one?"}]', DropReason.NO_ANSWER),
        (b'[{"role": "user", "content": null}, {"role": "assistant", "content": "x"}]', DropReason.MALFORMED_MESSAGE),
        (b'[{"role": "user"}, {"role": "assistant", "content": "x"}]', DropReason.MALFORMED_MESSAGE),
        (b'[{"content": "one?"}, {"role": "assistant", "content": "x"}]', DropReason.MALFORMED_MESSAGE),
        (b'[3, {"role": "assistant", "content": "x"}]', DropReason.MALFORMED_MESSAGE),
        (b'[{"role": "user", "content": "q"}, {"role": "assistant", "content": " "}]', DropReason.EMPTY_ANSWER),
        (b'{"instruction": "q", "output": null}', DropReason.MALFORMED_MESSAGE),
        (b'{"instruction": "q"}', DropReason.MALFORMED_MESSAGE),
    ],
)
def test_row_that_holds_nothing_to_train_says_why(line, expected):
    assert reason(line) is expected


def test_unknown_role_names_itself_and_can_be_mapped():  # case 19
    row = {"messages": [QA[0], {"role": "laguna_s", "content": "two"}]}
    with pytest.raises(DroppedError, match=r"unknown role.*laguna_s"):
        parsed(row)
    assert said(row, laguna_s="assistant")[-1] == ("assistant", "two")


def test_instruction_keeps_its_input():  # case 33
    row = {"instruction": "add", "input": "1 and 2", "output": "3"}
    assert said(row) == [("user", "add\n\n1 and 2"), ("assistant", "3")]
    assert said(row | {"input": ""})[0] == ("user", "add")


def test_messages_win_over_conversations():  # case 34
    other = [{"from": "human", "value": "no"}, {"from": "gpt", "value": "no"}]
    assert said({"messages": QA, "conversations": other}) == [("user", "one?"), ("assistant", "two")]


@pytest.mark.parametrize("stub", [[], None, [{"role": "user", "content": "cid-17"}]])
def test_stub_messages_give_way_to_conversations(stub):  # case 34
    assert said({"messages": stub, "conversations": SHARED}) == [("user", "one?"), ("assistant", "two")]


def test_what_follows_the_last_answer_is_left_out():
    assert said([*QA, {"role": "user", "content": "more?"}]) == [("user", "one?"), ("assistant", "two")]


def test_system_beside_the_messages_comes_first():
    assert said({"system": "be brief", "conversations": SHARED})[0] == ("system", "be brief")
    own = [{"role": "system", "content": "own"}, *QA]
    assert said({"system": "other", "messages": own})[0] == ("system", "own")


def test_text_parts_are_joined_and_other_parts_refused():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "?"}]
    assert said([{"role": "user", "content": parts}, QA[1]])[0] == ("user", "one?")
    image = [{"type": "image", "url": "x"}]
    assert reason(json.dumps([{"role": "user", "content": image}, QA[1]]).encode()) is DropReason.MALFORMED_MESSAGE


def test_reasoning_and_tools_reach_the_template():  # case 21
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    answer = {"role": "assistant", "content": "x", "reasoning": "because"}
    conversation = parsed({"messages": [QA[0], call, {"role": "tool", "content": "3"}, answer], "tools": tools})
    assert conversation.tools == tools
    assert conversation.messages[1]["tool_calls"] == call["tool_calls"]
    assert conversation.messages[-1]["reasoning_content"] == "because"
    assert conversation.answers == [1, 3]
    assert parsed({"messages": QA, "tools": json.dumps(tools)}).tools == tools


def test_arguments_of_tool_calls_are_values_not_text():
    def with_arguments(arguments):
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        return parsed([QA[0], call]).messages[1]["tool_calls"][0]["function"]

    assert (
        with_arguments('{"city": "Oslo"}')
        == with_arguments({"city": "Oslo"})
        == {"name": "f", "arguments": {"city": "Oslo"}}
    )
    with pytest.raises(DroppedError, match="tool call's arguments"):
        with_arguments("{oops")


def test_prompt_ends_with_its_last_question_and_keeps_its_source():
    row = json.dumps({"messages": [*QA, *QA], "source": "gcd"}).encode()
    conversation, source = parse_prompt(row, role_aliases={})
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "user"]
    assert source == "gcd"
    alone = parse_prompt(json.dumps({"messages": QA[:1]}).encode(), role_aliases={})
    assert (len(alone[0].messages), alone[1]) == (1, "")


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'[{"role": "assistant", "content": "x"}]', b'{"source": "x"}'])
def test_line_without_a_question_is_no_prompt(line):
    with pytest.raises(DroppedError):
        parse_prompt(line, role_aliases={})
