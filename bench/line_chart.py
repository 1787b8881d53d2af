"""A line chart as SVG text: axes, ticks, labels, a legend, vertical marks. No dependency.

Colours are told apart without red and green, lines by their dashes too; text takes the reader's own sans-serif font.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Chart", "Line"]

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 52, 96
_LEGEND_ROW, _LEGEND_COLUMN = 18, 320
_TICKS = 6


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        name: for the legend.
        points: (x, y), in the order of x; at least one.
        colour: of CSS.
        dashes: SVG's stroke-dasharray; empty for a solid line.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dashes: str = ""


@dataclass(frozen=True)
class Chart:
    """What is drawn.

    Attributes:
        title: above it.
        x_label: under the x axis.
        y_label: beside the y axis.
        lines: at least one; the first is drawn over the others.
        marks: (x, text): vertical lines.
        y_from: where the y axis begins; the x axis begins at 0.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Sequence[tuple[float, str]] = ()
    y_from: float = 0.0

    def to_svg(self) -> str:
        """Returns the whole file."""
        xs = [x for line in self.lines for x, _ in line.points]
        ys = [y for line in self.lines for _, y in line.points]
        y_ticks = _ticks(self.y_from, max(ys))
        x_ticks = [tick for tick in _ticks(0, max(xs)) if tick <= max(xs)]
        plane = _Plane(0, max(xs), self.y_from, y_ticks[-1])
        middle = (_TOP + _HEIGHT - _BOTTOM) / 2
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" font-family="sans-serif" font-size="12" role="img">',
            f"<title>{escape(self.title)}</title>",
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
            _text(_WIDTH / 2, 22, self.title, size=14),
            *_axes(plane, x_ticks, y_ticks),
            _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - _BOTTOM + 38, self.x_label),
            f'<g transform="rotate(-90 18 {middle:g})">{_text(18, middle, self.y_label)}</g>',
            *(part for mark in self.marks for part in _mark(plane, *mark)),
            *(_path(plane, line) for line in reversed(self.lines)),
            *_legend(self.lines),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"


@dataclass(frozen=True)
class _Plane:
    """Values to places on the page."""

    x_from: float
    x_to: float
    y_from: float
    y_to: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_from) / ((self.x_to - self.x_from) or 1) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.y_from) / ((self.y_to - self.y_from) or 1) * (_HEIGHT - _TOP - _BOTTOM)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` on, the last one not below `high`."""
    rough = max(high - low, 1e-9) / _TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _axes(plane: _Plane, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> list[str]:
    left, right, bottom = _LEFT, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for value in y_ticks:
        y = plane.y(value)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#e3e3e3"/>')
        parts.append(_text(left - 8, y + 4, f"{value:g}", anchor="end"))
    for value in x_ticks:
        x = plane.x(value)
        parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="#444"/>')
        parts.append(_text(x, bottom + 19, f"{value:g}"))
    parts.append(f'<path d="M{left} {_TOP}V{bottom}H{right}" fill="none" stroke="#444"/>')
    return parts


def _mark(plane: _Plane, x_value: float, text: str) -> list[str]:
    x = plane.x(x_value)
    return [
        f'<path d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#888" stroke-dasharray="2 3"/>',
        _text(x, _TOP - 6, text),
    ]


def _path(plane: _Plane, line: Line) -> str:
    points = " ".join(f"{plane.x(x):.1f},{plane.y(y):.1f}" for x, y in line.points)
    return f'<polyline points="{points}" fill="none" {_stroke(line)}/>'


def _legend(lines: Sequence[Line]) -> list[str]:
    """Two to a row, below everything else: over the lines it would hide some."""
    parts = []
    for number, line in enumerate(lines):
        row, column = divmod(number, 2)
        x, y = _LEFT + column * _LEGEND_COLUMN, _HEIGHT - _BOTTOM + 64 + row * _LEGEND_ROW
        parts.append(f'<path d="M{x} {y - 4}h28" {_stroke(line)}/>')
        parts.append(_text(x + 36, y, line.name, anchor="start"))
    return parts


def _stroke(line: Line) -> str:
    dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
    return f'stroke="{line.colour}" stroke-width="2"{dashes}'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
