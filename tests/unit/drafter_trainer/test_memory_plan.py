"""What `--dry-run` says a rank needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_trainer.__main__ import main
from drafter_trainer.config import resolve_config
from drafter_trainer.memory_plan import count_parameters, plan_memory
from drafter_trainer.model import Drafter
from tests.support.drafters import tiny_config


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_parameters_are_counted_as_the_drafter_has_them(layers: int) -> None:
    config = tiny_config(num_hidden_layers=layers, target_layer_ids=(0, 3, 5))
    with torch.device("meta"):
        assert count_parameters(config) == sum(p.numel() for p in Drafter(config).parameters())


@pytest.mark.parametrize(
    ("flags", "name", "factor"),
    [
        (["--optim.algorithm", "muon"], "optimizer", 0.5),
        (["--loss.distill", "kl"], "logits", 2.0),
        (["--batch.max_tokens", "16384"], "features", 2.0),
        (["--loss.chunk_rows", "256"], "logits", 2.0),
    ],
)
def test_each_setting_moves_its_own_part(flags: list[str], name: str, factor: float) -> None:
    plain, changed = (
        plan_memory(resolve_config(flags=given, environ={}).config, tiny_config(), compute_bytes=2, tied=False)
        for given in ([], flags)
    )
    assert getattr(changed, name) == factor * getattr(plain, name)


def test_an_average_costs_a_copy_and_recomputing_saves_most_activations() -> None:
    flags = ["--optim.ema_decay", "0.99", "--run.recompute_layers", "true"]
    plain, changed = (
        plan_memory(
            resolve_config(flags=given, environ={}).config,
            tiny_config(num_hidden_layers=5),
            compute_bytes=2,
            tied=True,
        )
        for given in ([], flags)
    )
    assert (plain.average, changed.average) == (0, changed.weights)
    assert changed.activations < 0.4 * plain.activations


@pytest.mark.parametrize(
    ("file", "parameters", "facts"),
    [
        ("qwen3.6-27b", 1_730, ["4 with a window of 2048", "taps 1,16,31,46,61", "mask token 248070", "512 anchors"]),
        ("qwen3-8b", 1_049, ["all with full attention", "taps 1,9,17,25,33", "mask token 151669", "blocks of 16"]),
    ],
)
def test_shipped_configs_print_their_plan_without_server_data_or_gpu(
    file: str, parameters: int, facts: list[str], capsys: Any
) -> None:
    assert main(["train", "--config", f"configs/trainer/{file}.yaml", "--dry-run", "--ranks", "3"]) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if line.startswith("drafter ")]
    assert round(int(line.split()[1].replace(",", "")) / 1e6) == parameters
    for fact in [*facts, "(3 ranks x", "GB a rank on its device", "(not contacted)"]:
        assert fact in text


def test_without_any_target_the_plan_says_what_is_missing(capsys: Any, tmp_path: Path) -> None:
    assert main(["train", "--dry-run"]) == 0
    assert "give target.hidden_size, num_layers and vocab_size" in capsys.readouterr().out
    assert main(["train", "--dry-run", "--ranks", "0"]) == 2
    assert capsys.readouterr().err == "drafter-trainer: --ranks: 0: give at least 1\n"
