"""The replica on CUDA: the same bytes as transformers, with copies beside forwards or without, audited."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from target_server.audit import checksum
from target_server.config import ModelConfig
from target_server.loading import LoadedTarget, load_target
from target_server.streams import CudaStreams
from tests.support.replica_thread import running_replica
from tests.support.served_targets import ARCHITECTURES, LAYERS, some_ids, write_target
from tests.support.stream_client import StreamClient

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
TAPS = (LAYERS // 2, 0, LAYERS - 2)


def _load(architecture: str, directory: Path) -> LoadedTarget:
    return load_target(ModelConfig(path=write_target(directory, architecture, dtype=torch.bfloat16)), ["cuda:0"])


def _oracle(target: LoadedTarget, sequences: list[list[int]]) -> torch.Tensor:
    longest = max(map(len, sequences))
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in sequences], device="cuda:0")
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences], device="cuda:0")
    with torch.no_grad():
        hidden = target.model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    rows = [torch.cat([hidden[tap + 1][row, : len(ids)] for row, ids in enumerate(sequences)]) for tap in TAPS]
    return torch.stack(rows, 1).cpu()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_many_clients_get_transformers_rows_while_copies_overlap(
    architecture: str, overlap: bool, tmp_path: Path
) -> None:
    """I5, I6: every batch of three hammering clients, with every copy audited."""
    target = _load(architecture, tmp_path)
    batches = [[some_ids(length, seed=length + n) for length in (9, 1, 23 + n, 14)] for n in range(6)]
    expected = [_oracle(target, batch) for batch in batches]
    errors: list[BaseException] = []

    def hammer(address: str, seed: int) -> None:
        order = torch.randint(0, 6, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
        try:
            with StreamClient(address) as client:
                client.open(TAPS, window_bytes=1 << 20)
                client.grant(1 << 20)
                for request_id, which in enumerate(order[:6]):
                    client.request(request_id, batches[which])
                for answered in range(60):
                    answer = client.receive_batch()
                    assert torch.equal(answer.rows_TLD, expected[order[answer.header.request_id]])
                    client.grant(answer.header.payload_bytes)
                    if answered + 6 < 60:
                        client.request(answered + 6, batches[order[answered + 6]])
        except BaseException as error:
            errors.append(error)

    limits = {"max_batch_token_count": 64, "max_tap_count": 3, "max_session_count": 3}
    buffers = {"copy_overlap": overlap, "copy_audit": "always", "host_slot_count": 5}
    with running_replica(target, limits=limits, buffers=buffers) as replica:
        threads = [threading.Thread(target=hammer, args=(replica.address, seed)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not errors, errors[0]
        replica.wait_for(sessions=0, slots_free=5)


def test_compiled_blocks_give_rows_that_differ_by_rounding_only(tmp_path: Path) -> None:
    path = write_target(tmp_path, "llama", dtype=torch.float32)
    target = load_target(ModelConfig(path=path), ["cuda:0"])
    compiled = load_target(ModelConfig(path=path, compile_blocks=True), ["cuda:0"])
    batch = [some_ids(length, seed=length) for length in (9, 1, 23)]
    with running_replica(compiled) as replica, StreamClient(replica.address, deadline_s=280) as client:
        client.open(TAPS)
        client.grant(1 << 20)
        client.request(1, batch)
        torch.testing.assert_close(client.receive_batch().rows_TLD, _oracle(target, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("overlap", [True, False])
def test_model_spread_over_two_devices_gives_the_same_rows(overlap: bool, tmp_path: Path) -> None:
    """I5: taps of blocks on either device arrive in one packed buffer, as transformers computes them."""
    pytest.importorskip("accelerate")
    path = write_target(tmp_path, "llama", dtype=torch.bfloat16)
    target = load_target(ModelConfig(path=path), ["cuda:0", "cuda:1"])
    assert {parameter.device.index for parameter in target.model.parameters()} == {0, 1}
    batches = [[some_ids(length, seed=length + n) for length in (9, 1, 23)] for n in range(8)]
    buffers = {"copy_overlap": overlap, "copy_audit": "always"}
    with running_replica(target, buffers=buffers) as replica, StreamClient(replica.address) as client:
        client.open(TAPS)
        client.grant(1 << 20)
        for request_id, batch in enumerate(batches):
            client.request(request_id, batch)
        for batch in batches:
            assert torch.equal(client.receive_batch().rows_TLD, _oracle(target, batch))


def test_checksum_is_the_same_on_both_sides() -> None:
    memory = torch.randint(0, 256, (8 * 5001,), dtype=torch.uint8)
    assert int(checksum(memory)) == int(checksum(memory.cuda()))


def test_copies_run_beside_forwards() -> None:
    """Half a second of matrix products and a long copy take little longer together than the longer one alone."""
    device = torch.device("cuda:0")
    streams = CudaStreams(device)
    source, slot = streams.allocate_device(1 << 30), streams.allocate_host(1 << 30)
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

    def compute() -> None:
        for _ in range(60):
            torch.mm(matrix, matrix)

    def copy() -> None:
        for _ in range(4):
            slot.copy_(source, non_blocking=True)

    def seconds(*works: tuple[object, object]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for stream, work in works:
            stream.enqueue(work)  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds((streams.compute, compute), (streams.copy, copy))
    alone = (seconds((streams.compute, compute)), seconds((streams.copy, copy)))
    together = seconds((streams.compute, compute), (streams.copy, copy))
    assert together < 0.8 * sum(alone)
