"""A model of device streams for tests: enqueued work runs later, in any order that the recorded events allow.

What a real device does at its own pace, an adversary does here: whenever it is asked to, the model runs one operation
that could run now, of whatever stream it likes. Work on one stream keeps its order; a wait holds its own stream back
until the event has been reached; nothing else orders anything.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import torch

from target_server.errors import DeadlineError


class ModelEvent:
    """Reached when the stream that recorded it has run everything before it."""

    def __init__(self, streams: ModelStreams) -> None:
        self._streams = streams
        self.reached = False

    def done(self) -> bool:
        return self.reached

    def wait(self, timeout_s: float) -> None:
        """Lets the device run until the event is reached: the host's only way of waiting."""
        while not self.reached:
            if not self._streams.step():
                raise DeadlineError("the device has nothing to run and the event is not reached")

    def seconds_since(self, earlier: ModelEvent) -> float:
        return 0.0  # time is the adversary's


class ModelStream:
    """One stream's operations in order."""

    def __init__(self, streams: ModelStreams) -> None:
        self._streams = streams
        self._operations: deque[tuple[Callable[[], None] | None, ModelEvent | None, ModelEvent | None]] = deque()

    def enqueue(self, work: Callable[[], None]) -> None:
        self._operations.append((work, None, None))

    def wait_event(self, event: ModelEvent) -> None:
        self._operations.append((None, event, None))

    def record_event(self) -> ModelEvent:
        event = ModelEvent(self._streams)
        self._operations.append((None, None, event))
        return event

    def runnable(self) -> bool:
        """Whether the first operation could run now."""
        if not self._operations:
            return False
        awaited = self._operations[0][1]
        return awaited is None or awaited.reached

    def run_one(self) -> None:
        """Runs the first operation."""
        work, _, recorded = self._operations.popleft()
        if work is not None:
            work()
        if recorded is not None:
            recorded.reached = True


class ModelStreams:
    """Two streams and the adversary that runs them.

    Attributes:
        compute_bias: how likely the compute stream is preferred when both could run, from 0 to 1.
    """

    shares_memory = False

    def __init__(self, adversary: random.Random, *, compute_bias: float) -> None:
        self._adversary = adversary
        self._compute_bias = compute_bias
        self.compute = ModelStream(self)
        self.copy = ModelStream(self)

    def allocate_device(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), 0xDD, dtype=torch.uint8)

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), 0xEE, dtype=torch.uint8)

    def step(self) -> bool:
        """Runs one operation; False when none could run."""
        first, second = (self.compute, self.copy)
        if self._adversary.random() >= self._compute_bias:
            first, second = second, first
        for stream in (first, second):
            if stream.runnable():
                stream.run_one()
                return True
        return False
