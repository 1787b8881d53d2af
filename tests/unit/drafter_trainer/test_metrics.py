"""Records and sinks."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from drafter_trainer.metrics import ConsoleSink, JsonlSink, ProgressSink, StepMetrics, TensorBoardSink


def record(step: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step,
        "epoch": 0,
        "position": step,
        "loss": 2.5,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens": 100,
        "accept_len": None,
        "prefix_len": 1.5,
        "acc_at": [0.5, None],
        "target_versions": [1],
        "wait_s": 0.1,
        "step_s": 1.0,
        "skipped": 0,
    }
    return StepMetrics(**{**values, **changes})


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resumed_run_writes_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in (1, 2, 3, 4):
        sink.record(record(step))
    sink.close()
    with path.open("a") as file:
        file.write('{"step": 5, "los')  # the process died while writing
    resumed = JsonlSink(path, last_step=2)
    resumed.record(record(3))
    resumed.close()
    assert steps(path) == [1, 2, 3]


def test_a_line_is_there_as_soon_as_it_is_recorded(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.record(record(1))
    assert steps(tmp_path / "metrics.jsonl") == [1]
    sink.close()


def test_a_number_that_json_cannot_say_is_refused(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        sink.record(record(1, loss=float("nan")))
    sink.close()


def test_plain_lines_come_for_the_first_step_every_so_many_and_the_last() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(total_steps=7, every_steps=3, stream=stream)
    for step in range(1, 8):
        sink.record(record(step, accept_len=1.25, skipped=2))
    sink.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/7", "3/7", "6/7", "7/7"]
    assert "loss 2.500  accept_len 1.25  acc@1 0.50  lr 1.00e-03  100 tok/s  wait 10%  left out 2" in lines[0]


def test_a_step_without_supervision_has_a_line_too() -> None:
    stream = io.StringIO()
    ConsoleSink(total_steps=1, every_steps=1, stream=stream).record(record(1, loss=None, acc_at=[None], step_s=0.0))
    assert "loss -  acc@1 -" in stream.getvalue()


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    sink = TensorBoardSink(tmp_path)
    sink.record(record(1))
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"train/loss", "train/lr", "train/acc_at/01"} <= set(events.Tags()["scalars"])
    assert "train/acc_at/02" not in events.Tags()["scalars"]


def test_the_bar_takes_records() -> None:
    sink = ProgressSink(total_steps=2)
    sink.record(record(1))
    sink.record(record(2))
    sink.close()
