"""Whole runs against a real server: what they leave behind, how they end, and how they go on."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from drafter_trainer.errors import UserError
from tests.support.chaos_proxy import ChaosProxy
from tests.support.forking_trainer import ForkingTrainer
from tests.support.training_world import (
    VOCAB_SIZE,
    Server,
    Trainer,
    TrainingWorld,
    assert_same_run,
    final_state,
    read_records,
    running_server,
    train,
    wait_for_step,
)

# The first test waits for a server, and for processes to import torch.
pytestmark = pytest.mark.timeout(300)

STEPS = 12


@pytest.fixture(scope="session")
def unbroken(training_world: TrainingWorld, training_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run that nothing happened to. Read only."""
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    assert train(training_world, training_server.address, run_dir)
    return run_dir


def test_a_run_leaves_every_file_that_tools_rely_on(unbroken: Path) -> None:
    names = {path.name for path in unbroken.iterdir()}
    assert {"config.yaml", "provenance.json", "metrics.jsonl", "checkpoints", "summary.json"} <= names
    assert (unbroken / "checkpoints" / "latest").resolve().name == f"step-{STEPS}"
    provenance = json.loads((unbroken / "provenance.json").read_text())
    assert {"config", "argv", "git_sha", "packages", "target"} <= provenance.keys()
    summary = json.loads((unbroken / "summary.json").read_text())
    assert (summary["finished"], summary["steps"], summary["skipped"]) == (True, STEPS, 0)


def test_metrics_have_one_record_a_step_with_every_name(unbroken: Path) -> None:
    records = read_records(unbroken / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    names = "step epoch position loss lr grad_norm tokens accept_len acc_at target_versions wait_s step_s skipped"
    for record in records:
        assert set(names.split()) <= record.keys()
        assert len(record["acc_at"]) == 3
        assert record["target_versions"] == [1]
    assert all(record["accept_len"] >= 1 for record in records if record["step"] in (1, 10))


def test_the_first_loss_is_near_ln_v_and_training_lowers_it(unbroken: Path) -> None:
    losses = [record["loss"] for record in read_records(unbroken / "metrics.jsonl")]
    assert losses[0] == pytest.approx(math.log(VOCAB_SIZE), rel=0.02)
    # Random words hold little to learn in twelve steps.
    assert sum(losses[-3:]) / 3 < losses[0] - 0.1


def test_every_position_is_consumed_once_and_in_order(unbroken: Path) -> None:  # I1
    consumed = [batch for record in read_records(unbroken / "consumed-rank-0.jsonl") for batch in record["batches"]]
    assert [batch["position"] for batch in consumed] == list(range(STEPS))


def test_a_second_start_of_a_finished_run_changes_nothing(
    unbroken: Path, training_world: TrainingWorld, training_server: Server
) -> None:
    before = final_state(unbroken)
    assert train(training_world, training_server.address, unbroken)
    assert_same_run(unbroken, before)


def test_sigterm_finishes_the_step_and_the_resumed_run_ends_bit_equal(
    unbroken: Path, training_world: TrainingWorld, training_server: Server, tmp_path: Path
) -> None:  # I6, case 86
    flags = training_world.flags(training_server.address, tmp_path / "run", run__checkpoint_every_steps=1000)
    trainer = Trainer(flags, tmp_path / "trainer.log")
    wait_for_step(tmp_path / "run", 4, trainer)
    trainer.process.send_signal(signal.SIGTERM)
    assert trainer.wait() == 0, trainer.text()
    stopped_at = len(read_records(tmp_path / "run" / "metrics.jsonl"))
    assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == f"step-{stopped_at}"
    assert train(training_world, training_server.address, tmp_path / "run")
    assert_same_run(tmp_path / "run", final_state(unbroken))


def test_a_second_run_in_the_same_directory_is_refused_until_the_first_is_gone(
    training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer, tmp_path: Path
) -> None:  # I1
    """Also after kill -9, which leaves the first one's receiver process behind for a moment."""
    run_dir = tmp_path / "run"
    with ChaosProxy(training_server.port, seed=1, delay_s=0.004) as proxy:
        first = trainers.start(training_world.flags(proxy.address, run_dir))
        wait_for_step(run_dir, 2, first)
        proxy.stall()
        # No server there: it would be found out later.
        second = trainers.start(training_world.flags("127.0.0.1:1", run_dir))
        assert second.wait(60) == 2
        holder = f"process {first.pid} on {socket.gethostname()}"
        fix = "wait for it, stop it, or give another directory"
        assert second.text() == f"drafter-trainer: run.dir: {run_dir}: {holder} trains there; {fix}\n"
        assert not first.has_ended
        first.kill()
        first.wait()
        third = trainers.start(training_world.flags(training_server.address, run_dir))
        assert third.wait() == 0, third.text()
    assert len(read_records(run_dir / "metrics.jsonl")) == STEPS


RECIPES = {
    "muon, wsd, average, recomputed layers": {
        "optim__algorithm": "muon",
        "optim__schedule": "wsd",
        "optim__ema_decay": 0.9,
        "run__recompute_layers": "true",
        "run__profile_stats": "true",
    },
    "lk from the target's last block, which is one more tap": {"loss__distill": "lk", "loss__distill_weight": 1},
    "kl from a last block that is tapped anyway, dpace": {
        "drafter__target_layer_ids": "3,0",
        "loss__distill": "kl",
        "loss__type": "dpace",
    },
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_every_recipe_learns_and_resumes_bit_equal(
    recipe: dict[str, Any], training_world: TrainingWorld, training_server: Server, tmp_path: Path
) -> None:  # I6
    run_dir = tmp_path / "run"
    changes = {**recipe, "run__steps": 8, "run__checkpoint_every_steps": 4}
    assert train(training_world, training_server.address, run_dir, **changes)
    unbroken = final_state(run_dir)
    losses = [loss for _, loss, *_ in unbroken["losses"]]
    assert sum(losses[-2:]) / 2 < 0.995 * losses[0]
    shutil.rmtree(run_dir / "checkpoints" / "step-8")  # as if killed after step 4
    assert train(training_world, training_server.address, run_dir, **changes)
    assert_same_run(run_dir, unbroken)


def test_a_trainer_started_before_the_server_says_so_and_goes_on(
    unbroken: Path, training_world: TrainingWorld, trainers: ForkingTrainer, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    trainer = trainers.start(training_world.flags(f"127.0.0.1:{port}", tmp_path / "run"))
    trainer.wait_for_line("waiting for the target-server")
    with running_server(training_world, tmp_path, port=port):
        assert trainer.wait() == 0, trainer.text()
    assert f"127.0.0.1:{port}: connection refused" in trainer.text()
    assert_same_run(tmp_path / "run", final_state(unbroken))


def test_a_server_that_never_comes_ends_the_run_with_exit_code_1(
    training_world: TrainingWorld, trainers: ForkingTrainer, tmp_path: Path
) -> None:
    trainer = trainers.start(training_world.flags("127.0.0.1:1", tmp_path / "run", target__wait_timeout_s=1))
    assert trainer.wait(30) == 1
    last = trainer.text().splitlines()[-1]
    assert last.startswith("drafter-trainer: no target-server within 1 s (127.0.0.1:1: connection refused)")


def test_a_malformed_address_is_a_mistake_with_exit_code_2(training_world: TrainingWorld, tmp_path: Path) -> None:
    trainer = Trainer(training_world.flags("localhost", tmp_path / "run"), tmp_path / "trainer.log")
    assert trainer.wait() == 2
    assert trainer.text() == (
        "drafter-trainer: target.addresses: localhost: give HOST:PORT, [IPV6]:PORT or unix:/PATH\n"
    )


MISTAKES = {
    "a tap the target does not have": ({"drafter__target_layer_ids": "0,4"}, "drafter.target_layer_ids: 0,4"),
    "the same tap twice": ({"drafter__target_layer_ids": "2,2"}, "drafter.target_layer_ids: 2,2"),
    "a mask id beyond the vocabulary": ({"drafter__mask_token_id": VOCAB_SIZE}, "drafter.mask_token_id: 640"),  # 27, 28
    "a window below the largest batch": ({"target__window_bytes": 65536}, "target.window_bytes: 65536"),  # I2
    "a batch the server does not take": ({"batch__max_tokens": 10**6}, "batch.max_tokens: 1000000"),
    "another type on the wire": ({"target__wire_dtype": "bf16"}, "target.wire_dtype: bf16"),  # case 65
    "a missing dataset": ({"data__path": "/nonexistent"}, "data.path: /nonexistent"),
    "a CUDA device that isn't there": ({"run__device": "cuda:99"}, "run.device: cuda:99"),
    "a run to resume that isn't there": ({"run__resume": "require"}, "run.resume: require"),
}


@pytest.mark.parametrize(("changes", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_told_in_one_line_before_anything_is_trained(
    changes: dict[str, Any], message: str, training_world: TrainingWorld, training_server: Server, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        train(training_world, training_server.address, tmp_path / "run", **changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_resuming_with_other_settings_is_refused_field_by_field_unless_they_are_named(
    unbroken: Path, training_world: TrainingWorld, training_server: Server, tmp_path: Path
) -> None:  # case 64
    run_dir = tmp_path / "run"
    train(training_world, training_server.address, run_dir, run__steps=3)
    changes = {"run__steps": 3, "drafter__mask_token_id": 601, "optim__lr": 1e-3}
    with pytest.raises(UserError) as caught:
        train(training_world, training_server.address, run_dir, **changes)
    assert "drafter.mask_token_id was 600, is 601; optim.lr was 0.003, is 0.001" in str(caught.value)
    assert "--run.allow_changed drafter.mask_token_id,optim.lr" in str(caught.value)
    allowed = "drafter.mask_token_id,optim.lr,run.steps"
    assert train(
        training_world, training_server.address, run_dir, **changes | {"run__steps": 4}, run__allow_changed=allowed
    )
    assert [record["step"] for record in read_records(run_dir / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_torn_checkpoint_is_skipped_for_the_one_before(
    unbroken: Path, training_world: TrainingWorld, training_server: Server, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    train(training_world, training_server.address, run_dir)
    weights = run_dir / "checkpoints" / f"step-{STEPS}" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert train(training_world, training_server.address, run_dir)
    assert_same_run(run_dir, final_state(unbroken))


def test_a_batch_that_fails_on_every_attempt_ends_the_run_after_a_checkpoint(
    unbroken: Path, training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer, tmp_path: Path
) -> None:  # I1
    run_dir = tmp_path / "run"
    changes = {"target__attempts_per_batch": 2, "run__checkpoint_every_steps": 1000}
    with ChaosProxy(training_server.port, seed=1, delay_s=0.004) as proxy:
        run = trainers.start(training_world.flags(proxy.address, run_dir, **changes))
        wait_for_step(run_dir, 3, run)
        proxy.cut(times=10**6)
        assert run.wait(60) == 1
    done = len(read_records(run_dir / "metrics.jsonl"))
    assert 3 <= done < STEPS
    assert (run_dir / "checkpoints" / "latest").resolve().name == f"step-{done}"
    last = run.text().splitlines()[-1]
    assert re.fullmatch(
        rf"drafter-trainer: batch at plan position \d+: 2 attempts failed \(1\. 127\.0\.0\.2:\d+: .*; "
        rf"2\. 127\.0\.0\.2:\d+: .*\)\. To go on, run the same command again with run\.dir {run_dir}",
        last,
    ), last
    assert train(training_world, training_server.address, run_dir)
    assert_same_run(run_dir, final_state(unbroken))


def test_an_environment_full_of_dead_proxies_changes_nothing(
    unbroken: Path, training_world: TrainingWorld, training_server: Server, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert "http_proxy" in os.environ
    assert train(training_world, training_server.address, tmp_path / "run")
    assert_same_run(tmp_path / "run", final_state(unbroken))
