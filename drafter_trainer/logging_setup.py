"""How log lines look: time, level where it matters, rank where there are several. To stderr; stdout is for results."""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["setup_logging"]


class _LineFormatter(logging.Formatter):
    """`12:34:56 message`, with the level only where it is a warning or worse."""

    def __init__(self, rank: str | None) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._rank = f"[rank {rank}] " if rank is not None else ""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        text = f"{self.formatTime(record, self.datefmt)} {self._rank}{level}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def setup_logging(*, verbose: bool = False) -> None:
    """Sends the trainer's log to stderr; warnings only from other libraries and from ranks other than the first."""
    # torchrun's name for the rank; told here and not by `parallel`, because lines are written before ranks are joined.
    rank = os.environ.get("RANK")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(rank))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    level = logging.DEBUG if verbose else logging.INFO
    logging.getLogger("drafter_trainer").setLevel(level if rank in (None, "0") else logging.WARNING)
