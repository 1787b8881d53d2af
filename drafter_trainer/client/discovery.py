"""Who serves the target, and where: channels, `DescribeTarget`, waiting for a server that isn't there yet.

A front is asked by its configured address; it names its replicas. A replica that gives no host is reached under the
host of the front that named it (a server bound to 0.0.0.0 can't know how others reach it).

No torch here; the receiver imports this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from target_wire.channel import channel_options
from target_wire.v1 import target_pb2 as pb
from target_wire.v1 import target_pb2_grpc as pb_grpc

from drafter_trainer.client.failures import CallFailure, reason_of

WAITING_LINE_EVERY_S = 10.0
POLL_EVERY_S = 0.5


def replica_address(front_address: str, replica: pb.Replica) -> str:
    """Where a replica is reached by one who reached its front at ``front_address``.

    `address` is "unix:/path", "HOST:PORT", or has an empty host (""  or ":PORT"), which stands for the front's.
    """
    if replica.address.startswith("unix:"):
        return replica.address
    host, _, port = replica.address.rpartition(":")
    if host:
        return replica.address
    front_host = front_address.rpartition(":")[0] if not front_address.startswith("unix:") else "localhost"
    return f"{front_host}:{port or replica.port}"


def serving_addresses(front_address: str, description: pb.DescribeTargetResponse) -> list[str]:
    """Endpoints of the replicas that serve now."""
    serving = (r for r in description.replicas if r.state == pb.REPLICA_STATE_SERVING)
    return [replica_address(front_address, replica) for replica in serving]


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel for one stream."""
    return grpc.aio.insecure_channel(address, options=channel_options())


async def describe(address: str, *, timeout_s: float) -> pb.DescribeTargetResponse:
    """Asks one front.

    Raises:
        grpc.aio.AioRpcError: It doesn't answer within ``timeout_s`` seconds, or not with a description.
    """
    async with open_channel(address) as channel:
        stub = pb_grpc.TargetFrontServiceStub(channel)
        return await stub.DescribeTarget(pb.DescribeTargetRequest(), timeout=timeout_s)


@dataclasses.dataclass(frozen=True)
class DescribedTarget:
    """A front's answer and which front gave it."""

    address: str
    response: pb.DescribeTargetResponse


class TargetAbsentError(Exception):
    """No configured front has answered in time."""


class TargetsDifferError(Exception):
    """Two configured fronts serve different targets; the message says which."""


def wait_for_target(
    addresses: Sequence[str], *, timeout_s: float, say: Callable[[str], None], call_timeout_s: float = 5.0
) -> DescribedTarget:
    """Asks all fronts until one describes the target; says every ten seconds what it waits for. Blocks.

    Args:
        addresses: Fronts, already checked.
        timeout_s: Longest wait.
        say: Takes one plain line.
        call_timeout_s: Deadline of one call.

    Returns:
        The first of the configured fronts that answers.

    Raises:
        TargetAbsentError: Nobody has described the target within ``timeout_s`` seconds.
        TargetsDifferError: Two fronts have described different ones.
    """
    started_s = time.monotonic()
    said_s = float("-inf")
    while True:
        answers = describe_all(addresses, timeout_s=call_timeout_s)
        if described := [
            DescribedTarget(front, answer) for front, answer in answers.items() if not isinstance(answer, CallFailure)
        ]:
            refuse_different(described)
            return described[0]
        now_s = time.monotonic()
        reasons = "; ".join(
            f"{address}: {answer.cause}" for address, answer in answers.items() if isinstance(answer, CallFailure)
        )
        if now_s - started_s >= timeout_s:
            raise TargetAbsentError(f"no target-server within {timeout_s:g} s ({reasons})")
        if now_s - said_s >= WAITING_LINE_EVERY_S:
            said_s = now_s
            say(f"waiting for the target-server for {now_s - started_s:.0f} s of at most {timeout_s:g} s ({reasons})")
        time.sleep(min(POLL_EVERY_S, max(timeout_s - (now_s - started_s), 0.0)))


def describe_all(addresses: Sequence[str], *, timeout_s: float) -> dict[str, pb.DescribeTargetResponse | CallFailure]:
    """Asks all fronts at the same time; each one's answer, or why there's none within ``timeout_s`` seconds."""
    with contextlib.ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(address, options=channel_options())) for address in addresses
        ]
        calls = [
            pb_grpc.TargetFrontServiceStub(channel).DescribeTarget.future(pb.DescribeTargetRequest(), timeout=timeout_s)
            for channel in channels
        ]
        return {address: _answer(call) for address, call in zip(addresses, calls, strict=True)}


def _answer(call: Any) -> pb.DescribeTargetResponse | CallFailure:
    try:
        return call.result()  # type: ignore[no-any-return]
    except grpc.RpcError as error:
        return reason_of(error)


def refuse_different(described: Sequence[DescribedTarget]) -> None:
    """Refuses servers of different targets: their batches would be trained as if they were one's.

    Raises:
        TargetsDifferError: Names two of them.
    """
    first, *others = described
    for other in others:
        if other.response.version.digest != first.response.version.digest:
            raise TargetsDifferError(
                " and ".join(f"{it.address} serves {it.response.version.digest}" for it in (first, other))
            )


def describe_blocking(address: str, *, timeout_s: float) -> pb.DescribeTargetResponse:
    """As ``describe``, for the trainer's own thread."""
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        stub = pb_grpc.TargetFrontServiceStub(channel)
        return stub.DescribeTarget(pb.DescribeTargetRequest(), timeout=timeout_s)
