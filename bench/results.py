"""Figures, what they were measured on, and the forms they take: a table for people, JSON for tools.

`bench/results.json` and the last line of the output hold the same object: each figure by name as {value, low, high,
runs, unit}, plus `machine` and `commit`. A file holds one run only, so figures in it belong together.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.options import CHECKOUT

__all__ = ["Figure", "as_json", "figure", "table_lines", "write_results"]


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        name: its key in the results.
        value: the median of its runs.
        low: the smallest of them.
        high: the largest.
        runs: how many there were.
        unit: of the value; "x" for a ratio.
        goal: what the project wants, as ">= 1.3"; empty where it is only shown.
        note: a few words on what it is, for the table.
    """

    name: str
    value: float
    low: float
    high: float
    runs: int
    unit: str
    goal: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if not self.goal:
            return None
        sign, bound = self.goal.split()
        return self.value >= float(bound) if sign == ">=" else self.value <= float(bound)


def figure(name: str, values: Sequence[float], unit: str, *, goal: str = "", note: str = "") -> Figure:
    """Returns the figure of one value a run, at least one run."""
    return Figure(name, statistics.median(values), min(values), max(values), len(values), unit, goal, note)


def as_json(figures: Iterable[Figure]) -> dict[str, Any]:
    """Returns the results as JSON values."""
    content: dict[str, Any] = {
        item.name: {
            "value": _rounded(item.value),
            "low": _rounded(item.low),
            "high": _rounded(item.high),
            "runs": item.runs,
            "unit": item.unit,
        }
        for item in figures
    }
    return {**content, "machine": _machine(), "commit": _commit()}


def table_lines(figures: Sequence[Figure]) -> list[str]:
    """Returns the table, a line a figure."""
    rows: list[tuple[str, ...]] = [("figure", "median", "low", "high", "runs", "unit", "goal", "", "")]
    for item in figures:
        mark = {True: "met", False: "NOT MET", None: ""}[item.met]
        numbers = [f"{number:.4g}" for number in (item.value, item.low, item.high)]
        rows.append((item.name, *numbers, str(item.runs), item.unit, item.goal, mark, item.note))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = {1, 2, 3, 4}
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def write_results(path: Path, content: dict[str, Any]) -> None:
    """Writes the results; a reader never sees half of them."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _machine() -> dict[str, Any]:
    # Imported here: the parts' own processes decide when torch is imported; by now they have ended.
    import torch  # noqa: PLC0415

    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_1_min": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _commit() -> str:
    """Returns the commit; with "+" where tracked files differ from it, empty outside of a checkout."""
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    except OSError:
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""
