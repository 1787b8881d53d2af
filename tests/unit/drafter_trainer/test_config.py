from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from drafter_trainer.config import TrainerConfig, default_gamma, resolve_config, setting_lines
from drafter_trainer.errors import UserError

CONFIGS = sorted(Path("configs/trainer").glob("*.yaml"))


def user_error(*, flags=(), environ=None, file=None) -> UserError:
    with pytest.raises(UserError) as caught:
        resolve_config(flags=list(flags), environ=environ or {}, file=file)
    assert "\n" not in str(caught.value)
    return caught.value


def yaml_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return file


def test_flag_beats_env_beats_file_beats_default(tmp_path):
    file = yaml_file(tmp_path, "optim: {lr: 1, eps: 1, clip_norm: 1}\n")
    environ = {"TRIBUTARY_TRAINER__OPTIM__LR": "2", "TRIBUTARY_TRAINER__OPTIM__EPS": "2"}
    resolved = resolve_config(file=file, environ=environ, flags=["--optim.lr", "3"])
    optim = resolved.config.optim
    assert (optim.lr, optim.eps, optim.clip_norm, optim.weight_decay) == (3, 2, 1, 0)
    assert resolved.layers == {"optim.lr": "flag", "optim.eps": "env", "optim.clip_norm": str(file)}


def test_printed_config_names_each_layer_and_is_a_config_file_itself(tmp_path):
    flags = ["--optim.lr=0.5", "--target.addresses", "a:1,b:2", "--drafter.target_layer_ids", "1,2"]
    resolved = resolve_config(flags=flags, environ={"TRIBUTARY_TRAINER__RUN__DIR": "runs/a b"})
    text = resolved.as_yaml()
    lines = {line.strip() for line in text.splitlines()}
    assert any(line.startswith("lr: 0.5 ") and line.endswith("# flag") for line in lines)
    assert any(line.startswith("dir: runs/a b ") and line.endswith("# env") for line in lines)
    assert any(line.startswith("eps: ") and line.endswith("# default") for line in lines)
    again = resolve_config(file=yaml_file(tmp_path, text), environ={})
    assert again.config == resolved.config


def test_process_environment_is_read_by_default(monkeypatch):
    monkeypatch.setenv("TRIBUTARY_TRAINER__RUN__SEED", "17")
    assert resolve_config().config.run.seed == 17


def test_direct_construction_reads_no_environment(monkeypatch):
    monkeypatch.setenv("TRIBUTARY_TRAINER__RUN__SEED", "17")
    assert TrainerConfig().run.seed == 0


@pytest.mark.parametrize("given", ["1,2,3", "[1, 2, 3]", " 1 , 2,3"])
def test_lists_and_mappings_can_be_typed_on_a_line(given):
    flags = ["--drafter.target_layer_ids", given, "--data.template_options", "enable_thinking=false,level=2,name=x"]
    config = resolve_config(flags=flags, environ={}).config
    assert config.drafter.target_layer_ids == (1, 2, 3)
    assert config.data.template_options == {"enable_thinking": False, "level": 2, "name": "x"}


def test_repeated_flag_adds_to_a_list():
    config = resolve_config(flags=["--target.addresses", "a:1", "--target.addresses", "b:2"], environ={}).config
    assert config.target.addresses == ("a:1", "b:2")


def test_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        TrainerConfig().optim.lr = 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optim.lrr", "1"], "--optim.lrr: 1: no such setting; did you mean --optim.lr?"),
        (["--lr", "1"], "--lr: 1: no such setting; did you mean --optim.lr?"),
        (["--optim.lr"], "--optim.lr: (not set): needs a value after it"),
        (["--optim", "1"], "--optim: 1: a section, not a setting; optim holds algorithm, lr, betas"),
        (["--optim.l", "1"], "--optim.l: 1: no such setting"),
        (["--nonsense.thing", "1"], "no such setting; sections are target, data"),
        (["stray"], "command line: stray: not understood"),
        (["--optim.lr", "-1"], "optim.lr: -1: give a number above 0 (from flag)"),
        (["--optim.lr", "fast"], "optim.lr: fast: give a number (from flag)"),
        (["--batch.accumulation", "0"], "batch.accumulation: 0: give a number of at least 1 (from flag)"),
        (["--batch.accumulation", "1.5"], "batch.accumulation: 1.5: give a whole number (from flag)"),
        (["--optim.betas", "0.9,1"], "optim.betas.1: 1: give a number below 1 (from flag)"),
        (["--drafter.block_size", "999"], "drafter.block_size: 999: give a number of at most 256 (from flag)"),
        (["--run.tensorboard", "maybe"], "run.tensorboard: maybe: give true or false (from flag)"),
        (["--loss.type", "mse"], "loss.type: mse: give ce or dpace (from flag)"),
        (["--run.device", "gpu"], "run.device: gpu: give auto, cpu, cuda or cuda:N (from flag)"),
        (["--drafter.target_layer_ids", "1,x"], "drafter.target_layer_ids.1: x: give a whole number"),
        (["--data.role_aliases", "me=boss"], "data.role_aliases.me: boss: give system, developer, user, "),
        (["--data.template_options", "{a"], "data.template_options: {a: give key=value,key=value or JSON"),
        (["--run.steps", "5", "--run.epochs", "2"], "run.epochs: 2: run.steps is set too; give one of them"),
        (
            ["--loss.distill", "lk", "--loss.sampled_vocabulary", "9"],
            "loss.distill: lk: loss.sampled_vocabulary is set",
        ),
        (
            ["--batch.max_tokens", "100", "--data.max_length_tokens", "200"],
            "data.max_length_tokens: 200: a micro-batch holds 100 tokens; give at most that, or raise batch.max_",
        ),
    ],
)
def test_mistake_on_the_command_line_is_one_line(flags, message):
    assert message in str(user_error(flags=flags))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {lrr: 1}", "optim.lrr: 1: no such setting; did you mean optim.lr?"),
        ("optimm: {lr: 1}", "no such setting; did you mean optim.lr?"),
        ("optim: 3", "optim: 3: optim holds algorithm, lr, betas"),
        ("[1]", "holds a list; give sections such as 'optim:'"),
        (
            "optim:\n  lr: 1\n eps: 1\n",
            "not valid YAML: line 3, column 2: expected <block end>, but found '<block mapping start>'",
        ),
        ("optim: {lr: [", "not valid YAML: line 1, column 14: "),
        ("optim: {lr: {a: 1}}", "give a number (from "),
    ],
)
def test_mistake_in_a_file_is_one_line(tmp_path, text, message):
    assert message in str(user_error(file=yaml_file(tmp_path, text)))


def test_missing_file_is_one_line(tmp_path):
    assert "No such file or directory; give a YAML file" in str(user_error(file=tmp_path / "none.yaml"))


def test_mistake_in_the_environment_is_one_line():
    key = "TRIBUTARY_TRAINER__OPTIMM__LR"  # of an unknown section, which pydantic-settings would ignore
    assert str(user_error(environ={key: "1"})) == f"{key}: 1: no such setting; did you mean optim.lr?"


def test_empty_section_in_a_file_is_fine(tmp_path):
    assert resolve_config(file=yaml_file(tmp_path, "optim:\n"), environ={}).config == TrainerConfig()


@pytest.mark.parametrize(
    ("block_size", "gamma"), [(16, 7), (10, 5), (8, 4), (4, 2), (2, 1), (9, 4.5), (13, 6), (32, 7)]
)
def test_gamma_follows_the_paper(block_size, gamma):
    assert default_gamma(block_size) == gamma
    assert TrainerConfig(drafter={"block_size": block_size}).gamma == gamma
    assert TrainerConfig(drafter={"block_size": block_size}, loss={"gamma": 3}).gamma == 3


def test_one_setting_is_enough_for_shorter_batches():
    assert TrainerConfig().max_length_tokens == 3072
    assert TrainerConfig(batch={"max_tokens": 512}).max_length_tokens == 512
    assert TrainerConfig(batch={"max_tokens": 512}, data={"max_length_tokens": 64}).max_length_tokens == 64


def test_run_length_is_steps_or_epochs():
    assert TrainerConfig().epochs == 6
    assert TrainerConfig(run={"epochs": 2}).epochs == 2
    assert TrainerConfig(run={"steps": 10}).epochs is None


def test_every_setting_says_what_it_means():
    meanings = dict(setting_lines())
    assert len(meanings) > 50
    assert all(not text.startswith("None") and "default" in text for text in meanings.values())


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_shipped_config_loads_and_holds_only_what_differs(file):
    config = resolve_config(file=file, environ={}).config
    assert file.read_text().startswith("# "), "hardware and memory belong in the head comment"
    defaults = TrainerConfig().model_dump(mode="json")
    given = yaml.safe_load(file.read_text())
    same = [f"{s}.{n}" for s in given for n in given[s] if config.model_dump(mode="json")[s][n] == defaults[s][n]]
    assert not same


def test_configs_are_shipped():
    assert len(CONFIGS) >= 3
