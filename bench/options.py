"""What every part is given, and the errors that end one."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["CHECKOUT", "BenchError", "Options", "say"]

CHECKOUT = Path(__file__).resolve().parents[1]


class BenchError(Exception):
    """A part can't be measured here; the message is one line that says why."""


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        quick: small sizes and few repetitions: shows that a part works, not what the machine can do.
        cache: directory that keeps downloads and converted models.
    """

    quick: bool = False
    cache: Path = field(default=CHECKOUT / ".demo")

    def pick(self, full: int, quick: int) -> int:
        """Returns the number for this kind of run."""
        return quick if self.quick else full


def say(line: str) -> None:
    """Tells people what goes on; stdout is for the result."""
    print(line, file=sys.stderr, flush=True)
