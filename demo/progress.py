"""Shows how training goes: a bar on a terminal, a line every few seconds elsewhere.

Owns reading a growing metrics file (`metrics.jsonl`, one object a step) and the words around it. Writes to stderr only:
stdout is for the result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from demo.programs import Program

__all__ = ["MetricsTail", "say", "watch_training"]

_POLL_S = 0.2
_LINE_EVERY_S = 10.0
_SMOOTHING = 0.9  # of what the bar shows; the metrics file has the exact values

_console = Console(stderr=True, highlight=False)


def say(line: str) -> None:
    """Prints one line for people."""
    _console.print(line, markup=False, soft_wrap=True)


class MetricsTail:
    """Reads the objects that were added to a JSON Lines file since the last look. The file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new(self) -> list[Mapping[str, Any]]:
        """Complete lines only: one that is being written is left for the next look."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def watch_training(
    trainer: Program, server: Program, metrics: Path, *, steps: int, deadline: float
) -> list[Mapping[str, Any]]:
    """Shows progress until the trainer has ended or `deadline` (time.monotonic) has passed.

    Returns:
        The metrics of every step. The trainer may still run if the deadline was the reason.

    Raises:
        DemoError: the server ended meanwhile.
    """
    tail, seen = MetricsTail(metrics), []
    with _display(steps) as display:
        running = True
        while running and time.monotonic() < deadline:
            running = trainer.exit_code() is None
            if fresh := tail.new():
                seen += fresh
                display.show(seen)
            if running:
                server.check_running()
                time.sleep(_POLL_S)
    return seen


class _Display(Protocol):
    def show(self, seen: Sequence[Mapping[str, Any]]) -> None: ...


@contextmanager
def _display(steps: int) -> Iterator[_Display]:
    if not _console.is_terminal:
        yield _Lines(steps)
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_console) as progress:
        yield _Bar(progress, steps)


class _Bar:
    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task("training", total=steps, figures="waiting for the first step")

    def show(self, seen: Sequence[Mapping[str, Any]]) -> None:
        self._progress.update(self._task, completed=seen[-1]["step"], figures=_figures(seen))


class _Lines:
    def __init__(self, steps: int) -> None:
        self._steps, self._last = steps, -_LINE_EVERY_S

    def show(self, seen: Sequence[Mapping[str, Any]]) -> None:
        now, step = time.monotonic(), seen[-1]["step"]
        if now - self._last >= _LINE_EVERY_S or step == self._steps:
            self._last = now
            say(f"step {step}/{self._steps}  {_figures(seen)}")


def _figures(seen: Sequence[Mapping[str, Any]]) -> str:
    recent = seen[-20:]
    speed = sum(row["tokens"] for row in recent) / max(1e-9, sum(row["step_s"] for row in recent))
    figures = [f"{speed:,.0f} tok/s"]
    for label, key in (("accepted", "accept_len"), ("loss", "loss")):
        # A step may have no value: nothing supervised, or acceptance not simulated at it.
        values = [row[key] for row in seen[-100:] if row.get(key) is not None]
        if values:
            figures.insert(0, f"{label} {_smoothed(values):.2f}")
    return "  ".join(figures)


def _smoothed(values: Sequence[float]) -> float:
    mean = values[0]
    for value in values[1:]:
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * value
    return mean
