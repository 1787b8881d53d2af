"""Charts show each value at its place, and text as text."""

from __future__ import annotations

from xml.etree import ElementTree

from bench.line_chart import Chart, Line

SVG = "{http://www.w3.org/2000/svg}"


def drawn(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(chart.to_svg())


def test_lines_lie_on_the_scale_of_the_axes() -> None:
    lines = [Line("a < b", [(0, 1), (10, 3)], "#000"), Line("other", [(0, 2), (5, 2), (10, 2)], "#111", "2 3")]
    root = drawn(Chart("title & more", "x", "y", lines, marks=[(5, "half")], y_from=1))
    other, first = (
        [tuple(map(float, point.split(","))) for point in (line.get("points") or "").split()]
        for line in root.iter(f"{SVG}polyline")
    )
    ((left, low), (right, high)), middle = first, other[1]
    assert middle == ((left + right) / 2, (low + high) / 2)
    texts = {text.text: (float(text.get("x") or 0), float(text.get("y") or 0)) for text in root.iter(f"{SVG}text")}
    assert {"title & more", "x", "y", "a < b", "other", "half"} <= set(texts)
    assert texts["half"][0] == middle[0]
    # The labels' baselines are a little below the values that they name.
    assert texts["1"][1] - low == texts["3"][1] - high


def test_a_flat_line_of_one_point_is_drawn() -> None:
    root = drawn(Chart("t", "x", "y", [Line("a", [(1, 1)], "#000")], y_from=1))
    assert len(list(root.iter(f"{SVG}polyline"))) == 1
