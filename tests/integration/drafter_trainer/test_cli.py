"""The command line as a user meets it: verbs, exit codes, one line for every mistake, nothing heavy before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import run_cli
from tests.support.tiny_tokenizer import conversations, write_jsonl


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tiny_tokenizer_dir) -> Path:
    """A prepared dataset of 12 samples."""
    directory = tmp_path_factory.mktemp("data")
    source = write_jsonl(directory / "rows.jsonl", [*conversations(12), []])
    argv = ["prepare", "--data.path", source, "--data.tokenizer", tiny_tokenizer_dir, "--data.prepared_dir"]
    assert run_cli(*argv, directory / "prepared") == 0
    return directory / "prepared"


def refused(capsys, *argv: object) -> str:
    """Runs a command that must fail for what the user gave; returns its one line."""
    assert run_cli(*argv) == 2
    captured = capsys.readouterr()
    line = captured.err.splitlines()[-1]
    assert captured.err.count("drafter-trainer: ") == 1
    assert captured.out == ""
    assert line.startswith("drafter-trainer: ")
    return line.removeprefix("drafter-trainer: ")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "the following arguments are required: VERB; see drafter-trainer --help"),
        (["trane"], "invalid choice: 'trane'"),
        (["train", "--config"], "argument --config: expected one argument; see drafter-trainer train --help"),
        (["train", "--config", "no.yaml"], "--config: no.yaml: No such file or directory; give a YAML file"),
        (["train", "--optim.lrr", "1"], "--optim.lrr: 1: no such setting; did you mean --optim.lr?"),
        (["train", "--prnt-plan", "1"], "--prnt-plan: 1: no such setting; "),
        (["train", "--optim.lr", "0"], "optim.lr: 0: give a number above 0"),
        (["train"], "target.addresses: (not set): needed here; "),
        (["train", "--target.addresses", "a:1"], "run.dir: (not set): needed here; "),
        (
            ["train", "--target.addresses", "a", "--run.dir", "r", "--data.path", "x"],
            "target.addresses: a: give HOST:PORT",
        ),
        (["evaluate"], "evaluate.target_model: (not set): needed here; give the target's local directory"),
        (["evaluate", "--evaluate.target_model", "m", "--evaluate.prompts", "p"], "run.dir: (not set): needed here; "),
        (["train", "--target.addresses", "a:1", "--run.dir", "r"], "data.path: (not set): needed here; "),
        (["train", "--data.path", "no.jsonl", "--print-plan", "2"], "data.path: no.jsonl: no such file; "),
        (["train", "--data.path", "no.jsonl", "--print-plan", "0"], "--print-plan: 0: give how many"),
        (["prepare"], "data.path: (not set): needed here; "),
        (["prepare", "--data.path", "README.md"], "data.tokenizer: (not set): needed"),
        (["prepare", "--data.path", "README.md", "--data.tokenizer", "docs"], "data.tokenizer: docs: "),
        (["export"], "run.dir: (not set): needed here; "),
        (["export", "--run.dir", "no"], "run.dir: no: no such directory; "),
        (["export", "--run.dir", "proto"], "run.dir: proto: holds no checkpoint yet; "),
        (["inspect", "no"], "path: no: no such directory; "),
        (["inspect", "proto"], "path: proto: holds none of meta.json, "),
        (["inspect", "proto", "--what"], "command line: --what: not understood"),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(argv, line, capsys):
    assert line in refused(capsys, *argv)


def test_dataset_without_a_usable_row_is_refused(
    tmp_path, tiny_tokenizer_dir, capsys
):  # before the server is contacted
    empty = write_jsonl(tmp_path / "rows.jsonl", [])
    argv = ["train", "--target.addresses", "a:1", "--run.dir", tmp_path / "run", "--data.path", empty]
    line = refused(capsys, *argv, "--data.tokenizer", tiny_tokenizer_dir)
    assert line.startswith("data.path: ")
    assert "no usable sample in 0 rows; give conversations with answers" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--drafter.mask_token_id", 640], "drafter.mask_token_id: 640: the target's vocabulary has 640 rows"),
        (["--drafter.mask_token_id", 2], "drafter.mask_token_id: 2: it is the end token"),  # case 27
        (["--drafter.target_layer_ids", "1,4"], "drafter.target_layer_ids: 1,4: the target has blocks 0 to 3"),
    ],
)
def test_settings_that_do_not_fit_the_target_are_told_before_a_server_is_asked(flags, line, training_world, capsys):
    argv = ["train", "--target.addresses", "nobody.invalid:1", "--run.dir", "r", "--data.path", training_world.data]
    assert line in refused(capsys, *argv, "--data.tokenizer", training_world.target, *flags)


@pytest.mark.parametrize(
    ("run_dir", "line"),
    [
        ("/proc/x/y", "run.dir: /proc/x/y: /proc can't be written (No such file or directory); give another directory"),
        ("README.md", "run.dir: README.md: this is a file; give a directory"),
        ("README.md/x", "README.md is a file; give a directory"),
    ],
)
@pytest.mark.parametrize("mode", [[], ["--dry-run"]])
def test_run_dir_that_can_not_be_written_is_told_before_data_and_server(run_dir, line, mode, capsys):
    argv = ["train", "--target.addresses", "nobody.invalid:1", "--data.path", "no.jsonl", "--run.dir", run_dir]
    assert line in refused(capsys, *argv, *mode)


def test_looking_whether_a_run_dir_can_be_written_leaves_nothing(tmp_path, capsys):
    argv = ["train", "--target.addresses", "nobody.invalid:1", "--data.path", "no.jsonl", "--run.dir", tmp_path / "a/b"]
    assert "data.path: no.jsonl: no such file" in refused(capsys, *argv)
    assert not list(tmp_path.iterdir())


def test_missing_device_is_told_before_data_and_server(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    argv = ["train", "--target.addresses", "a:1", "--data.path", "no.jsonl", "--run.dir", tmp_path / "run"]
    line = refused(capsys, *argv, "--run.device", "cuda:0")
    assert line == "run.device: cuda:0: this machine has no CUDA device; give cpu"
    # A dry run may be made where the devices aren't.
    assert "data.path: no.jsonl: " in refused(capsys, *argv, "--run.device", "cuda:0", "--dry-run")


def test_mistakes_and_help_do_not_wait_for_torch():
    code = (
        "import sys; from drafter_trainer.__main__ import main\n"
        "assert main(['train', '--target.addresses', 'a:1', '--run.dir', 'r', '--data.path', 'no.jsonl']) == 2\n"
        "assert main(['train', '--optim.lr', '-1']) == 2\n"
        "assert main(['inspect', 'proto']) == 2\n"
        "heavy = {'torch', 'transformers', 'grpc'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
    code = (
        "import sys; from drafter_trainer.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as done: assert done.code == 0\n"
        "assert not {'pydantic', 'numpy', 'yaml'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert all(verb in done.stdout for verb in ("prepare", "train", "evaluate", "export", "inspect"))


def test_console_script_and_module_are_the_same_program():
    command = [sys.executable, "-m", "drafter_trainer", "inspect", "no"]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "drafter-trainer: path: no: no such directory; give a run, checkpoint, prepared dataset or drafter\n"
    )


def test_help_of_a_verb_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as done:
        run_cli("train", "--help")
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--print-plan", "--optim.lr\n", "--run.resume\n", "default 0.0006"))


def test_print_config_shows_values_and_layers(capsys, monkeypatch):
    monkeypatch.setenv("TRIBUTARY_TRAINER__RUN__SEED", "5")
    assert run_cli("train", "--config", "configs/trainer/demo-tiny.yaml", "--optim.lr", "0.25", "--print-config") == 0
    lines = [line.split("#") for line in capsys.readouterr().out.splitlines() if "#" in line]
    layers = {value.strip(): layer.strip() for value, layer in lines}
    assert layers["lr: 0.25"] == "flag"
    assert layers["seed: 5"] == "env"
    assert layers["num_layers: 1"] == "configs/trainer/demo-tiny.yaml"
    assert layers["weight_decay: 0.0"] == "default"


def test_prepare_says_what_was_kept_and_dropped(prepared, capsys):
    assert run_cli("inspect", prepared) == 0
    text = capsys.readouterr().out
    assert "12 samples from 13 rows" in text
    assert "dropped     1 x no messages; first in row 13" in text


def test_print_plan_shows_the_same_order_each_time(prepared, capsys):
    argv = ["train", "--data.path", prepared, "--batch.max_sequences", "5", "--print-plan"]
    assert run_cli(*argv, "3") == 0
    short = capsys.readouterr().out.splitlines()
    assert run_cli(*argv, "9") == 0
    long = capsys.readouterr().out.splitlines()
    assert short[0].split()[:3] == ["position", "epoch", "tokens"]
    assert long[:4] == short
    rows = [line.split() for line in long[1:]]
    assert [int(row[0]) for row in rows] == list(range(9))
    epoch = [sample.split(":") for row in rows if row[1] == "0" for sample in row[3:]]
    assert sorted(int(sample_id) for sample_id, _ in epoch) == list(range(12))
    assert int(rows[0][2]) == sum(int(sample.split(":")[1]) for sample in rows[0][3:])


@pytest.mark.parametrize("what", [["--print-plan", "2"], ["--dry-run", "--target.addresses", "a:1", "--run.dir", "r"]])
def test_a_batch_below_the_longest_sample_is_told_before_anything_else(what, prepared, capsys):
    line = refused(capsys, "train", "--data.path", prepared, "--batch.max_tokens", 4, *what)
    assert line.startswith("batch.max_tokens: 4: the longest sample has ")


def test_dry_run_says_what_would_be_done_and_makes_nothing(prepared, tmp_path, capsys):
    argv = ["train", "--target.addresses", "nowhere:1", "--run.dir", str(tmp_path / "run"), "--dry-run"]
    assert run_cli(*argv, "--data.path", prepared, "--batch.max_sequences", "4", "--run.epochs", "2") == 0
    text = capsys.readouterr().out
    assert "12 samples" in text
    assert "3 micro-batches an epoch" in text
    assert "6 of 1 micro-batches, 2 epochs" in text
    assert not (tmp_path / "run").exists()


def test_inspect_shows_a_sample_with_its_answer_marked(prepared, tiny_tokenizer_dir, capsys):
    assert run_cli("inspect", prepared, "--sample", "3", "--tokenizer", tiny_tokenizer_dir) == 0
    text = capsys.readouterr().out
    answer = conversations(12)[3]["messages"][1]["content"]
    assert f"⟦{answer}<|im_end|>⟧" in text
    assert "0 to 11" in refused(capsys, "inspect", prepared, "--sample", "12")


def test_inspect_prints_json(prepared, capsys):
    assert run_cli("inspect", prepared, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["samples"], found["format_version"]) == ("prepared dataset", 12, 1)


@pytest.mark.parametrize("program", ["drafter_trainer", "target_server"])
@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_sleep_unless_the_environment_wants_them_awake(
    program: str, given: str | None, expected: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    code = (
        f"import os, sys, {program}.__main__; assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | ({"OMP_WAIT_POLICY": given} if given else {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == expected
