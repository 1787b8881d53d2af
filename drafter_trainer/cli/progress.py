"""Progress of preparation: a bar on a terminal, a line now and then elsewhere, nothing when there is nothing to do."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from drafter_trainer.prepare import Progress

__all__ = ["shown_progress"]

logger = logging.getLogger(__name__)

_LINE_EVERY_S = 10.0


@contextmanager
def shown_progress() -> Iterator[Callable[[Progress], None]]:
    """Yields what preparation should call."""
    if sys.stderr.isatty():
        with _bar() as update:
            yield update
    else:
        yield _Lines()


class _Lines:
    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last_s >= _LINE_EVERY_S:
            self._last_s = now
            percent = 100 * progress.bytes_done / max(progress.bytes_total, 1)
            logger.info("preparing: %d rows, %d samples, %.0f %%", progress.rows, progress.samples, percent)


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console  # noqa: PLC0415 - only on a terminal
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    from rich.progress import Progress as Bars  # noqa: PLC0415

    columns = (TextColumn("preparing"), BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
    # The bar appears with the first rows: what is prepared already shows none.
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("preparing", total=None, said="", visible=False)

        def update(progress: Progress) -> None:
            said = f"{progress.rows:,} rows, {progress.samples:,} samples"
            bars.update(task, completed=progress.bytes_done, total=progress.bytes_total, said=said, visible=True)

        yield update
