"""Parts of the benchmark that need no download really measure, and what they measure is what the product does."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from bench.loops import flops_per_token, limit_loop, padded, plain_loop
from bench.pipeline import DrivenReplica, build_session
from bench.thread_streams import ThreadStreams
from bench.workload import Workload
from target_server.config import ModelConfig, ServerConfig
from target_server.loading import LoadedTarget, load_target
from tests.support.served_targets import VOCAB_SIZE, write_target

REPOSITORY = Path(__file__).parents[3]
WORK = Workload(batches=4, batch_tokens=64, shortest=3, longest=24, vocab_size=VOCAB_SIZE)
TAPS = [1, 3]


@pytest.fixture
def target(tmp_path: Path) -> LoadedTarget:
    return load_target(ModelConfig(path=write_target(tmp_path / "llama", "llama")), ["cpu"])


@pytest.mark.timeout(300)
def test_wire_and_scale_give_every_figure_and_leave_no_process_behind(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    command = [sys.executable, "-m", "bench", "--quick", "--only", "wire,scale", "--output", str(output)]
    ended = subprocess.run(command, cwd=REPOSITORY, timeout=280, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    results = json.loads(output.read_text())
    assert json.loads(ended.stdout.splitlines()[-1]) == results
    assert {"wire_ratio", "wire_cpu_s_per_gb", "wire_grpc_ratio", "wire_grpc_cpu_s_per_gb", "scale_efficiency"} <= set(
        results
    )
    for name, item in results.items():
        if name not in ("machine", "commit"):
            assert 0 < item["low"] <= item["value"] <= item["high"], name
    # Two replicas that sleep, two ranks: whatever the machine does, a good part of the ideal is reached.
    assert results["scale_efficiency"]["value"] > 0.3
    assert not [line for line in _command_lines() if str(tmp_path) in line or "bench.simulated" in line]


def _command_lines() -> list[str]:
    """Every command line on this machine that this checkout's benchmark could have started."""
    lines = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(REPOSITORY):
                lines.append(" ".join(process.cmdline()))
    return lines


@pytest.mark.parametrize("overlap", [True, False])
def test_driven_replica_leaves_transformers_rows_in_its_slots(overlap: bool, target: LoadedTarget) -> None:
    limits = {"max_batch_token_count": WORK.batch_tokens, "max_tap_count": len(TAPS)}
    config = ServerConfig(limits=limits, buffers={"copy_overlap": overlap, "copy_audit": "always"})
    streams = ThreadStreams()
    streams.copy_s = 0.01  # a copy that outlasts the next forward
    replica = DrivenReplica(target, streams, config, build_session(target, TAPS, WORK.batch_tokens))
    batches = WORK.sequences()
    assert replica.run(batches) > 0
    last = batches[-1]
    ids_BS, mask_BS, lengths = padded(last, torch.device("cpu"))
    hidden = target.model(ids_BS, attention_mask=mask_BS, output_hidden_states=True).hidden_states
    rows = [torch.cat([hidden[tap + 1][row, :length] for row, length in enumerate(lengths)]) for tap in TAPS]
    expected = torch.stack(rows, 1).flatten()
    slots = [slot.memory.view(torch.float32)[: expected.numel()] for slot in replica.slots]
    assert any(torch.equal(slot, expected) for slot in slots)


def test_limit_computes_the_needed_blocks_and_the_plain_loop_all(target: LoadedTarget) -> None:
    ran: list[int] = []
    for index, layer in enumerate(target.layers):
        layer.register_forward_pre_hook(lambda _block, _inputs, index=index: ran.append(index))
    batch = padded(WORK.sequences()[0], torch.device("cpu"))
    whole = flops_per_token(target.layers)
    with torch.inference_mode():
        plain_loop(target.model)(batch)
        assert ran == list(range(6))
        ran.clear()
        limit_loop(target.model, TAPS, WORK.batch_tokens)(batch)
    assert ran == [0, 1, 2, 3]
    assert flops_per_token(target.model.get_decoder().layers) == whole * 4 // 6


def test_workload_is_the_same_everywhere_and_keeps_its_bounds() -> None:
    batches = WORK.sequences()
    assert batches == Workload(**WORK.as_json()).sequences()
    assert len(batches) == WORK.batches
    for batch in batches:
        assert len(batch) * max(map(len, batch)) <= WORK.batch_tokens
        assert all(WORK.shortest <= len(ids) <= WORK.longest for ids in batch)
        assert all(0 <= token < VOCAB_SIZE for ids in batch for token in ids)
