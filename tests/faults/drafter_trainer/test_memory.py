"""Memory that must not grow: with a server much faster than the trainer, and with the size of the dataset (I2)."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from target_wire.spec import DType

from drafter_trainer.client.delivery import Delivery
from drafter_trainer.client.terms import Patience, StreamTerms
from drafter_trainer.config import TrainerConfig
from drafter_trainer.config.resolve import resolve_config
from drafter_trainer.dataset import FORMAT_VERSION, DatasetMeta
from drafter_trainer.prepare import _recipe, prepare_settings
from drafter_trainer.tokenizer import TokenizerFacts
from tests.support.fake_target import HIDDEN_SIZE, FakeTarget
from tests.support.forking_trainer import ForkingTrainer
from tests.support.training_world import Server, TrainingWorld, read_records

# The first test waits for a server, and for processes to import torch.
pytestmark = pytest.mark.timeout(300)

BATCHES = 2000
TOKENS = 2048
MIB = 1 << 20


def test_the_receiver_stays_within_the_window_over_two_thousand_batches() -> None:  # cases 74, 83
    """The server is always ahead: as far as the window lets it, and no further."""
    terms = StreamTerms(taps=(0,), hidden_size=HIDDEN_SIZE, dtype=DType.FLOAT32, max_batch_tokens=TOKENS, slot_count=4)
    ids = np.arange(TOKENS, dtype="<i4").tobytes()
    peaks: list[int] = []
    with FakeTarget() as target, Delivery([target.address], terms=terms, patience=Patience()) as delivery:
        submitted = 0
        for done in range(BATCHES):
            while submitted < BATCHES and delivery.free_slots:
                delivery.submit(position=submitted, lengths=(TOKENS,), token_ids=ids)
                submitted += 1
            slot = delivery.take()
            assert slot.position == done
            if done % 100 == 0:
                wait_until(lambda ahead=submitted: len(target.asked) == ahead)
                assert submitted == min(done + terms.slot_count, BATCHES)
                time.sleep(0.02)  # now it has nothing left to do
                assert delivery.receiver_pid is not None
                peaks.append(psutil.Process(delivery.receiver_pid).memory_info().rss)
            delivery.release(slot)
    # The first is after warming up; 2,000 batches carried 256 MiB since.
    assert max(peaks) - peaks[1] < 4 * MIB + terms.window_bytes, [peak // MIB for peak in peaks]


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.002)


def test_a_million_lines_start_as_soon_and_in_as_little_memory_as_a_thousand(
    training_world: TrainingWorld, training_server: Server, trainers: ForkingTrainer, tmp_path: Path
) -> None:  # cases 76, 78
    """Whole runs: the source is hashed, an epoch is counted, frequent tokens are drawn, and steps are trained."""
    starts = []
    for count in (1_000, 1_000_000):
        directory = tmp_path / str(count)
        directory.mkdir()
        changes = {"run__steps": None, "run__epochs": 1, "loss__sampled_vocabulary": 64}
        changes |= {"data__path": directory / "rows.jsonl", "data__prepared_dir": directory / "prepared"}
        changes |= {"batch__shuffle_window_samples": 4096}
        flags = training_world.flags(training_server.address, directory / "run", **changes)
        write_ready_cache(resolve_config(flags=flags).config, count)
        starts.append(watch_start(trainers, flags, directory / "run"))
    few, many = starts
    assert many.first_step_s < 10
    assert many.own_bytes - few.own_bytes < 32 * MIB


@dataclasses.dataclass
class Start:
    """How a run began."""

    first_step_s: float
    own_bytes: int
    """The most memory of its own; pages of mapped files are shared and can be dropped."""


def watch_start(trainers: ForkingTrainer, flags: list[str], run_dir: Path) -> Start:
    """Starts a run, ends it after five steps."""
    started_s = time.monotonic()
    run = trainers.start(flags)
    first_step_s = own_bytes = 0
    while (steps := len(read_records(run_dir / "metrics.jsonl"))) < 5:
        assert not run.has_ended, run.text()
        assert time.monotonic() - started_s < 60, run.text()
        own_bytes = max(own_bytes, anonymous_bytes(run.pid))
        if steps and not first_step_s:
            first_step_s = time.monotonic() - started_s
        time.sleep(0.01)
    run.kill()
    run.wait()
    return Start(first_step_s or time.monotonic() - started_s, own_bytes)


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that no file stands behind."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def write_ready_cache(config: TrainerConfig, count: int) -> None:
    """JSON Lines and what preparation would have made of them: equal samples, written column by column."""
    source, prepared, length = config.data.path, config.data.prepared_dir, 8
    assert source is not None
    assert prepared is not None
    prepared.mkdir()
    line = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]}) + "\n"
    with source.open("w") as file:
        for _ in range(count // 1000):
            file.write(line * 1000)
    np.tile(np.arange(length, dtype="<i4"), count).tofile(prepared / "tokens.bin")
    np.ones(count * length, dtype="u1").tofile(prepared / "loss_mask.bin")
    np.arange(0, count * length + 1, length, dtype="<i8").tofile(prepared / "offsets.bin")
    np.arange(count, dtype="<i8").tofile(prepared / "rows.bin")
    meta = DatasetMeta(
        format_version=FORMAT_VERSION,
        fingerprint="0" * 32,
        recipe=_recipe(source, config.data.tokenizer, prepare_settings(config)),
        tokenizer=TokenizerFacts(num_tokens=400),
        rows=count,
        samples=count,
        tokens=count * length,
        supervised_tokens=count * length,
        longest_tokens=length,
        largest_token_id=length - 1,
        truncated=0,
        dropped={},
    )
    (prepared / "meta.json").write_text(meta.to_json())
