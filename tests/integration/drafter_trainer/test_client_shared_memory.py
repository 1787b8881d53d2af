"""Bodies through shared memory, seen from the trainer: false frames are refused, without it all goes on (I1, I2)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import pytest
from target_wire.v1 import target_pb2 as pb

from drafter_trainer.client.delivery import Delivery
from tests.integration.drafter_trainer.test_client import BATCHES, PATIENCE, TERMS, deliver, receive
from tests.support.fake_target import FakeTarget
from tests.support.shared_memory import shared_memory_of

SIZE = 3 * 64 * 2 * 16 * 4  # of the buffer: the window of TERMS


def position(change: int) -> Callable[[pb.SharedFrame], None]:
    def apply(frame: pb.SharedFrame) -> None:
        frame.position_bytes += change

    return apply


def size(change: Callable[[int], int]) -> Callable[[pb.SharedFrame], None]:
    def apply(frame: pb.SharedFrame) -> None:
        frame.size_bytes = change(frame.size_bytes)

    return apply


FALSE_FRAMES = {
    "a row further on": position(128),
    "before it": position(-128),
    "a whole buffer later": position(SIZE),
    "below zero": position(-(1 << 62)),
    "far away": position(1 << 62),
    "longer than a quarter": size(lambda _: SIZE // 4 + 128),
    "longer than the buffer": size(lambda _: SIZE + 128),
    "longer than memory": size(lambda _: (1 << 63) - 1),
    "empty": size(lambda _: 0),
    "negative": size(lambda n: -n),
    "half a row": size(lambda n: n - 64),
    "a row less": size(lambda n: n - 128),
    "a row more": size(lambda n: n + 128),
}


@pytest.mark.parametrize("fault", FALSE_FRAMES)
def test_a_frame_elsewhere_than_due_ends_the_stream_and_its_batches_come_again(fault: str) -> None:
    frames = iter(range(1 << 20))

    def one_in_the_middle(frame: pb.SharedFrame) -> None:
        if next(frames) == 7:  # the second of a batch's three
            FALSE_FRAMES[fault](frame)

    with FakeTarget(shared_memory=True) as target:
        target.shared_fault = one_in_the_middle
        slots = receive(target)
    assert len(target.opens) == 2
    assert max(slot.attempts for slot in slots) == 2
    assert shared_memory_of("self") == []


def test_bytes_that_are_not_those_of_the_checksum_are_asked_for_again() -> None:
    frames = iter(range(1 << 20))

    def other_bytes(frame: pb.SharedFrame) -> None:
        frame.crc32c ^= next(frames) == 7

    with FakeTarget(shared_memory=True) as target:
        target.shared_fault = other_bytes
        slots = receive(target)
    assert len(target.opens) == 1  # the stream is sound
    assert [slot.attempts for slot in slots].count(2) == 1


def test_a_frame_in_memory_that_the_session_has_not_got_ends_the_stream() -> None:
    made = []

    def into_nothing(asked, messages: list[bytes]) -> list[bytes]:
        if made:
            return messages
        made.append(asked)
        frame = pb.SharedFrame(request_id=asked.request.request_id, size_bytes=128)
        return [messages[0], pb.StreamHiddenStatesResponse(shared_frame=frame).SerializeToString()]

    with FakeTarget(fault=into_nothing, shared_memory=False) as target:
        receive(target)
    assert len(target.opens) == 2


def test_the_line_of_the_start_says_which_way(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    lines = {}
    elsewhere = FakeTarget._offer

    def other_host(self: FakeTarget, opening: pb.Open, opened: pb.Opened):
        buffer = elsewhere(self, opening, opened)
        opened.shared_buffer.socket_name = "nobody-listens-here"
        return buffer

    for case in ("shared memory", "other host", "older server", "off"):
        caplog.clear()
        terms = dataclasses.replace(TERMS, shared_memory=case != "off")
        with caplog.at_level(logging.INFO), FakeTarget(shared_memory=case != "older server") as target:
            monkeypatch.setattr(FakeTarget, "_offer", other_host if case == "other host" else elsewhere)
            with Delivery([target.address], terms=terms, patience=PATIENCE) as delivery:
                assert len(list(deliver(delivery, BATCHES))) == len(BATCHES)
        assert (target.shared_frames > 0) == (case == "shared memory")
        assert target.opens[0].shared_memory == (case != "off")
        (line,) = (record.message for record in caplog.records if "hidden states come" in record.message)
        lines[case] = line.split(": ", 1)[1]
    assert lines == {
        "shared memory": "hidden states come through shared memory",
        "other host": "hidden states come on the gRPC stream (the replica is on another host, or in another network "
        "namespace)",
        "older server": "hidden states come on the gRPC stream (the server offers none)",
        "off": "hidden states come on the gRPC stream (switched off)",
    }
