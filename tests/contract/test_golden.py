"""Bytes that a release once sent still mean the same, and are still what we send."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from target_wire.framing import BatchFrameView, decode_response, encode_batch_frame
from target_wire.v1 import target_pb2

from tests.contract.golden_messages import GOLDEN, MESSAGES


def golden(name: str) -> bytes:
    return (GOLDEN / f"{name}.bin").read_bytes()


def test_every_golden_file_has_its_message() -> None:
    assert {file.stem for file in GOLDEN.glob("*.bin")} == set(MESSAGES)


def test_every_message_of_every_call_has_a_golden_file() -> None:
    services = target_pb2.DESCRIPTOR.services_by_name.values()
    called = {
        kind for service in services for method in service.methods for kind in (method.input_type, method.output_type)
    }
    alternatives = {f"{kind.name}.{field.name}" for kind in called for oneof in kind.oneofs for field in oneof.fields}
    kept = {message.DESCRIPTOR for message in MESSAGES.values()}
    kept_alternatives = {
        f"{message.DESCRIPTOR.name}.{message.WhichOneof('message')}"
        for message in MESSAGES.values()
        if message.DESCRIPTOR.oneofs
    }
    assert kept == called
    assert kept_alternatives == alternatives


@pytest.mark.parametrize("name", MESSAGES)
def test_golden_bytes_still_parse(name: str) -> None:
    expected = MESSAGES[name]
    assert type(expected).FromString(golden(name)) == expected


@pytest.mark.parametrize("name", MESSAGES)
def test_golden_bytes_are_still_what_is_sent(name: str) -> None:
    assert MESSAGES[name].SerializeToString(deterministic=True) == golden(name)


@pytest.mark.parametrize("name", [name for name in MESSAGES if name.startswith("stream_batch_frame")])
def test_golden_frames_pass_the_hand_written_framing(name: str) -> None:
    message: Message = MESSAGES[name]
    frame = message.batch_frame
    view = decode_response(golden(name))
    assert view == BatchFrameView(frame.request_id, frame.offset_bytes, frame.crc32c, memoryview(frame.body))
    assert encode_batch_frame(frame.request_id, frame.offset_bytes, frame.crc32c, view.body) == golden(name)


@pytest.mark.parametrize("name", ["stream_opened", "stream_batch_header", "stream_batch_failed"])
def test_golden_control_messages_pass_the_hand_written_framing(name: str) -> None:
    assert decode_response(golden(name)) == MESSAGES[name]
