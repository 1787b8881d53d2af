"""A replica's RPCs over real gRPC: terms, credit, errors, the head, drain."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from target_wire.channel import channel_options
from target_wire.codec import tensor_from_buffer
from target_wire.spec import DType
from target_wire.v1 import target_pb2 as pb

from target_server.config import ModelConfig
from target_server.loading import LoadedTarget, load_target
from tests.support.replica_thread import RunningReplica, running_replica
from tests.support.served_targets import ARCHITECTURES, VOCAB_SIZE, some_ids, write_target
from tests.support.stream_client import StreamClient, capture, fetch_head, reason_of

ROW_BYTES = 64 * 4  # one tap of the tiny targets in float32
SLOTS = {"max_batch_token_count": 64, "max_tap_count": 2, "max_session_count": 4}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    return load_target(ModelConfig(path=write_target(tmp_path_factory.mktemp("llama"), "llama")), ["cpu"])


@pytest.fixture(scope="module")
def replica(target: LoadedTarget) -> Iterator[RunningReplica]:
    with running_replica(target, limits=SLOTS, buffers={"host_slot_count": 6, "frame_bytes": 2048}) as running:
        yield running


def _assert_serves(replica: RunningReplica) -> None:
    """Whatever went before: nothing has leaked, and the next session works."""
    replica.wait_for(sessions=0, in_flight=0, slots_free=6)
    with StreamClient(replica.address) as client:
        client.open([1])
        client.grant(1 << 16)
        client.request(1, [some_ids(5)])
        assert client.receive_batch().rows_TLD.shape == (5, 1, 64)
    replica.wait_for(sessions=0, slots_free=6)


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"protocol_version": 2}, grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_MISMATCH"),
        ({"taps": [6]}, grpc.StatusCode.INVALID_ARGUMENT, "TAP_OUT_OF_RANGE"),
        ({"taps": []}, grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST"),
        ({"max_batch_token_count": 65}, grpc.StatusCode.INVALID_ARGUMENT, "BATCH_TOO_LARGE"),
        ({"taps": [0, 1, 2]}, grpc.StatusCode.INVALID_ARGUMENT, "BATCH_TOO_LARGE"),  # 64 x 3 taps: above a slot
        ({"window_bytes": 64 * ROW_BYTES - 1}, grpc.StatusCode.INVALID_ARGUMENT, "WINDOW_TOO_SMALL"),
        ({"dtype": DType.FLOAT16.number}, grpc.StatusCode.INVALID_ARGUMENT, "DTYPE_MISMATCH"),
        ({"expected_version": pb.TargetVersion(digest="x")}, grpc.StatusCode.FAILED_PRECONDITION, "VERSION_MISMATCH"),
    ],
)
def test_bad_terms_are_refused(
    fields: dict[str, Any], code: grpc.StatusCode, reason: str, replica: RunningReplica
) -> None:
    with StreamClient(replica.address) as client:
        with pytest.raises(grpc.RpcError) as refused:
            client.open(**{"taps": [1], **fields})
        assert refused.value.code() is code
        assert reason_of(refused.value) == reason
    _assert_serves(replica)


def _not_open_first(client: StreamClient) -> None:
    client.grant(5)


def _open_twice(client: StreamClient) -> None:
    client.open([1])
    client.send(open=pb.Open(protocol_version=1))


def _empty_message(client: StreamClient) -> None:
    client.open([1])
    client.send()


def _credit_goes_back(client: StreamClient) -> None:
    client.open([1])
    client.grant(100)
    client.grant(-1)


def _credit_beyond_the_window(client: StreamClient) -> None:
    client.open([1], window_bytes=64 * ROW_BYTES)
    client.grant(64 * ROW_BYTES + 1)


@pytest.mark.parametrize(
    ("act", "code", "reason"),
    [
        (_not_open_first, grpc.StatusCode.FAILED_PRECONDITION, "SESSION_NOT_OPEN"),
        (_open_twice, grpc.StatusCode.FAILED_PRECONDITION, "SESSION_ALREADY_OPEN"),
        (_empty_message, grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST"),
        (_credit_goes_back, grpc.StatusCode.FAILED_PRECONDITION, "CREDIT_INVALID"),
        (_credit_beyond_the_window, grpc.StatusCode.FAILED_PRECONDITION, "CREDIT_INVALID"),
    ],
)
def test_broken_protocol_ends_the_stream_and_nothing_else(
    act: Any, code: grpc.StatusCode, reason: str, replica: RunningReplica
) -> None:
    with StreamClient(replica.address) as client:
        act(client)
        with pytest.raises(grpc.RpcError) as refused:
            client.read()
        assert refused.value.code() is code
        assert reason_of(refused.value) == reason
    _assert_serves(replica)


def test_no_credit_means_no_forward(target: LoadedTarget, replica: RunningReplica) -> None:
    ran: list[int] = []
    handle = target.layers[0].register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        with StreamClient(replica.address) as client:
            client.open([1])
            client.grant(5 * ROW_BYTES - 1)
            client.request(1, [some_ids(5)])
            replica.wait_for(sessions=1, queued=1)
            time.sleep(0.1)
            assert ran == []
            client.grant(1)
            assert client.receive_batch().header.request_id == 1
            assert ran == [1]
    finally:
        handle.remove()


def test_bad_request_leaves_the_session_open(replica: RunningReplica) -> None:
    with StreamClient(replica.address) as client:
        client.open([1])
        client.grant(1 << 16)
        client.request(1, [[VOCAB_SIZE]])
        failed = client.receive()
        assert isinstance(failed, pb.BatchFailed)
        assert (failed.request_id, failed.code, failed.reason) == (1, 3, "TOKEN_OUT_OF_RANGE")
        client.request(2, [some_ids(3)])
        assert client.receive_batch().header.request_id == 2


def test_half_closed_stream_is_answered_and_ends(replica: RunningReplica) -> None:
    with StreamClient(replica.address) as client:
        client.open([1])
        client.grant(1 << 16)
        client.request(1, [some_ids(3)])
        client.end_requests()
        client.receive_batch()
        assert client.read() is None
        assert client.call.code() is grpc.StatusCode.OK


def test_frames_are_cut_at_token_rows(replica: RunningReplica) -> None:
    with StreamClient(replica.address) as client:
        client.open([0, 1])
        client.grant(1 << 20)
        client.request(1, [some_ids(30), some_ids(19)])
        batch = client.receive_batch()
        assert batch.header.frame_count == 13  # 49 rows of 512 bytes, 4 to a frame of 2048


def test_client_that_vanishes_mid_batch_leaves_nothing_behind(replica: RunningReplica) -> None:
    for _ in range(5):
        client = StreamClient(replica.address)
        client.open([0, 1])
        client.grant(1 << 20)
        for request_id in range(6):
            client.request(request_id, [some_ids(60)])
        header = client.read()
        assert isinstance(header, pb.StreamHiddenStatesResponse)
        client.read()
        client.close()
    _assert_serves(replica)


def test_bytes_that_are_no_message_end_their_stream_alone(replica: RunningReplica) -> None:
    with grpc.insecure_channel(replica.address, options=channel_options()) as channel:
        method = channel.stream_stream("/target_wire.v1.TargetReplicaService/StreamHiddenStates")
        with pytest.raises(grpc.RpcError) as refused:
            next(method(iter([b"\xff\xff\xff garbage"]), timeout=10))
        assert refused.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    _assert_serves(replica)


def test_message_above_the_limit_ends_its_stream_alone(replica: RunningReplica) -> None:
    # case 76
    with grpc.insecure_channel(replica.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        method = channel.stream_stream("/target_wire.v1.TargetReplicaService/StreamHiddenStates")
        with pytest.raises(grpc.RpcError) as refused:
            next(method(iter([bytes((64 << 20) + 1)]), timeout=30))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    _assert_serves(replica)


def test_stream_that_is_never_opened_is_closed(target: LoadedTarget) -> None:
    with running_replica(target, limits=SLOTS, deadlines={"open_timeout_s": 0.2}) as replica:
        with StreamClient(replica.address) as client, pytest.raises(grpc.RpcError) as refused:
            client.read()
        assert reason_of(refused.value) == "STALLED"


def test_client_that_does_not_read_is_closed_in_the_end(target: LoadedTarget) -> None:
    limits = {**SLOTS, "max_batch_token_count": 16384, "max_sequence_token_count": 512}
    deadlines = {"write_timeout_s": 0.5}
    with (
        running_replica(target, limits=limits, deadlines=deadlines) as replica,
        StreamClient(replica.address) as client,
    ):
        client.open([0, 1], max_batch_token_count=16384, window_bytes=1 << 28)
        client.grant(1 << 28)
        for request_id in range(12):  # 8 MB each: more than the transport's windows take
            client.request(request_id, [some_ids(32)] * 512)
        replica.wait_for(sessions=0, slots_free=10)
        with pytest.raises(grpc.RpcError) as refused:
            list(client.call)
        assert reason_of(refused.value) == "STALLED"


def test_unary_capture_equals_the_stream(replica: RunningReplica) -> None:
    sequences = [some_ids(7), some_ids(3)]
    with StreamClient(replica.address) as client:
        client.open([2, 0])
        client.grant(1 << 16)
        client.request(1, sequences)
        streamed = client.receive_batch()
    answer = capture(replica.address, [2, 0], sequences)
    assert answer.header.tensor == streamed.header.tensor
    assert torch.equal(tensor_from_buffer(answer.body, DType.FLOAT32, (10, 2, 64)), streamed.rows_TLD)
    with pytest.raises(grpc.RpcError) as refused:
        capture(replica.address, [17], sequences)
    assert reason_of(refused.value) == "TAP_OUT_OF_RANGE"
    _assert_serves(replica)


def test_unary_capture_that_does_not_fit_one_message_is_refused(target: LoadedTarget) -> None:
    limits = {**SLOTS, "max_batch_token_count": 1 << 18}
    with running_replica(target, limits=limits) as replica, pytest.raises(grpc.RpcError) as refused:
        capture(replica.address, [0, 1], [some_ids(512)] * 260)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason_of(refused.value) == "BATCH_TOO_LARGE"


def test_large_padding_is_run_in_parts_with_the_same_rows(target: LoadedTarget, replica: RunningReplica) -> None:
    sequences = [some_ids(n, seed=n) for n in (3, 30, 1, 17)]
    rows = {}
    limits = {**SLOTS, "max_padded_token_count": 34}
    with running_replica(target, limits=limits) as parts:
        for name, address in (("whole", replica.address), ("parts", parts.address)):
            answer = capture(address, [0, 3], sequences)
            rows[name] = tensor_from_buffer(answer.body, DType.FLOAT32, (51, 2, 64))
    torch.testing.assert_close(rows["parts"], rows["whole"], rtol=1e-4, atol=1e-4)


def test_nan_is_marked_and_only_in_its_own_batch(target: LoadedTarget, replica: RunningReplica) -> None:
    # I4, case 12
    row = target.model.get_input_embeddings().weight.data[7]
    kept = row.clone()
    row[3] = float("nan")
    try:
        assert not capture(replica.address, [0], [[1, 7, 2]]).header.finite
        assert capture(replica.address, [0], [[1, 8, 2]]).header.finite
        row[3] = float("inf")
        assert not capture(replica.address, [0], [[1, 7, 2]]).header.finite
    finally:
        row.copy_(kept)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_head_is_what_the_model_computes_with(architecture: str, tmp_path: Path) -> None:
    # cases 37, 57, 107
    target = load_target(ModelConfig(path=write_target(tmp_path, architecture, dtype=torch.bfloat16)), ["cpu"])
    with running_replica(target) as replica:
        head, tensors = fetch_head(replica.address)
    model = target.model
    assert head.tie_word_embeddings == model.config.get_text_config().tie_word_embeddings
    assert set(tensors) == {"embed_tokens", "final_norm"} | (set() if head.tie_word_embeddings else {"lm_head"})
    seen: dict[str, torch.Tensor] = {}
    handles = [
        target.layers[0].register_forward_pre_hook(lambda _m, inputs: seen.update(embedded=inputs[0])),
        model.get_output_embeddings().register_forward_pre_hook(lambda _m, inputs: seen.update(final=inputs[0])),
    ]
    ids = torch.tensor([some_ids(12)])
    with torch.no_grad():
        logits = model(ids).logits
    for handle in handles:
        handle.remove()
    embedded = torch.nn.functional.embedding(ids, tensors["embed_tokens"]) * torch.tensor(
        head.embedding_scale, dtype=torch.bfloat16
    )
    assert torch.equal(embedded, seen["embedded"])
    ours = torch.nn.functional.linear(seen["final"], tensors.get("lm_head", tensors["embed_tokens"]))
    ours = ours * head.logit_scale
    if head.logit_softcap:
        ours = torch.tanh(ours / head.logit_softcap) * head.logit_softcap
    torch.testing.assert_close(ours.float(), logits.float(), rtol=2e-2, atol=2e-2)
    assert torch.equal(tensors["final_norm"], target.decoder.norm.weight)


def test_head_of_another_version_is_refused(replica: RunningReplica) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        fetch_head(replica.address, number=2)
    assert reason_of(refused.value) == "VERSION_MISMATCH"


def test_four_clients_each_get_their_own_rows(target: LoadedTarget) -> None:
    """The hammer: cases 42, 43, 44, 46. 500 requests of unlike prompts and lengths 1 to the largest."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for index in range(25):
        count = int(torch.randint(1, 5, (1,), generator=generator))
        lengths = torch.randint(1, 33, (count,), generator=generator).tolist()
        batches.append([some_ids(length, seed=100 * index + row) for row, length in enumerate(lengths)])
    batches.append([some_ids(128)])
    expected = [_rows(target, batch) for batch in batches]
    errors: list[BaseException] = []

    def hammer(replica: RunningReplica, seed: int) -> None:
        order = torch.randint(0, len(batches), (125,), generator=torch.Generator().manual_seed(seed)).tolist()
        try:
            with StreamClient(replica.address) as client:
                client.open([4, 1], max_batch_token_count=128, window_bytes=1 << 18)
                client.grant(1 << 18)
                for request_id, which in enumerate(order[:8]):
                    client.request(request_id, batches[which])
                for answered in range(len(order)):
                    answer = client.receive_batch()
                    assert torch.equal(answer.rows_TLD, expected[order[answer.header.request_id]])
                    client.grant(answer.header.payload_bytes)
                    if answered + 8 < len(order):
                        client.request(answered + 8, batches[order[answered + 8]])
        except BaseException as error:
            errors.append(error)

    limits = {"max_batch_token_count": 128, "max_tap_count": 2, "max_session_count": 4}
    with running_replica(target, limits=limits, buffers={"host_slot_count": 6}) as replica:
        threads = [threading.Thread(target=hammer, args=(replica, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert not errors, errors[0]
        replica.wait_for(sessions=0, slots_free=6)


def _rows(target: LoadedTarget, batch: list[list[int]]) -> torch.Tensor:
    longest = max(map(len, batch))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in batch])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
    with torch.no_grad():
        hidden = target.model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    return torch.stack(
        [torch.cat([hidden[tap + 1][i, : len(row)] for i, row in enumerate(batch)]) for tap in (4, 1)], 1
    )


def test_drain_sends_what_runs_and_refuses_the_rest(target: LoadedTarget) -> None:
    with running_replica(target, limits=SLOTS) as replica, StreamClient(replica.address) as client:
        client.open([1])
        client.grant(5 * ROW_BYTES)
        client.request(1, [some_ids(5)])
        client.request(2, [some_ids(5)])
        assert client.receive_batch().header.request_id == 1
        replica.pipe.drain()
        failed = client.receive()
        assert isinstance(failed, pb.BatchFailed)
        assert (failed.request_id, failed.reason) == (2, "SHUTTING_DOWN")
        with pytest.raises(grpc.RpcError) as ended:
            client.read()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(ended.value) == "SHUTTING_DOWN"
    assert replica.result is None


def test_replica_that_cannot_go_on_says_so_and_ends(target: LoadedTarget) -> None:
    with running_replica(target, limits=SLOTS) as replica, StreamClient(replica.address) as client:
        client.open([1])
        client.grant(1 << 14)

        def broken(*_: Any) -> None:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

        handle = target.layers[0].register_forward_pre_hook(broken)
        try:
            client.request(1, [some_ids(5)])
            with pytest.raises(grpc.RpcError) as lost:
                client.read()
        finally:
            handle.remove()
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(lost.value) == "REPLICA_LOST"
    assert isinstance(replica.result, torch.AcceleratorError)


def test_failed_forward_fails_its_request_alone(target: LoadedTarget, replica: RunningReplica) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("no")

    with StreamClient(replica.address) as client:
        client.open([1])
        client.grant(1 << 14)
        handle = target.layers[0].register_forward_pre_hook(broken)
        client.request(1, [some_ids(5)])
        failed = client.receive()
        handle.remove()
        assert isinstance(failed, pb.BatchFailed)
        assert (failed.code, failed.reason) == (13, "CAPTURE_FAILED")
        assert "no" not in failed.detail.split()  # the text of a foreign exception stays here
        client.request(1, [some_ids(5)])
        assert client.receive_batch().header.request_id == 1
    _assert_serves(replica)
