"""One rank or several train the same, on data of every kind that is awkward (I6)."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_trainer.dataset import DatasetWriter
from drafter_trainer.tokenizer import TokenizerFacts, tokenizer_digests
from tests.support.chaos_proxy import ChaosProxy
from tests.support.forking_trainer import ForkedRun, ForkingTrainer
from tests.support.training_world import (
    HIDDEN_SIZE,
    Server,
    TrainingWorld,
    final_state,
    read_records,
    train,
    wait_for_step,
)

# The first test waits for a server, and for processes to import torch.
pytestmark = pytest.mark.timeout(300)

# What depends on anchors and on what was consumed.
ANCHORED = ("tokens", "position", "epoch", "acc_at", "prefix_len", "skipped", "accept_len")
# How many ranks, and how they hold the drafter.
PARALLEL = {1: "ddp", 2: "fsdp", 3: "ddp"}


def test_one_two_and_three_ranks_train_the_same(
    training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer, tmp_path: Path
) -> None:  # cases 1, 2, 3, 9, 67, 70, 71
    """On odd samples, with a partial last step in which some ranks have nothing, and a window of a single batch."""
    changes = {
        "data__path": write_odd_samples(tmp_path / "odd", training_world.target),
        "batch__max_sequences": 1,
        "batch__shuffle_window_samples": 64,
        "run__steps": None,
        "run__epochs": 2,
        "target__window_bytes": 160 * 2 * HIDDEN_SIZE * 4,
    }
    ends = {}
    for num_ranks, parallel in PARALLEL.items():
        run_dir = tmp_path / f"ranks-{num_ranks}"
        changes |= {"batch__accumulation": 6 // num_ranks, "run__parallel": parallel}
        flags = training_world.flags(training_server.address, run_dir, **changes)
        environments = torchrun_environments(num_ranks) if num_ranks > 1 else [{}]
        runs = [trainers.start(flags, environment=environment) for environment in environments]
        assert [run.wait(100) for run in runs] == [0] * num_ranks, runs[0].text()
        ends[num_ranks] = run_dir
    reference = read_records(ends[1] / "metrics.jsonl")
    assert [record["skipped"] for record in reference] == [0] * len(reference)
    assert all(math.isfinite(record["loss"]) for record in reference if record["loss"] is not None)
    assert sum(len(step) for step in consumed_by_step(ends[1], 1)) % 6, "the last step is to be a partial one"
    for num_ranks in (2, 3):
        assert consumed_by_step(ends[num_ranks], num_ranks) == consumed_by_step(ends[1], 1)
        for mine, one in zip(read_records(ends[num_ranks] / "metrics.jsonl"), reference, strict=True):
            assert mine["loss"] == (one["loss"] and pytest.approx(one["loss"], rel=1e-6))
            # Equal anchors: the same slots were supervised, and guessed alike.
            assert [mine[name] for name in ANCHORED] == [one[name] for name in ANCHORED]
        ours, expected = final_state(ends[num_ranks]), final_state(ends[1])
        for part in ("model", "moments"):
            assert ours[part].keys() == expected[part].keys()
            for name, tensor in ours[part].items():
                torch.testing.assert_close(tensor, expected[part][name], rtol=1e-4, atol=1e-6)


def test_torchrun_starts_three_ranks(training_world: TrainingWorld, training_server: Server, tmp_path: Path) -> None:
    """The command of docs/running.md, with torchrun's own rendezvous."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    flags = training_world.flags(training_server.address, tmp_path / "run", run__steps=2)
    command = [*torchrun, "-m", "drafter_trainer", "train", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [len(step) for step in consumed_by_step(tmp_path / "run", 3)] == [3, 3]


@pytest.mark.parametrize(("parallel", "asked"), [("ddp", 0), ("fsdp", 1)])
def test_a_stop_asked_of_one_rank_stops_all_after_the_same_step(
    parallel: str, asked: int, training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer,
    tmp_path: Path,
) -> None:  # fmt: skip  # I6, case 86
    flags = training_world.flags(training_server.address, tmp_path / "run", **STOPPED, run__parallel=parallel)
    runs = [trainers.start(flags, environment=environment) for environment in torchrun_environments(2)]
    wait_for_step(tmp_path / "run", 3, runs[0])
    os.kill(runs[asked].pid, signal.SIGTERM)
    assert_stopped_alike(tmp_path / "run", runs)


@pytest.mark.parametrize(("parallel", "asked"), [("ddp", 0), ("fsdp", 1)])
def test_a_stop_asked_of_one_rank_stops_all_while_no_batch_comes(
    parallel: str, asked: int, training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer,
    tmp_path: Path,
) -> None:  # fmt: skip  # I6, case 86
    """Both wait, for a batch or for each other; the one that is asked may be in a collective, which no signal ends."""
    with ChaosProxy(training_server.port, seed=1, delay_s=0.001) as proxy:
        flags = training_world.flags(proxy.address, tmp_path / "run", **STOPPED, run__parallel=parallel)
        runs = [trainers.start(flags, environment=environment) for environment in torchrun_environments(2)]
        wait_for_step(tmp_path / "run", 3, runs[0])
        proxy.stall()
        time.sleep(1)
        os.kill(runs[asked].pid, signal.SIGTERM)
        assert_stopped_alike(tmp_path / "run", runs)


# More steps than are made before the stop; a batch of the window at a time.
STOPPED = {"run__steps": 500, "run__checkpoint_every_steps": 1000, "target__window_bytes": 160 * 2 * HIDDEN_SIZE * 4}


def assert_stopped_alike(run_dir: Path, runs: list[ForkedRun]) -> None:
    """Every rank has ended well, within seconds, and what they did is saved."""
    texts = "".join(run.text() for run in runs)
    assert [run.wait(20) for run in runs] == [0, 0], texts
    assert "Traceback" not in texts
    steps = len(read_records(run_dir / "metrics.jsonl"))
    assert 3 <= steps < STOPPED["run__steps"]
    assert (run_dir / "checkpoints" / "latest").resolve().name == f"step-{steps}"
    assert [len(read_records(run_dir / f"consumed-rank-{rank}.jsonl")) for rank in range(2)] == [steps] * 2


def torchrun_environments(num_ranks: int) -> list[dict[str, str]]:
    """What torchrun would set for each rank on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(num_ranks)]
    return [{name: str(value) for name, value in rank.items()} for rank in ranks]


def write_odd_samples(directory: Path, tokenizer: Path) -> Path:
    """A prepared dataset of 19 samples, most of them of a kind that preparation would drop; returns it.

    Nothing supervised (case 1), a single token, the block's length exactly (case 2), supervision only in the last few
    tokens (case 3) or in single tokens apart, and ordinary ones, long and short (case 9).
    """
    masks = [[False] * 12, [True], [False], [True] * 4, [False] * 60 + [True] * 3, [False, True] * 8]
    masks += [[False] * length for length in (2, 5, 90)]
    masks += [[False] * 4 + [True] * length for length in (1, 2, 5, 9, 17, 30, 55, 60, 80, 92)]
    with DatasetWriter(directory) as writer:
        for row, mask in enumerate(masks):
            writer.add([(7 * row + 3 * index) % 400 for index in range(len(mask))], mask, row=row)
        recipe = {"tokenizer": tokenizer_digests(tokenizer)}
        facts = TokenizerFacts(num_tokens=400)
        writer.finish(recipe=recipe, tokenizer=facts, rows=len(masks), truncated=0, dropped={})
    return directory


def test_a_dataset_smaller_than_one_step_is_trained_over_again(
    training_world: TrainingWorld, training_server: Server, tmp_path: Path
) -> None:
    changes = {"data__path": write_odd_samples(tmp_path / "odd", training_world.target), "run__steps": 2}
    assert train(training_world, training_server.address, tmp_path / "run", **changes, batch__accumulation=30)
    steps = read_records(tmp_path / "run" / "consumed-rank-0.jsonl")
    samples = [sample for step in steps for batch in step["batches"] for sample in batch["samples"]]
    assert [len(step["batches"]) for step in steps] == [30, 30]
    assert sorted(samples[:19]) == list(range(19))
    assert steps[-1]["batches"][-1]["epoch"] >= 2


def test_a_partial_last_step_is_trained_as_it_is(
    training_world: TrainingWorld, training_server: Server, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    changes = {"batch__accumulation": 7, "run__epochs": 1, "run__steps": None}
    assert train(training_world, training_server.address, run_dir, **changes)
    steps = [len(record["batches"]) for record in read_records(run_dir / "consumed-rank-0.jsonl")]
    samples = [s for r in read_records(run_dir / "consumed-rank-0.jsonl") for b in r["batches"] for s in b["samples"]]
    assert steps[:-1] == [7] * (len(steps) - 1)
    assert 0 < steps[-1] < 7
    assert sorted(samples) == list(range(len(samples)))


def consumed_by_step(run_dir: Path, num_ranks: int) -> list[list[Any]]:
    """Batches of each step, over all ranks, in plan order."""
    ranks = [read_records(run_dir / f"consumed-rank-{rank}.jsonl") for rank in range(num_ranks)]
    return [
        sorted((batch for record in records for batch in record["batches"]), key=lambda batch: batch["position"])
        for records in zip(*ranks, strict=True)
    ]
