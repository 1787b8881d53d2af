"""Where the time of a step goes, part by part, without making anything wait.

On CUDA a part is timed by two events on the current stream, which are read only once the device has passed them; what
it hasn't yet is told with a later step. On the CPU a part is wall time. Off it costs a method call a part.

    wait       for batches from the target             forward    the drafter, of which
    h2d        host to device                             fuse       taps to context
    head       the head's products and softmax            layers     all draft layers
    loss       weights, and a divergence where wanted  backward   loss to gradients
    optimizer  clipping and update
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator

import torch

__all__ = ["OFF", "Stopwatch"]


class Stopwatch:
    """Adds up the time of named parts. Used by one thread.

    Args:
        device: Where the parts run; None times nothing.
        inner: Whether parts inside the drafter's forward are timed too; not where that is compiled.
    """

    def __init__(self, device: torch.device | None, *, inner: bool = True) -> None:
        self._device = device
        self._inner = inner
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._pending: collections.deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = collections.deque()

    def part(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Times the block."""
        if self._device is None:
            return contextlib.nullcontext()
        return self._on_cuda(name) if self._device.type == "cuda" else self._on_cpu(name)

    def inner_part(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Times a block inside the drafter's forward."""
        return self.part(name) if self._inner else contextlib.nullcontext()

    def take(self) -> dict[str, float] | None:
        """Seconds by part since the last call, as far as they are known by now; None when off."""
        if self._device is None:
            return None
        while self._pending and self._pending[0][2].query():  # type: ignore[no-untyped-call]
            name, start, end = self._pending.popleft()
            self._seconds[name] += start.elapsed_time(end) / 1e3
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken

    @contextlib.contextmanager
    def _on_cpu(self, name: str) -> Iterator[None]:
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started_s

    @contextlib.contextmanager
    def _on_cuda(self, name: str) -> Iterator[None]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        try:
            yield
        finally:
            end.record()
            self._pending.append((name, start, end))


OFF = Stopwatch(None)
