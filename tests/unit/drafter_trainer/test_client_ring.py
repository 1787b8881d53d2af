"""The ring's memory and the port's messages."""

from __future__ import annotations

import asyncio
import gc
import os
import socket

import pytest
import torch

from drafter_trainer.client.port import PortClosedError, ReceiverPort, TrainerPort
from drafter_trainer.client.ring import PAGE_BYTES, Ring


def test_slots_do_not_overlap_and_start_on_pages() -> None:
    ring = Ring.create(slot_bytes=5000, slot_count=3)
    for index in range(3):
        ring.slot(index, 5000)[:] = bytes([index + 1]) * 5000
    for index in range(3):
        assert bytes(ring.slot(index, 5000)) == bytes([index + 1]) * 5000
    assert ring.slot_bytes == 2 * PAGE_BYTES
    ring.close()


def test_two_views_of_the_descriptor_see_the_same_bytes() -> None:
    ring = Ring.create(slot_bytes=100, slot_count=2)
    other = Ring(os.dup(ring.descriptor), slot_bytes=100, slot_count=2)
    ring.slot(1, 4)[:] = b"abcd"
    assert bytes(other.slot(1, 4)) == b"abcd"
    ring.close()
    other.close()


@pytest.mark.parametrize(("index", "size"), [(2, 1), (-1, 1), (0, PAGE_BYTES + 1)])
def test_a_slot_outside_the_ring_is_refused(index: int, size: int) -> None:
    ring = Ring.create(slot_bytes=100, slot_count=2)
    with pytest.raises(ValueError, match="slot"):
        ring.slot(index, size)
    ring.close()


def test_a_tensor_that_outlives_the_ring_still_reads_its_memory() -> None:
    ring = Ring.create(slot_bytes=100, slot_count=1)
    ring.slot(0, 4)[:] = b"\1\2\3\4"
    tensor = torch.frombuffer(ring.slot(0, 4), dtype=torch.uint8)
    ring.close()
    del ring
    gc.collect()
    assert tensor.tolist() == [1, 2, 3, 4]


def test_messages_cross_whole_in_both_directions() -> None:
    ours, theirs = socket.socketpair()
    trainer = TrainerPort(ours)
    tail = bytes(range(256)) * 3000

    async def receiver() -> None:
        port = await ReceiverPort.open(theirs)
        for _ in range(2):
            message = await port.receive()
            assert message is not None
            header, got = message
            port.send({"echo": header["n"]}, got)
        assert await port.receive() is None  # the trainer has closed
        await port.close()

    async def both() -> list[tuple[dict[str, int], bytes]]:
        task = asyncio.create_task(receiver())
        for n in range(2):
            await asyncio.to_thread(trainer.send, {"n": n}, tail)
        answers = [await asyncio.to_thread(trainer.receive, 5.0) for _ in range(2)]
        trainer.close()
        await asyncio.wait_for(task, 5)
        return [answer for answer in answers if answer is not None]

    assert asyncio.run(both()) == [({"echo": 0}, tail), ({"echo": 1}, tail)]


def test_receiving_gives_up_at_its_deadline_and_notices_a_dead_peer() -> None:
    ours, theirs = socket.socketpair()
    trainer = TrainerPort(ours)
    assert trainer.receive(0.01) is None
    theirs.close()
    with pytest.raises(PortClosedError):
        trainer.receive(1.0)
    with pytest.raises(PortClosedError):
        trainer.send({"kind": "stop"}, bytes(1 << 20))
    trainer.close()


def test_sending_to_a_peer_that_does_not_read_gives_up_at_its_deadline() -> None:
    ours, theirs = socket.socketpair()
    trainer = TrainerPort(ours)
    with pytest.raises(PortClosedError, match="does not read"):
        trainer.send({}, bytes(16 << 20), timeout_s=0.05)
    trainer.close()
    theirs.close()
