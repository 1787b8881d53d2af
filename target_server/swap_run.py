"""One swap as its callers see it: what was asked, how far each replica is, and the messages that say so.

Any number of callers follow one run; each gets every stage's messages as they come, from the first on. It decides
nothing (swap.py does). No torch, no grpc.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from target_wire.errors import WireError
from target_wire.v1 import target_pb2

from target_server.control import SwapEvent
from target_server.versions import Version

__all__ = ["Participant", "SwapRun"]

_HEARTBEAT_S = 1.0


@dataclass
class Participant:
    """A replica in a swap.

    Attributes:
        index: of the replica.
        stage: the last one that it reported; "asked" before, "lost" when its process has ended.
        event: its latest event that says how far it is or what is wrong.
        committed: whether it has taken the new weights.
    """

    index: int
    stage: str = "asked"
    event: SwapEvent | None = None
    committed: bool = False

    def to_message(self) -> target_pb2.SwapReplica:
        """Returns the message of the contract."""
        read, total = (self.event.read_bytes, self.event.total_bytes) if self.event else (0, 0)
        return target_pb2.SwapReplica(index=self.index, read_bytes=read, total_bytes=total, committed=self.committed)


@dataclass(eq=False)
class SwapRun:
    """One swap: what was asked, how far it is, and everything that its callers are told.

    Attributes:
        request: what was asked.
        key: which swap, for the replicas.
        messages: the latest message of each stage so far, in the order of the stages.
        error: how it failed.
        ended: whether nothing more will be said.
        participants: by index of the replica.
        path: the checkpoint, once it was resolved.
        version: the new one, as far as it is known.
    """

    request: target_pb2.SwapTargetRequest
    key: int
    messages: dict[int, target_pb2.SwapTargetResponse] = field(default_factory=dict)
    error: WireError | None = None
    ended: bool = False
    participants: dict[int, Participant] = field(default_factory=dict)
    path: Path | None = None
    version: Version | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, stage: target_pb2.SwapStage.ValueType, *, lagging: int = 0) -> None:
        """Adds a message, or replaces its stage's."""
        message = target_pb2.SwapTargetResponse(
            stage=stage,
            replicas=[participant.to_message() for participant in self.participants.values()],
            version=self.version.to_message() if self.version else None,
            checkpoint=str(self.path or ""),
            lagging_session_count=lagging,
        )
        if message != self.messages.get(stage):
            self.messages[stage] = message
        self.wake()

    def end(self, error: WireError | None) -> None:
        """Ends the run for everybody who follows it."""
        self.error, self.ended = error, True
        self.wake()

    def wake(self) -> None:
        """Wakes everybody who waits for `changed`."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def follow(self) -> AsyncIterator[target_pb2.SwapTargetResponse]:
        """Yields every stage's messages as they come, and the latest again when nothing is new for a second."""
        told: dict[int, target_pb2.SwapTargetResponse] = {}
        while True:
            new = {stage: message for stage, message in self.messages.items() if told.get(stage) is not message}
            for message in new.values():
                yield message
            told.update(new)
            if new:
                # Others may have come while these were sent.
                continue
            if self.ended:
                break
            try:
                async with asyncio.timeout(_HEARTBEAT_S):
                    await self.changed.wait()
            except TimeoutError:
                if told:
                    told.popitem()
        if self.error is not None:
            raise self.error
