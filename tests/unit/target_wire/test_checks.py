"""Every error that the contract's comments promise for `Open` and `BatchRequest`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from target_wire.checks import ServedTarget, check_batch_request, check_open, check_taps
from target_wire.errors import Code, Reason, WireError
from target_wire.spec import DType
from target_wire.v1 import target_pb2

DIGEST = "0123456789abcdef" * 2
SERVED = ServedTarget(
    layer_count=30,
    hidden_size=576,
    vocab_size=49_152,
    dtype=DType.BFLOAT16,
    version_number=3,
    version_digest=DIGEST,
    max_batch_token_count=4096,
    max_sequence_token_count=2048,
)
# Two taps of 576 elements in bf16.
ROW = 2 * 576 * 2


def open_message(**changes: object) -> target_pb2.Open:
    fields: dict = {
        "protocol_version": 1,
        "taps": [27, 1],
        "dtype": target_pb2.DTYPE_BFLOAT16,
        "max_batch_token_count": 1000,
        "window_bytes": 1000 * ROW,
    }
    return target_pb2.Open(**(fields | changes))


def request(lengths: list[int], ids: list[int] | None = None, request_id: int = 0) -> target_pb2.BatchRequest:
    token_ids = [7] * sum(lengths) if ids is None else ids
    return target_pb2.BatchRequest(request_id=request_id, sequence_lengths=lengths, token_ids=token_ids)


def assert_refused(caught: pytest.ExceptionInfo[WireError], code: Code, reason: Reason, detail: str) -> None:
    assert (caught.value.code, caught.value.reason) == (code, reason)
    assert detail in caught.value.detail
    assert "\n" not in caught.value.detail
    assert not caught.value.retryable


def test_terms_of_a_good_open() -> None:
    terms = check_open(open_message(client_name="run-7/rank-0"), SERVED)
    assert terms.taps == (27, 1)  # in the order asked for
    assert terms.dtype is DType.BFLOAT16
    assert terms.bytes_per_token == ROW
    assert terms.max_batch_token_count == 1000
    assert terms.window_bytes == 1000 * ROW
    assert terms.client_name == "run-7/rank-0"


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": target_pb2.DTYPE_UNSPECIFIED},
        {"taps": [0, 29]},
        {"max_batch_token_count": 4096, "window_bytes": 4096 * ROW},
        {"client_name": "x" * 128},
        {"expected_version": target_pb2.TargetVersion()},
        {"expected_version": target_pb2.TargetVersion(number=3)},
        {"expected_version": target_pb2.TargetVersion(digest=DIGEST)},
        {"expected_version": target_pb2.TargetVersion(number=3, digest=DIGEST)},
    ],
)
def test_open_at_the_edge_of_what_is_allowed(changes: dict) -> None:
    assert check_open(open_message(**changes), SERVED).dtype is DType.BFLOAT16


@pytest.mark.parametrize(
    ("changes", "code", "reason", "detail"),
    [
        ({"protocol_version": 0}, Code.FAILED_PRECONDITION, Reason.PROTOCOL_MISMATCH, "protocol_version 0"),
        ({"protocol_version": 2}, Code.FAILED_PRECONDITION, Reason.PROTOCOL_MISMATCH, "this server speaks 1"),
        ({"taps": []}, Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, "taps []"),
        ({"taps": [1, 5, 1]}, Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, "taps [1, 5, 1]: name each layer once"),
        # A tap that names no block, from either end.
        ({"taps": [1, 30]}, Code.INVALID_ARGUMENT, Reason.TAP_OUT_OF_RANGE, "taps 30: the target has layers 0 to 29"),
        ({"taps": [-1]}, Code.INVALID_ARGUMENT, Reason.TAP_OUT_OF_RANGE, "taps -1"),
        ({"dtype": 3}, Code.INVALID_ARGUMENT, Reason.DTYPE_MISMATCH, "dtype float32: the target is served in bfloat16"),
        ({"dtype": 17}, Code.INVALID_ARGUMENT, Reason.DTYPE_MISMATCH, "dtype 17"),
        ({"max_batch_token_count": 0}, Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, "max_batch_token_count 0"),
        ({"max_batch_token_count": -5}, Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, "max_batch_token_count -5"),
        ({"max_batch_token_count": 4097}, Code.INVALID_ARGUMENT, Reason.BATCH_TOO_LARGE, "at most 4096 tokens"),
        (
            {"window_bytes": 1000 * ROW - 1},
            Code.INVALID_ARGUMENT,
            Reason.WINDOW_TOO_SMALL,
            f"window_bytes {1000 * ROW - 1}: a batch of 1000 tokens is {1000 * ROW} bytes ({ROW} a token)",
        ),
        ({"window_bytes": 0}, Code.INVALID_ARGUMENT, Reason.WINDOW_TOO_SMALL, f"give at least {1000 * ROW}"),
        ({"window_bytes": -1}, Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, "window_bytes -1"),
        ({"client_name": "x" * 129}, Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, "client_name of 129 characters"),
        (
            {"expected_version": target_pb2.TargetVersion(number=2)},
            Code.FAILED_PRECONDITION,
            Reason.VERSION_MISMATCH,
            f"expected_version 2/any: served is 3/{DIGEST}",
        ),
        (
            {"expected_version": target_pb2.TargetVersion(digest="f" * 32)},
            Code.FAILED_PRECONDITION,
            Reason.VERSION_MISMATCH,
            f"expected_version any/{'f' * 32}",
        ),
        (
            {"expected_version": target_pb2.TargetVersion(number=-1)},
            Code.INVALID_ARGUMENT,
            Reason.BAD_REQUEST,
            "expected_version.number -1",
        ),
    ],
)
def test_open_is_refused(changes: dict, code: Code, reason: Reason, detail: str) -> None:
    with pytest.raises(WireError) as caught:
        check_open(open_message(**changes), SERVED)
    assert_refused(caught, code, reason, detail)


@given(st.lists(st.integers(-40, 60), max_size=6))
def test_taps_pass_exactly_when_each_names_a_layer_once(taps: list[int]) -> None:
    good = bool(taps) and len(set(taps)) == len(taps) and all(0 <= tap < 30 for tap in taps)
    try:
        assert check_taps(taps, SERVED) == tuple(taps)
        passed = True
    except WireError:
        passed = False
    assert passed == good


@pytest.mark.parametrize("lengths", [[1], [2048], [2048, 2048], [1] * 4096])
def test_batch_at_the_edge_of_what_is_allowed(lengths: list[int]) -> None:
    assert check_batch_request(request(lengths), SERVED) == sum(lengths)


def test_batch_with_the_first_and_the_last_token_id() -> None:
    assert check_batch_request(request([2], [0, 49_151]), SERVED) == 2


@pytest.mark.parametrize(
    ("message", "code", "reason", "detail"),
    [
        (request([1], request_id=-1), Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, "request_id -1"),
        (request([1], request_id=5), Code.ALREADY_EXISTS, Reason.REQUEST_DUPLICATE, "request_id 5: already"),
        (request([]), Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, "sequence_lengths []"),
        (request([3, 0, 2]), Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, "sequence_lengths 0"),
        (request([3, -1], [7, 7]), Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, "sequence_lengths -1"),
        (request([2049], []), Code.INVALID_ARGUMENT, Reason.SEQUENCE_TOO_LONG, "at most 2048 tokens"),
        (request([2048, 2048, 1], []), Code.INVALID_ARGUMENT, Reason.BATCH_TOO_LARGE, "add up to 4097 tokens: at most"),
        (request([2, 2], [7] * 3), Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, "token_ids has 3 ids"),
        (request([2, 2], [7] * 5), Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, "sequence_lengths add up to 4"),
        (request([2], []), Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, "token_ids has 0 ids"),
        (request([2], [7, 49_152]), Code.INVALID_ARGUMENT, Reason.TOKEN_OUT_OF_RANGE, "token_ids 49152"),
        (request([2], [-1, 7]), Code.INVALID_ARGUMENT, Reason.TOKEN_OUT_OF_RANGE, "token_ids -1"),
    ],
)
def test_batch_is_refused(message: target_pb2.BatchRequest, code: Code, reason: Reason, detail: str) -> None:
    with pytest.raises(WireError) as caught:
        check_batch_request(message, SERVED, outstanding={5})
    assert_refused(caught, code, reason, detail)


def test_batch_is_held_to_the_sessions_own_terms() -> None:
    assert check_batch_request(request([10]), SERVED, max_batch_token_count=10) == 10
    with pytest.raises(WireError) as caught:
        check_batch_request(request([11]), SERVED, max_batch_token_count=10)
    assert_refused(caught, Code.INVALID_ARGUMENT, Reason.BATCH_TOO_LARGE, "at most 10 fit one batch")


def test_sums_do_not_overflow() -> None:
    huge = replace(SERVED, max_sequence_token_count=(1 << 31) - 1)
    message = target_pb2.BatchRequest(sequence_lengths=[(1 << 31) - 1] * 3)
    with pytest.raises(WireError) as caught:
        check_batch_request(message, huge)
    assert_refused(caught, Code.INVALID_ARGUMENT, Reason.BATCH_TOO_LARGE, str(3 * ((1 << 31) - 1)))


def test_served_facts_come_from_the_fronts_description() -> None:
    description = target_pb2.DescribeTargetResponse(
        model=target_pb2.TargetModel(
            layer_count=30, hidden_size=576, vocab_size=49_152, dtype=target_pb2.DTYPE_BFLOAT16
        ),
        version=target_pb2.TargetVersion(number=3, digest=DIGEST),
        max_batch_token_count=4096,
        max_sequence_token_count=2048,
    )
    assert ServedTarget.from_description(description) == SERVED
