"""Asks real servers for swaps, and keeps them busy meanwhile."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
from target_wire.channel import channel_options
from target_wire.v1 import target_pb2 as pb
from target_wire.v1 import target_pb2_grpc

from tests.support.server_process import ServerProcess
from tests.support.stream_client import ReceivedBatch, StreamClient

SWAP_TIMEOUT_S = 120.0


def swap(
    server: ServerProcess,
    checkpoint: object,
    *,
    on_message: Callable[[pb.SwapTargetResponse], object] = id,
    **fields: object,
) -> list[pb.SwapTargetResponse]:
    """Swaps and returns every message; raises grpc.RpcError."""
    fields = {"request_id": uuid.uuid4().hex, **fields}
    with grpc.insecure_channel(server.address, options=channel_options()) as channel:
        stub = target_pb2_grpc.TargetFrontServiceStub(channel)
        messages = []
        request = pb.SwapTargetRequest(checkpoint=str(checkpoint), **fields)
        for message in stub.SwapTarget(request, timeout=SWAP_TIMEOUT_S):
            messages.append(message)
            on_message(message)
        return messages


def swap_command(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `target-server swap` as a user does."""
    command = [sys.executable, "-m", "target_server", "swap", "--address", server.address, *arguments]
    return subprocess.run(command, timeout=SWAP_TIMEOUT_S, check=False, capture_output=True, text=True)


class Load(threading.Thread):
    """A client of one replica that always has four requests outstanding, keeps every answer and survives restarts."""

    def __init__(self, server: ServerProcess, index: int, tap: int, sequences: list[list[int]]) -> None:
        super().__init__(daemon=True)
        self.batches: list[ReceivedBatch] = []
        self.at: list[float] = []
        self.lost_count = 0
        self._server, self._index, self._tap, self._sequences = server, index, tap, sequences
        self._numbers = itertools.count()
        self._stop_asked = threading.Event()

    def run(self) -> None:
        """Runs one stream after the other."""
        while not self._stop_asked.is_set():
            try:
                self._run_stream(self._server.replica_address(self._index))
            except grpc.RpcError:
                # The replica or the front is gone, or the replica has no address yet.
                self.lost_count += 1
                time.sleep(0.1)

    def _run_stream(self, address: str) -> None:
        with StreamClient(address, deadline_s=600) as client:
            client.open([self._tap])
            client.grant(1 << 20)
            for _ in range(4):
                self._ask(client)
            while not self._stop_asked.is_set():
                batch = client.receive_batch()
                self.batches.append(batch)
                self.at.append(time.monotonic())
                client.grant(batch.header.payload_bytes)
                self._ask(client)

    def _ask(self, client: StreamClient) -> None:
        number = next(self._numbers)
        client.request(number, [self.ids(number)])

    def ids(self, request_id: int) -> list[int]:
        """What a request asked for."""
        return self._sequences[request_id % len(self._sequences)]

    def wait_for_more(self, count: int = 8, timeout_s: float = 60.0) -> None:
        """Waits until so many further batches have come."""
        wanted, deadline = len(self.batches) + count, time.monotonic() + timeout_s
        while len(self.batches) < wanted:
            assert time.monotonic() < deadline, "no batches"
            assert self.is_alive()
            time.sleep(0.005)

    def stop(self) -> None:
        """Asks the client to end after its next answer, or at once when its server is gone."""
        self._stop_asked.set()

    def end(self) -> list[ReceivedBatch]:
        """Ends the client and returns its answers."""
        self.stop()
        self.join(60)
        assert not self.is_alive()
        return self.batches


@contextmanager
def loaded(server: ServerProcess, tap: int, sequences: list[list[int]], *, replicas: int = 2) -> Iterator[list[Load]]:
    """Keeps every replica busy for the time of a block."""
    loads = [Load(server, index, tap, sequences) for index in range(replicas)]
    for load in loads:
        load.start()
    try:
        for load in loads:
            load.wait_for_more()
        yield loads
    finally:
        for load in loads:
            load.end()
