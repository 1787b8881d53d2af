"""Memory that must not grow: with a server much faster than the trainer, and with the size of the dataset (I2)."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import psutil
from target_wire.spec import DType

from drafter_trainer.client.delivery import Delivery
from drafter_trainer.client.terms import Patience, StreamTerms
from drafter_trainer.dataset import FORMAT_VERSION, TokenDataset
from drafter_trainer.plan import Plan, PlanSettings
from tests.support.fake_target import HIDDEN_SIZE, FakeTarget

BATCHES = 2000
TOKENS = 2048
MIB = 1 << 20


def test_the_receiver_stays_within_the_window_over_two_thousand_batches() -> None:  # cases 74, 83
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
                time.sleep(0.05)  # the server has long answered everything it was asked for
                assert len(target.asked) <= done + terms.slot_count
                assert delivery.receiver_pid is not None
                peaks.append(psutil.Process(delivery.receiver_pid).memory_info().rss)
            delivery.release(slot)
    # The first is after warming up; 2,000 batches carried 256 MiB since.
    assert max(peaks) - peaks[1] < 4 * MIB + terms.window_bytes, [peak // MIB for peak in peaks]


def test_a_million_samples_cost_no_memory_and_a_second_before_the_first_batch(tmp_path: Path) -> None:  # cases 76, 78
    count, length = 1_000_000, 8
    write_prepared(tmp_path, count, length)
    process = psutil.Process()
    before = process.memory_info()
    started_s = time.monotonic()
    plan = Plan(TokenDataset(tmp_path), PlanSettings(0, 4096, 64, 4096))
    first = plan.micro_batch(0)
    far = plan.micro_batch(plan.micro_batches_in(1) + 5)
    took_s = time.monotonic() - started_s
    after = process.memory_info()
    assert (first.epoch, far.epoch) == (0, 1)
    assert took_s < 10
    # Pages of the mapped files are shared and can be dropped; what matters is what is this process's own.
    assert (after.rss - after.shared) - (before.rss - before.shared) < 32 * MIB


def write_prepared(directory: Path, count: int, length: int) -> None:
    """A prepared dataset of equal samples, written column by column."""
    np.zeros(count * length, dtype="<i4").tofile(directory / "tokens.bin")
    np.ones(count * length, dtype="u1").tofile(directory / "loss_mask.bin")
    np.arange(0, count * length + 1, length, dtype="<i8").tofile(directory / "offsets.bin")
    np.arange(count, dtype="<i8").tofile(directory / "rows.bin")
    meta = {
        "format_version": FORMAT_VERSION,
        "fingerprint": "0" * 32,
        "recipe": {},
        "tokenizer": {"num_tokens": 10},
        "rows": count,
        "samples": count,
        "tokens": count * length,
        "supervised_tokens": count * length,
        "longest_tokens": length,
        "largest_token_id": 0,
        "truncated": 0,
        "dropped": {},
    }
    (directory / "meta.json").write_text(json.dumps(meta))
