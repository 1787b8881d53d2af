"""Asks a front for a swap, as `target-server swap` does, without the seconds that starting a program takes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
from target_wire.channel import channel_options
from target_wire.v1 import target_pb2, target_pb2_grpc

from bench.options import BenchError

__all__ = ["swap_messages", "swap_to"]

_TIMEOUT_S = 300.0


def swap_messages(front: str, checkpoint: Path, *, dry_run: bool = False) -> Iterator[target_pb2.SwapTargetResponse]:
    """Yields what the server says until the swap is done.

    Raises:
        BenchError: it was refused, or failed.
    """
    request = target_pb2.SwapTargetRequest(checkpoint=str(checkpoint), request_id=uuid.uuid4().hex, dry_run=dry_run)
    try:
        with grpc.insecure_channel(front, options=channel_options()) as channel:
            yield from target_pb2_grpc.TargetFrontServiceStub(channel).SwapTarget(request, timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        raise BenchError(f"swap to {checkpoint}: {error.details()}") from error


def swap_to(front: str, checkpoint: Path) -> int:
    """Swaps; returns the number of the version that is served then. Raises as `swap_messages`."""
    *_, last = swap_messages(front, checkpoint)
    return last.version.number
