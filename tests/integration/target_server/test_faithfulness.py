"""I5: streamed features are what transformers computes in process, bit for bit (cases 35, 47, 51, 52)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from target_server.config import ModelConfig
from target_server.loading import LoadedTarget, load_target
from tests.support.replica_thread import running_replica
from tests.support.served_targets import ARCHITECTURES, LAYERS, some_ids, write_target
from tests.support.stream_client import StreamClient

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Right-padded mixed lengths: one token, the longest in the middle, beyond the sliding windows of the tiny targets.
LENGTHS = (9, 1, 23, 14)
SEQUENCES = [some_ids(length, seed=length) for length in LENGTHS]
# First, middle and last allowed tap; out of order, so that a column is not a layer's rank by accident.
TAPS = (LAYERS // 2, 0, LAYERS - 1)


@pytest.fixture(scope="module", params=[(a, d) for a in ARCHITECTURES for d in DTYPES], ids=lambda p: f"{p[0]}-{p[1]}")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    architecture, dtype = request.param
    directory = tmp_path_factory.mktemp(architecture)
    write_target(directory, architecture, dtype=DTYPES[dtype])
    return load_target(ModelConfig(path=directory), ["cpu"])


@pytest.fixture(scope="module")
def streamed_TLD(target: LoadedTarget) -> Iterator[torch.Tensor]:
    with running_replica(target) as replica, StreamClient(replica.address) as client:
        opened = client.open(TAPS)
        assert opened.bytes_per_token == len(TAPS) * 64 * target.dtype.itemsize  # case 51
        client.grant(1 << 20)
        client.request(1, SEQUENCES)
        batch = client.receive_batch()
        assert batch.header.finite
        yield batch.rows_TLD


def _oracle(target: LoadedTarget) -> list[torch.Tensor]:
    """Each layer's packed valid rows from a plain transformers forward with `output_hidden_states`.

    transformers gives the last block's output only after the final norm, so that one is taken by a hook of the test.
    """
    ids_BS = torch.zeros(len(SEQUENCES), max(LENGTHS), dtype=torch.int64)
    mask_BS = torch.zeros_like(ids_BS)
    for row, ids in enumerate(SEQUENCES):
        ids_BS[row, : len(ids)] = torch.tensor(ids)
        mask_BS[row, : len(ids)] = 1
    raw: list[torch.Tensor] = []
    handle = target.layers[-1].register_forward_hook(lambda _block, _inputs, output: raw.append(output))
    with torch.no_grad():
        hidden = target.model(ids_BS, attention_mask=mask_BS, output_hidden_states=True).hidden_states
    handle.remove()
    assert len(hidden) == LAYERS + 1
    outputs = [*hidden[1:-1], raw[0]]
    return [torch.cat([out[row, :length] for row, length in enumerate(LENGTHS)]) for out in outputs]


def test_streamed_rows_equal_transformers_hidden_states(target: LoadedTarget, streamed_TLD: torch.Tensor) -> None:
    expected = _oracle(target)
    assert streamed_TLD.shape == (sum(LENGTHS), len(TAPS), 64)
    for column, tap in enumerate(TAPS):
        assert torch.equal(streamed_TLD[:, column], expected[tap]), f"layer {tap}"


def test_streamed_rows_are_alive(streamed_TLD: torch.Tensor) -> None:
    # case 47: hybrid targets elsewhere gave zeros or repeated rows and training "converged".
    assert (streamed_TLD.float().std(dim=(0, 2)) > 0).all()
    for column in range(len(TAPS)):
        assert len(torch.unique(streamed_TLD[:, column].float(), dim=0)) == sum(LENGTHS)


def test_forward_stops_after_the_last_tap(target: LoadedTarget) -> None:
    ran: list[int] = []
    handles = [
        layer.register_forward_pre_hook(lambda _block, _inputs, index=index: ran.append(index))
        for index, layer in enumerate(target.layers)
    ]
    try:
        with running_replica(target) as replica, StreamClient(replica.address) as client:
            client.open([1, 2])
            client.grant(1 << 20)
            client.request(1, SEQUENCES)
            client.receive_batch()
    finally:
        for handle in handles:
            handle.remove()
    assert ran == [0, 1, 2]
