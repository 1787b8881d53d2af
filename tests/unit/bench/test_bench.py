"""The benchmark's own arithmetic and command line; that a part measures is shown by running it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from bench import __main__ as bench_main
from bench.options import BenchError, Options
from bench.pairs import ratios, take_turns
from bench.parts import PARTS, choose_parts
from bench.results import Figure, as_json, figure, table_lines


def test_figure_is_the_median_with_its_extremes() -> None:
    item = figure("wire_ratio", [0.7, 0.4, 0.6], "x", goal=">= 0.5")
    assert (item.value, item.low, item.high, item.runs, item.met) == (0.6, 0.4, 0.7, 3, True)
    assert figure("cost", [2.0], "s", goal="<= 0.9").met is False
    assert figure("shown", [2.0], "s").met is None


def test_json_has_the_documented_form() -> None:
    content = as_json([figure("wire_ratio", [0.61234567, 0.5], "x", goal=">= 0.5", note="words")])
    assert content["wire_ratio"] == {"value": 0.556173, "low": 0.5, "high": 0.612346, "runs": 2, "unit": "x"}
    assert set(content) == {"wire_ratio", "machine", "commit"}
    assert content["machine"]["cores"] >= 1


def test_table_says_which_goal_is_not_met() -> None:
    lines = table_lines([figure("a", [1.0], "x", goal=">= 2"), figure("b", [3.0], "x", goal=">= 2")])
    assert "NOT MET" in lines[1]
    assert "NOT" not in lines[2]


def test_turns_alternate_and_ratios_stay_within_a_round() -> None:
    calls: list[str] = []

    def measure(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    rounds = take_turns({"a": lambda: measure("a"), "b": lambda: measure("b")}, rounds=2)
    assert calls == ["a", "b", "b", "a"]
    assert rounds == [{"a": 1.0, "b": 2.0}, {"a": 4.0, "b": 3.0}]
    assert ratios(rounds, "b", "a") == [2.0, 0.75]


def test_parts_are_chosen_by_name_and_exist() -> None:
    assert choose_parts("") == list(PARTS)
    assert choose_parts(" wire ,") == ["wire"]
    for module, _ in PARTS.values():
        assert importlib.util.find_spec(module) is not None


def test_unknown_part_is_a_mistake_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main.main(["--only", "wires"]) == 2
    assert capsys.readouterr().err.startswith("bench: --only: wires: no such part; give some of ")


def test_part_that_fails_leaves_the_others_and_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str) -> object:
        def run(_options: Options) -> list[Figure]:
            if name == "bad":
                raise BenchError("no such device")
            return [figure("good_ratio", [1.5], "x")]

        return run

    monkeypatch.setattr(bench_main, "PARTS", {"bad": ("", ""), "good": ("", "")})
    monkeypatch.setattr(bench_main, "choose_parts", lambda _only: ["bad", "good"])
    monkeypatch.setattr(bench_main, "load_part", load)
    assert bench_main.main(["--output", str(tmp_path / "results.json")]) == 1
    printed = capsys.readouterr()
    assert "bench: bad: no such device" in printed.err
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["good_ratio"]["value"] == 1.5
    assert json.loads(printed.out.splitlines()[-1]) == written
