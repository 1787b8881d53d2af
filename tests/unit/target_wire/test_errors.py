from __future__ import annotations

import grpc
import pytest
from target_wire.errors import RETRYABLE, Code, FrameError, Reason, WireError

# What is wrong with a request, or with the state of things, is as wrong when sent again.
NEVER_RETRIED = {
    Reason.BAD_REQUEST,
    Reason.TAP_OUT_OF_RANGE,
    Reason.TOKEN_OUT_OF_RANGE,
    Reason.SEQUENCE_TOO_LONG,
    Reason.BATCH_TOO_LARGE,
    Reason.WINDOW_TOO_SMALL,
    Reason.PROTOCOL_MISMATCH,
    Reason.VERSION_MISMATCH,
    Reason.SWAP_REFUSED,
    Reason.CREDIT_INVALID,
    Reason.INTERNAL,
}


@pytest.mark.parametrize("code", Code)
def test_codes_are_those_of_grpc(code: Code) -> None:
    assert grpc.StatusCode[code.name].value[0] == code.value


def test_every_code_of_grpc_has_a_name() -> None:
    assert {code.name for code in Code} == {code.name for code in grpc.StatusCode}


@pytest.mark.parametrize("reason", Reason)
def test_reasons_are_their_own_names(reason: Reason) -> None:
    # google.rpc.ErrorInfo: UPPER_SNAKE_CASE, at most 63 characters.
    assert reason.value == reason.name == reason.name.upper()
    assert len(reason.value) <= 63


def test_mistakes_are_not_retried() -> None:
    assert not NEVER_RETRIED & RETRYABLE


def test_error_says_reason_and_detail() -> None:
    error = WireError(Code.INVALID_ARGUMENT, Reason.TAP_OUT_OF_RANGE, "taps 40: the target has layers 0 to 29")
    assert str(error) == "TAP_OUT_OF_RANGE: taps 40: the target has layers 0 to 29"
    assert not error.retryable


def test_a_corrupt_frame_is_asked_for_again() -> None:
    error = FrameError("crc32c 1: computed 2")
    assert isinstance(error, WireError)
    assert (error.code, error.reason, error.retryable) == (Code.DATA_LOSS, Reason.FRAME_CORRUPT, True)
