"""`python -m bench.naive`: the stream as one would write it first, for comparison. Sends; the parent receives.

A streaming method of the generated stub, protobuf's own serialisation of a `bytes` field, gRPC's default options,
malloc as it comes. The same frames; the client copies each body into the same kind of ring. No checksum and no credit.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from target_wire.v1 import target_pb2, target_pb2_grpc

from bench.child import Child, child, commands, reply
from bench.raw_socket import Sizes

__all__ = ["naive_sender", "receive_naively"]

_SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetReplicaService"].full_name


@contextmanager
def naive_sender(sizes: Sizes, *, batch_count: int, cores: set[int]) -> Iterator[Child]:
    """Runs the server on these cores for the time of a block; each stream gets `batch_count` batches."""
    argument = {**dataclasses.asdict(sizes), "batch_count": batch_count, "cores": sorted(cores)}
    with child("bench.naive", argument) as process:
        yield process


def receive_naively(address: str, ring: memoryview) -> int:
    """Receives one stream into a ring; returns the bytes of it."""
    received = position = 0
    with grpc.insecure_channel(address) as channel:
        stub = target_pb2_grpc.TargetReplicaServiceStub(channel)
        for message in stub.StreamHiddenStates(iter([target_pb2.StreamHiddenStatesRequest()]), timeout=300):
            body = message.batch_frame.body
            if position + len(body) > len(ring):
                position = 0
            ring[position : position + len(body)] = body
            position += len(body)
            received += len(body)
    return received


def _handler(sizes: Sizes, batch_count: int) -> grpc.GenericRpcHandler:
    memory = memoryview(bytearray(os.urandom(1 << 20) * (sizes.batch_bytes // (1 << 20) + 1)))[: sizes.batch_bytes]

    async def stream(_requests: Any, _context: Any) -> AsyncIterator[target_pb2.StreamHiddenStatesResponse]:
        for request_id in range(batch_count):
            for start in range(0, sizes.batch_bytes, sizes.frame_bytes):
                body = bytes(memory[start : start + sizes.frame_bytes])
                frame = target_pb2.BatchFrame(request_id=request_id, offset_bytes=start, body=body)
                yield target_pb2.StreamHiddenStatesResponse(batch_frame=frame)

    method = grpc.stream_stream_rpc_method_handler(
        stream,
        request_deserializer=target_pb2.StreamHiddenStatesRequest.FromString,
        response_serializer=target_pb2.StreamHiddenStatesResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(_SERVICE, {"StreamHiddenStates": method})


async def _serve(sizes: Sizes, batch_count: int) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_handler(sizes, batch_count),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reply({"address": f"127.0.0.1:{port}"})
    await asyncio.to_thread(lambda: list(commands()))
    await server.stop(0)


def _main(batch_count: int, cores: list[int], **sizes: int) -> None:
    os.sched_setaffinity(0, cores)
    asyncio.run(_serve(Sizes(**sizes), batch_count))


if __name__ == "__main__":
    _main(**json.loads(sys.argv[1]))
