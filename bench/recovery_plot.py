"""Draws a few curves as a small SVG file; no plotting library is needed to look at one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Curve", "draw"]

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 28, 44
COLOURS = ("#8a8f98", "#1f6feb", "#d1482c")


@dataclass(frozen=True)
class Curve:
    """A named line of (x, y) points, x ascending."""

    name: str
    points: Sequence[tuple[float, float]]


def draw(curves: Sequence[Curve], *, mark: float, x_label: str, y_label: str) -> str:
    """The curves as SVG text.

    Args:
        curves: At least one, with points.
        mark: Where a vertical line is drawn: the swap.
        x_label: Below the axis.
        y_label: Above the axis.
    """
    x_max = max(x for curve in curves for x, _ in curve.points)
    y_max = math.ceil(max(y for curve in curves for _, y in curve.points))

    def at(x: float, y: float) -> str:
        return f"{_x(x, x_max):.1f},{_y(y, y_max):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#57606a">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for y in range(y_max + 1):
        parts.append(f'<path d="M{at(0, y)} L{at(x_max, y)}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{_y(y, y_max) + 4:.1f}" text-anchor="end">{y}</text>')
    for share in range(5):
        x = x_max * share / 4
        parts.append(f'<text x="{_x(x, x_max):.1f}" y="{HEIGHT - 26}" text-anchor="middle">{x:.0f}</text>')
    parts.append(f'<path d="M{at(mark, 0)} L{at(mark, y_max)}" stroke="#57606a" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="{_x(mark, x_max) + 5:.1f}" y="{TOP + 10}">swap</text>')
    for number, (curve, colour) in enumerate(zip(curves, COLOURS, strict=False)):
        line = " L".join(at(x, y) for x, y in curve.points)
        parts.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 160 + 170 * number}" y="16" fill="{colour}">{curve.name}</text>')
    parts.append(f'<text x="{LEFT - 24}" y="16">{y_label}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _x(x: float, x_max: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * x / x_max


def _y(y: float, y_max: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - y / y_max)
