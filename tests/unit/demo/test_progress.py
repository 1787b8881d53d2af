"""Reading a metrics file while it grows."""

from __future__ import annotations

from pathlib import Path

from demo.progress import MetricsTail


def test_tail_gives_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.new() == []
    path.write_text('{"step": 1}\n{"st')
    assert tail.new() == [{"step": 1}]
    assert tail.new() == []
    with path.open("a") as file:
        file.write('ep": 2}\n{"step": 3}\n')
    assert tail.new() == [{"step": 2}, {"step": 3}]
