"""`python -m bench.raw_socket`: what a loopback TCP socket can carry, sent by this process and received by the parent.

The same sizes as the stream's: batches that lie one after the other in a few slots, written in frames, received into a
ring. No framing, no checksum, no credit: the limit that the wire is compared with.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bench.child import Child, child, reply
from bench.options import BenchError
from drafter_trainer.client.ring import Ring

__all__ = ["RawReceiver", "Sizes", "raw_receiver"]

_TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is sent, whichever way.

    Attributes:
        batch_bytes: one batch; it fills a slot.
        slot_count: slots on either side.
        frame_bytes: what is written at a time.
    """

    batch_bytes: int
    slot_count: int
    frame_bytes: int


class RawReceiver:
    """Receives batches into a ring.

    Attributes:
        sender: the other side.
    """

    def __init__(self, sender: Child, connection: socket.socket, ring: Ring, *, batch_bytes: int) -> None:
        self.sender = sender
        self._connection = connection
        self._ring = ring
        self._batch_bytes = batch_bytes
        self._next = 0

    def receive(self, count: int) -> None:
        """Asks for `count` batches and returns once the last one is in its slot."""
        self._connection.sendall(count.to_bytes(8, "little"))
        for _ in range(count):
            slot = self._ring.slot(self._next % self._ring.slot_count, self._batch_bytes)
            self._next += 1
            filled = 0
            while filled < self._batch_bytes:
                size = self._connection.recv_into(slot[filled:])
                if not size:
                    raise BenchError("the raw sender has ended; its messages are above")
                filled += size


@contextmanager
def raw_receiver(sizes: Sizes, *, cores: set[int]) -> Iterator[RawReceiver]:
    """Connects to a sender that runs on these cores, for the time of a block."""
    ring = Ring.create(slot_bytes=sizes.batch_bytes, slot_count=sizes.slot_count)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_TIMEOUT_S)
        port = listener.getsockname()[1]
        with child("bench.raw_socket", {**dataclasses.asdict(sizes), "port": port, "cores": sorted(cores)}) as sender:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(_TIMEOUT_S)
                yield RawReceiver(sender, connection, ring, batch_bytes=sizes.batch_bytes)
    ring.close()


def _send(port: int, sizes: Sizes) -> None:
    memory = memoryview(mmap.mmap(-1, sizes.batch_bytes * sizes.slot_count))
    for start in range(0, len(memory), mmap.PAGESIZE):
        memory[start] = 1
    sent = 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        reply({})
        while count := int.from_bytes(connection.recv(8), "little"):
            for _ in range(count):
                first = sent % sizes.slot_count * sizes.batch_bytes
                batch = memory[first : first + sizes.batch_bytes]
                for start in range(0, sizes.batch_bytes, sizes.frame_bytes):
                    connection.sendall(batch[start : start + sizes.frame_bytes])
                sent += 1


def _main(port: int, cores: list[int], **sizes: int) -> None:
    os.sched_setaffinity(0, cores)
    _send(port, Sizes(**sizes))


if __name__ == "__main__":
    _main(**json.loads(sys.argv[1]))
