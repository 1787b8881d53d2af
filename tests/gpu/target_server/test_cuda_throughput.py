"""What safety costs on CUDA: copies beside forwards against none, the audit, and the whole against the needed blocks.

Ratios within one test, medians of interleaved pairs. The target is random and large enough that a forward is worth
overlapping (0.8 B parameters in bf16); `make bench PARTS=stream,overlap` gives the figures of a real one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.loops import flops_per_token, limit_loop, matrix_flops_per_s, padded
from bench.pairs import ratios, take_turns
from bench.pipeline import DrivenReplica, build_session
from bench.workload import Workload
from target_server.config import ModelConfig, ServerConfig
from target_server.loading import LoadedTarget, load_target
from target_server.streams import CudaStreams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
DEVICE = torch.device("cuda:0")
TAPS = [1, 4, 7, 10, 13]
WORK = Workload(batches=12, batch_tokens=16384, shortest=64, longest=2048, vocab_size=32000)
ROUNDS = 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("large"))


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> LoadedTarget:
    return load_target(ModelConfig(path=checkpoint), [str(DEVICE)])


def _write(directory: Path) -> Path:
    import transformers  # noqa: PLC0415 - takes seconds

    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        dtype=torch.bfloat16,
    )
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def _replica(target: LoadedTarget, **buffers: Any) -> Callable[[], float]:
    """Returns what runs all batches once and gives tokens a second."""
    limits: Any = {"max_batch_token_count": WORK.batch_tokens, "max_tap_count": len(TAPS)}
    config = ServerConfig(limits=limits, buffers={"host_slot_count": 9, **buffers})
    session = build_session(target, TAPS, WORK.batch_tokens)
    replica = DrivenReplica(target, CudaStreams(DEVICE), config, session)
    batches = WORK.sequences()
    tokens = sum(len(ids) for batch in batches for ids in batch)
    replica.run(batches[-2:])
    return lambda: tokens / replica.run(batches)


@pytest.fixture(scope="module")
def pipeline(target: LoadedTarget) -> Callable[[], float]:
    return _replica(target)


def test_overlap_with_the_audit_sampled_is_no_slower_than_none(
    target: LoadedTarget, pipeline: Callable[[], float]
) -> None:
    turns = take_turns({"on": pipeline, "off": _replica(target, copy_overlap=False)}, rounds=ROUNDS)
    gain = statistics.median(ratios(turns, "on", "off"))
    print(f"\noverlap gain {gain:.3f}; {turns[-1]['on']:.0f} tok/s with, {turns[-1]['off']:.0f} without")
    assert gain >= 0.99


def test_sampled_audit_costs_two_percent_at_most(target: LoadedTarget, pipeline: Callable[[], float]) -> None:
    turns = take_turns({"sampled": pipeline, "off": _replica(target, copy_audit="off")}, rounds=ROUNDS)
    assert statistics.median(ratios(turns, "sampled", "off")) >= 0.98


def test_pipeline_keeps_up_with_the_needed_blocks(checkpoint: Path, pipeline: Callable[[], float]) -> None:
    # A model of its own: this loop cuts it behind the last tap and leaves its hooks there.
    model = load_target(ModelConfig(path=checkpoint), [str(DEVICE)]).model
    peak = matrix_flops_per_s(DEVICE, torch.bfloat16)
    batches = [padded(sequences, DEVICE) for sequences in WORK.sequences()]
    tokens = sum(sum(lengths) for _, _, lengths in batches)
    forward = limit_loop(model, TAPS, WORK.batch_tokens)

    def limit() -> float:
        began_s = time.perf_counter()
        with torch.inference_mode():
            for batch in batches:
                forward(batch)
        torch.cuda.synchronize(DEVICE)
        return tokens / (time.perf_counter() - began_s)

    limit()
    turns = take_turns({"pipeline": pipeline, "limit": limit}, rounds=ROUNDS)
    share = turns[-1]["pipeline"] * flops_per_token(model.get_decoder().layers) / peak
    print(f"\n{turns[-1]['pipeline']:.0f} tok/s, {share:.2f} of the speed of one large matrix product")
    assert statistics.median(ratios(turns, "pipeline", "limit")) >= 0.95
