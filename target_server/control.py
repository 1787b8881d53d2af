"""The pipe between the front and a replica process: one JSON object a line.

To the replica (stdin): `Start` first, then `SwapCommand`s and at last {"command": "drain"}; the end of the pipe means
that the front is gone, and the replica exits, so that no orphan survives a kill -9 of the front. From the replica (its
original stdout): events.
Neither side trusts the other to be quick: reads are by line, with a bound.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["DRAIN", "MAX_LINE_BYTES", "Event", "Start", "SwapCommand", "SwapEvent", "decode_event", "encode_line"]

MAX_LINE_BYTES = 1 << 20
DRAIN = {"command": "drain"}


@dataclass(frozen=True)
class Start:
    """What a replica is to be.

    Attributes:
        index: 0-based.
        devices: its devices.
        num_threads: its compute threads.
        host: where its data endpoint listens: a host, or "unix:PATH".
        port: on which port; 0 for any, or for a Unix socket.
        version: what it loads, a VersionRecord as JSON values; the digest is empty where nobody knows it yet.
        earlier: the versions before, newest first.
        config: the server's settings as JSON values.
    """

    index: int
    devices: list[str]
    num_threads: int
    host: str
    port: int
    version: dict[str, Any]
    earlier: list[dict[str, Any]]
    config: dict[str, Any]


@dataclass(frozen=True)
class SwapCommand:
    """What a replica is to do for a swap.

    Attributes:
        command: "prepare" (read the checkpoint), "commit" (pause, take the weights, stay paused), "finish" (serve them)
            or "roll_back" (give the swap up, whatever was done for it, and go on).
        swap: which swap, so that a late answer is not taken for another one's.
        version: what is to be served, a VersionRecord as JSON values; for "prepare" number and digest are unknown.
    """

    command: str
    swap: int
    version: dict[str, Any]


@dataclass(frozen=True)
class SwapEvent:
    """What a replica answers to a SwapCommand.

    Attributes:
        swap: which swap.
        stage: "reading", "prepared", "refused", "committed", "finished", "rolled_back" or "failed" (the weights could
            not be taken; the old ones are back and served).
        read_bytes: of the new weights; with "reading" and "prepared".
        total_bytes: of them; likewise.
        digest: of them; with "prepared".
        mark: of their files; with "prepared".
        detail: one line for people; with "refused" and "failed".
    """

    swap: int
    stage: str
    read_bytes: int = 0
    total_bytes: int = 0
    digest: str = ""
    mark: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Event:
    """What a replica reports.

    Attributes:
        kind: "ready" (it serves), "stats" (once a second while it does), "swap", "failed" (it can't start) or "fatal"
            (it served and can't go on).
        port: of the data endpoint; with "ready".
        description: a DescribeTargetResponse without replicas as protobuf's JSON; with "ready".
        version: the VersionRecord loaded, as JSON values; with "ready".
        stats: a ReplicaStats as protobuf's JSON; with "stats".
        swap: a SwapEvent as JSON values; with "swap".
        field: the user's setting that is wrong; empty when the failure is not the user's.
        value: what it was.
        detail: one line for people.
    """

    kind: str
    port: int = 0
    description: dict[str, Any] | None = None
    version: dict[str, Any] | None = None
    stats: dict[str, Any] | None = None
    swap: dict[str, Any] | None = None
    field: str = ""
    value: str = ""
    detail: str = ""


def encode_line(message: Start | SwapCommand | Event | dict[str, Any]) -> bytes:
    """Returns one line, newline included."""
    content = message if isinstance(message, dict) else asdict(message)
    return json.dumps(content).encode() + b"\n"


def decode_event(line: bytes) -> Event:
    """Returns the event of a line.

    Raises:
        ValueError: the line is none.
    """
    try:
        return Event(**json.loads(line))
    except TypeError as error:
        raise ValueError(f"not an event: {line[:200]!r}") from error
