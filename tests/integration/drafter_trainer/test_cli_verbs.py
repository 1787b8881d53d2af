"""Each verb on what the one before it made: train, inspect, export, evaluate, with a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafter_trainer import prepare
from drafter_trainer.checkpoint import CheckpointStore
from drafter_trainer.tokenizer import file_digest
from target_server.versions import weights_digest
from tests.support.cli import run_cli
from tests.support.tiny_tokenizer import conversations, write_jsonl

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def run_dir(training_world, training_server, tmp_path_factory) -> Path:
    """A run of four steps."""
    directory = tmp_path_factory.mktemp("cli") / "run"
    address = f"127.0.0.1:{training_server.port}"
    assert run_cli("train", *training_world.flags(address, directory, run__steps=4)) == 0
    return directory


@pytest.fixture(scope="module")
def exported(run_dir) -> Path:
    """Its drafter, as serving engines load it."""
    assert run_cli("export", "--run.dir", run_dir, "--dtype", "fp32") == 0
    return run_dir / "export"


def result_of(capsys, *argv: object) -> dict:
    assert run_cli(*argv, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_train_reads_its_source_once(training_world, training_server, tmp_path, monkeypatch):
    """A source of a hundred gigabytes takes minutes to read."""
    source = write_jsonl(tmp_path / "rows.jsonl", conversations(8, max_words=12))
    read = []
    monkeypatch.setattr(prepare, "file_digest", lambda path: read.append(path) or file_digest(path))
    flags = training_world.flags(training_server.address, tmp_path / "run", run__steps=1, data__path=source)
    assert run_cli("train", *flags) == 0
    assert read == [source]


def test_inspect_tells_how_a_run_stands(run_dir, capsys):
    found = result_of(capsys, "inspect", run_dir)
    assert (found["kind"], found["latest"], found["checkpoints"]) == ("run", "step-4", ["step-4"])
    assert found["last_step"]["step"] == found["summary"]["steps"] == 4
    assert run_cli("inspect", run_dir) == 0
    assert "last_step" in capsys.readouterr().out


def test_inspect_tells_what_a_checkpoint_holds(run_dir, capsys):
    found = result_of(capsys, "inspect", run_dir / "checkpoints" / "latest")
    assert (found["kind"], found["step"], found["position"]) == ("checkpoint", 4, 4)
    assert found["identity"]["drafter.block_size"] == 4


def test_export_writes_the_newest_checkpoint(run_dir, exported, capsys):
    checkpoint = CheckpointStore(run_dir / "checkpoints", keep=1).load_latest()
    written = load_file(exported / "model.safetensors")
    assert written.keys() == checkpoint.model.keys()
    assert all(torch.equal(written[name], checkpoint.model[name]) for name in written)
    config = result_of(capsys, "inspect", exported)
    assert config["dflash_config"]["target_layer_ids"] == [0, 2]
    target = checkpoint.facts["target"]
    assert config["trained_for"] == {
        "name": "target", "version": 1, "digest": target["digest"], "earlier_versions": 0,
    }  # fmt: skip


def test_export_needs_the_head_beside_the_checkpoint(run_dir, tmp_path, capsys):
    """Without it the target's embedding scale is unknown, and engines would be told a wrong one."""
    alone = tmp_path / "run"
    alone.mkdir()
    (alone / "checkpoints").symlink_to(run_dir / "checkpoints")
    assert run_cli("export", "--run.dir", alone) == 2
    assert "give the whole run directory" in capsys.readouterr().err


@pytest.mark.parametrize("drafter", ["exported", "checkpoint", "run"])
def test_evaluate_takes_a_drafter_in_every_form(drafter, run_dir, exported, training_world, tmp_path, capsys):
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [*conversations(3, max_words=8), [], {"source": "unused"}])
    argv = ["evaluate", "--evaluate.target_model", training_world.target, "--evaluate.prompts", prompts]
    argv += ["--evaluate.num_prompts", 2, "--evaluate.max_new_tokens", 6, "--evaluate.speed_prompts", 0]
    argv += {
        "exported": ["--evaluate.checkpoint", exported],
        "checkpoint": ["--run.dir", run_dir, "--evaluate.checkpoint", run_dir / "checkpoints" / "step-4"],
        "run": ["--run.dir", run_dir],
    }[drafter]
    report = result_of(capsys, *argv, "--evaluate.dtype", "fp32", "--run.num_threads", 1)
    assert (report["prompts"], report["identical"], report["mismatches"]) == (2, 2, 0)
    assert 1 <= report["accept_len"] <= 4
    assert report["block_size"] == 4
    assert report["trained_for"]["digest"] == weights_digest(training_world.target)


def test_evaluate_prints_a_table(exported, training_world, tmp_path, capsys):
    rows = [row | {"source": f"kind-{i % 2}"} for i, row in enumerate(conversations(3, max_words=8))]
    prompts = write_jsonl(tmp_path / "prompts.jsonl", rows)
    argv = ["evaluate", "--evaluate.target_model", training_world.target, "--evaluate.prompts", prompts]
    argv += ["--evaluate.checkpoint", exported, "--evaluate.max_new_tokens", 4, "--evaluate.speed_prompts", 1]
    assert run_cli(*argv, "--evaluate.dtype", "fp32", "--run.num_threads", 1) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [
        ["source", "prompts"],
        ["kind-0", "2"],
        ["kind-1", "1"],
        ["all", "3"],
    ]


def test_evaluate_refuses_longer_blocks_than_trained(exported, training_world, tmp_path, capsys):
    prompts = write_jsonl(tmp_path / "prompts.jsonl", conversations(1))
    argv = ["evaluate", "--evaluate.target_model", training_world.target, "--evaluate.prompts", prompts]
    assert run_cli(*argv, "--evaluate.checkpoint", exported, "--evaluate.block_size", 5) == 2
    assert "evaluate.block_size: 5: the drafter was trained with 4; give at most that" in capsys.readouterr().err
