"""What a run tells while it trains: one record a step, to any number of sinks.

Owns the record's names, which tools rely on, and the sinks. ``metrics.jsonl`` has every step exactly once, also after a
crash: a resumed run cuts off what its checkpoint doesn't cover before it goes on. A sink must never decide anything
and never fail a run for want of a terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = [
    "ConsoleSink",
    "JsonlSink",
    "MetricsSink",
    "ProgressSink",
    "StepMetrics",
    "TensorBoardSink",
    "truncate_after_step",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One step, over all ranks."""

    step: int
    """From 1."""
    epoch: int
    """Epoch of the step's last micro-batch, from 0."""
    position: int
    """Plan position after the step: micro-batches consumed so far."""
    loss: float | None
    """Weighted mean cross-entropy; None when the step had nothing to supervise."""
    lr: float
    """Learning rate the step was made with."""
    grad_norm: float | None
    """Before clipping; None when it's not finite or nothing was supervised."""
    tokens: int
    """Tokens of the step's micro-batches."""
    accept_len: float | None
    """Simulated acceptance length, walking the sequences as decoding does; None at steps that don't simulate."""
    prefix_len: float | None
    """Mean over all drawn blocks of 1 + correct prefix. Overstates acceptance: decoding meets the hard places more."""
    acc_at: list[float | None]
    """Accuracy of slots 1, 2, ...; None where no such slot was supervised."""
    target_versions: list[int]
    """Versions of the target that made the features, ascending."""
    asked_again: int = 0
    """Batches that were asked for again in this step's time because the target had changed."""
    wait_s: float
    """Longest time a rank waited for batches, in seconds."""
    step_s: float
    """Wall time of the step, in seconds."""
    skipped: int
    """Steps left out so far because something was not finite."""
    parts_s: dict[str, float] | None = None
    """The first rank's seconds by part (`stopwatch`), where run.profile_stats is on."""


class MetricsSink(Protocol):
    """Takes a run's records; called by the first rank only, from the training thread."""

    def record(self, metrics: StepMetrics) -> None:
        """Takes one step."""

    def close(self) -> None:
        """Takes the end; called once, also after an error."""


class JsonlSink:
    """One JSON object a line; a line is with the kernel when ``record`` returns.

    Args:
        path: The file; appended to.
        last_step: Records after this step are cut off first (a resumed run writes them again).
    """

    def __init__(self, path: Path, *, last_step: int = 0) -> None:
        truncate_after_step(path, last_step)
        self._file = path.open("a", encoding="utf-8")

    def record(self, metrics: StepMetrics) -> None:
        """Appends one line."""
        self.write(dataclasses.asdict(metrics))

    def write(self, values: dict[str, Any]) -> None:
        """Appends any object that has a ``step``."""
        self._file.write(json.dumps(values, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Syncs and closes the file."""
        os.fsync(self._file.fileno())
        self._file.close()


def truncate_after_step(path: Path, last_step: int) -> None:
    """Cuts off every line that is torn or of a later step; does nothing when there is no file."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        keep = 0
        for line in file:
            if not line.endswith(b"\n") or _step_of(line) > last_step:
                break
            keep += len(line)
        file.truncate(keep)


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class TensorBoardSink:
    """Scalars under ``train/`` for TensorBoard.

    Args:
        directory: Where event files go.
        last_step: TensorBoard hides what was written for later steps before.
    """

    def __init__(self, directory: Path, *, last_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - a second to import, and optional

        self._writer = SummaryWriter(str(directory), purge_step=last_step + 1 if last_step else None)

    def record(self, metrics: StepMetrics) -> None:
        """Writes every number of the step."""
        for name, value in dataclasses.asdict(metrics).items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(f"train/{name}", value, metrics.step)
        self._writer.add_scalar("train/target_version", max(metrics.target_versions, default=0), metrics.step)
        for part, seconds in (metrics.parts_s or {}).items():
            self._writer.add_scalar(f"train/parts_s/{part}", seconds, metrics.step)
        for slot, accuracy in enumerate(metrics.acc_at, 1):
            if accuracy is not None:
                self._writer.add_scalar(f"train/acc_at/{slot:02d}", accuracy, metrics.step)

    def close(self) -> None:
        """Flushes and closes the files."""
        self._writer.close()


class ConsoleSink:
    """Plain lines, for logs and terminals without control characters.

    Args:
        total_steps: Steps of the run.
        every_steps: Steps between lines; the first and the last step always have one.
        stream: Where to.
    """

    def __init__(self, *, total_steps: int, every_steps: int, stream: IO[str] = sys.stderr) -> None:
        self._total_steps = total_steps
        self._every_steps = every_steps
        self._stream = stream
        self._started = False

    def record(self, metrics: StepMetrics) -> None:
        """Prints the step when it's its turn."""
        due = metrics.step % self._every_steps == 0 or metrics.step == self._total_steps
        if due or not self._started:
            self._started = True
            print(step_line(metrics, self._total_steps), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to do."""


class ProgressSink:
    """A progress bar on a terminal.

    Args:
        total_steps: Steps of the run.
        done_steps: Steps of a resumed run that were done before.
    """

    def __init__(self, *, total_steps: int, done_steps: int = 0) -> None:
        self._total_steps = total_steps
        self._progress = _build_progress()
        self._task = self._progress.add_task("training", total=total_steps, completed=done_steps, facts="")
        self._progress.start()

    def record(self, metrics: StepMetrics) -> None:
        """Moves the bar."""
        self._progress.update(self._task, completed=metrics.step, facts=step_facts(metrics))

    def close(self) -> None:
        """Leaves the bar as it stands."""
        self._progress.stop()


def _build_progress() -> Progress:
    from rich.console import Console  # noqa: PLC0415 - only on a terminal
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = ("{task.description}", BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"))
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))


def step_line(metrics: StepMetrics, total_steps: int) -> str:
    """One step as a line with units."""
    return f"step {metrics.step}/{total_steps}  {step_facts(metrics)}"


def step_facts(metrics: StepMetrics) -> str:
    """What people watch, in one row."""
    facts = [
        f"loss {_number(metrics.loss, '.3f')}",
        f"acc@1 {_number(metrics.acc_at[0] if metrics.acc_at else None, '.2f')}",
        f"lr {metrics.lr:.2e}",
        f"{metrics.tokens / max(metrics.step_s, 1e-9):,.0f} tok/s",
        f"wait {metrics.wait_s / max(metrics.step_s, 1e-9):.0%}",
    ]
    if metrics.accept_len is not None:
        facts.insert(1, f"accept_len {metrics.accept_len:.2f}")
    if metrics.skipped:
        facts.append(f"left out {metrics.skipped}")
    return "  ".join(facts)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


@contextlib.contextmanager
def open_sinks(sinks: Sequence[MetricsSink]) -> Iterator[Sequence[MetricsSink]]:
    """Closes the sinks at the end, whatever happens."""
    with contextlib.ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.close)
        yield sinks
