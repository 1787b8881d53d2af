"""Whether a request can be answered: pure checks of `Open` and `BatchRequest` against what is served.

Every error that the contract's comments promise for these messages is raised here and nowhere else. It must do no I/O
and keep no state; it imports no torch and no grpc, so a session can check before a model is near.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from target_wire.errors import Code, Reason, WireError
from target_wire.spec import PROTOCOL_VERSION, DType, row_bytes
from target_wire.v1 import target_pb2

__all__ = ["ServedTarget", "SessionTerms", "check_batch_request", "check_open", "check_taps"]

_CLIENT_NAME_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """The facts a request is checked against.

    Attributes:
        layer_count: decoder blocks N.
        hidden_size: width of the residual stream, in elements.
        vocab_size: rows of the input embedding.
        dtype: type of the served model.
        version_number: version served now.
        version_digest: digest of its weights.
        max_batch_token_count: largest batch, in tokens.
        max_sequence_token_count: longest sequence, in tokens.
    """

    layer_count: int
    hidden_size: int
    vocab_size: int
    dtype: DType
    version_number: int
    version_digest: str
    max_batch_token_count: int
    max_sequence_token_count: int

    @classmethod
    def from_description(cls, description: target_pb2.DescribeTargetResponse) -> ServedTarget:
        """Returns the facts out of what a front answers."""
        return cls(
            layer_count=description.model.layer_count,
            hidden_size=description.model.hidden_size,
            vocab_size=description.model.vocab_size,
            dtype=DType.from_number(description.model.dtype),
            version_number=description.version.number,
            version_digest=description.version.digest,
            max_batch_token_count=description.max_batch_token_count,
            max_sequence_token_count=description.max_sequence_token_count,
        )


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What a session has agreed on.

    Attributes:
        taps: layers, in the order in which their outputs are concatenated.
        dtype: element type on the wire.
        bytes_per_token: bytes of one token's row.
        max_batch_token_count: largest batch of this session, in tokens.
        window_bytes: the most bytes of credit ever outstanding.
        client_name: who asks; may be empty.
    """

    taps: tuple[int, ...]
    dtype: DType
    bytes_per_token: int
    max_batch_token_count: int
    window_bytes: int
    client_name: str


def check_open(message: target_pb2.Open, served: ServedTarget) -> SessionTerms:
    """Checks a session's terms.

    Raises:
        WireError: PROTOCOL_MISMATCH, VERSION_MISMATCH, BAD_REQUEST, TAP_OUT_OF_RANGE, DTYPE_MISMATCH, BATCH_TOO_LARGE
            or WINDOW_TOO_SMALL, in this order.
    """
    if message.protocol_version != PROTOCOL_VERSION:
        raise WireError(
            Code.FAILED_PRECONDITION,
            Reason.PROTOCOL_MISMATCH,
            f"protocol_version {message.protocol_version}: this server speaks {PROTOCOL_VERSION}; "
            "run the same release on both ends",
        )
    _check_expected_version(message.expected_version, served)
    taps = check_taps(message.taps, served)
    dtype = _check_dtype(message.dtype, served)
    if len(message.client_name) > _CLIENT_NAME_CHARACTERS:
        raise _bad_request(
            f"client_name of {len(message.client_name)} characters: give at most {_CLIENT_NAME_CHARACTERS}"
        )
    bytes_per_token = row_bytes(tap_count=len(taps), hidden_size=served.hidden_size, dtype=dtype)
    _check_sizes(message, served, bytes_per_token)
    return SessionTerms(
        taps=taps,
        dtype=dtype,
        bytes_per_token=bytes_per_token,
        max_batch_token_count=message.max_batch_token_count,
        window_bytes=message.window_bytes,
        client_name=message.client_name,
    )


def check_taps(taps: Iterable[int], served: ServedTarget) -> tuple[int, ...]:
    """Checks the layers asked for.

    Raises:
        WireError: BAD_REQUEST (none, or one twice) or TAP_OUT_OF_RANGE.
    """
    wanted = tuple(taps)
    if not wanted:
        raise _bad_request("taps []: name at least one layer")
    if len(set(wanted)) != len(wanted):
        raise _bad_request(f"taps {list(wanted)}: name each layer once")
    for tap in wanted:
        if not 0 <= tap < served.layer_count:
            raise WireError(
                Code.INVALID_ARGUMENT,
                Reason.TAP_OUT_OF_RANGE,
                f"taps {tap}: the target has layers 0 to {served.layer_count - 1}",
            )
    return wanted


def check_batch_request(
    request: target_pb2.BatchRequest,
    served: ServedTarget,
    *,
    max_batch_token_count: int | None = None,
    outstanding: Collection[int] = (),
) -> int:
    """Checks one batch.

    Args:
        request: what is asked.
        served: what it is asked of.
        max_batch_token_count: the session's own limit, in tokens; None without a session.
        outstanding: ids of the session's requests that are not answered yet.

    Returns:
        The number of tokens.

    Raises:
        WireError: BAD_REQUEST, REQUEST_DUPLICATE, SEQUENCE_TOO_LONG, BATCH_TOO_LARGE or TOKEN_OUT_OF_RANGE.
    """
    if request.request_id < 0:
        raise _bad_request(f"request_id {request.request_id}: give at least 0")
    if request.request_id in outstanding:
        raise WireError(
            Code.ALREADY_EXISTS,
            Reason.REQUEST_DUPLICATE,
            f"request_id {request.request_id}: already outstanding; use a new one until it is answered",
        )
    token_count = _check_lengths(request.sequence_lengths, served)
    limit = served.max_batch_token_count
    if max_batch_token_count is not None:
        limit = min(limit, max_batch_token_count)
    if token_count > limit:
        raise _too_large(f"sequence_lengths add up to {token_count} tokens: at most {limit} fit one batch")
    if len(request.token_ids) != token_count:
        raise _bad_request(
            f"token_ids has {len(request.token_ids)} ids: sequence_lengths add up to {token_count}; make them equal"
        )
    _check_token_ids(request.token_ids, served)
    return token_count


def _check_expected_version(expected: target_pb2.TargetVersion, served: ServedTarget) -> None:
    if expected.number < 0:
        raise _bad_request(f"expected_version.number {expected.number}: give at least 0 (0 means any)")
    number_differs = expected.number not in (0, served.version_number)
    digest_differs = expected.digest not in ("", served.version_digest)
    if number_differs or digest_differs:
        raise WireError(
            Code.FAILED_PRECONDITION,
            Reason.VERSION_MISMATCH,
            f"expected_version {expected.number or 'any'}/{expected.digest or 'any'}: "
            f"served is {served.version_number}/{served.version_digest}; describe the target again",
        )


def _check_dtype(number: int, served: ServedTarget) -> DType:
    if number in (target_pb2.DTYPE_UNSPECIFIED, served.dtype.number):
        return served.dtype
    raise WireError(
        Code.INVALID_ARGUMENT,
        Reason.DTYPE_MISMATCH,
        f"dtype {_dtype_name(number)}: the target is served in {served.dtype}; ask for that or leave it out",
    )


def _dtype_name(number: int) -> str:
    try:
        return DType.from_number(number).value
    except ValueError:
        return str(number)


def _check_sizes(message: target_pb2.Open, served: ServedTarget, bytes_per_token: int) -> None:
    if message.max_batch_token_count < 1:
        raise _bad_request(f"max_batch_token_count {message.max_batch_token_count}: give at least 1")
    if message.max_batch_token_count > served.max_batch_token_count:
        raise _too_large(
            f"max_batch_token_count {message.max_batch_token_count}: this server takes at most "
            f"{served.max_batch_token_count} tokens a batch"
        )
    if message.window_bytes < 0:
        raise _bad_request(f"window_bytes {message.window_bytes}: give at least 1")
    largest = message.max_batch_token_count * bytes_per_token
    if message.window_bytes < largest:
        raise WireError(
            Code.INVALID_ARGUMENT,
            Reason.WINDOW_TOO_SMALL,
            f"window_bytes {message.window_bytes}: a batch of {message.max_batch_token_count} tokens is {largest} "
            f"bytes ({bytes_per_token} a token) and could never be sent; give at least {largest}",
        )


def _check_lengths(lengths: Collection[int], served: ServedTarget) -> int:
    if not lengths:
        raise _bad_request("sequence_lengths []: give at least one sequence")
    shortest, longest = min(lengths), max(lengths)
    if shortest < 1:
        raise _bad_request(f"sequence_lengths {shortest}: every sequence must have at least 1 token")
    if longest > served.max_sequence_token_count:
        raise WireError(
            Code.INVALID_ARGUMENT,
            Reason.SEQUENCE_TOO_LONG,
            f"sequence_lengths {longest}: a sequence may have at most {served.max_sequence_token_count} tokens",
        )
    return sum(lengths)


def _check_token_ids(token_ids: Collection[int], served: ServedTarget) -> None:
    lowest, highest = min(token_ids), max(token_ids)
    wrong = lowest if lowest < 0 else highest
    if not 0 <= wrong < served.vocab_size:
        raise WireError(
            Code.INVALID_ARGUMENT,
            Reason.TOKEN_OUT_OF_RANGE,
            f"token_ids {wrong}: every id must be in [0, {served.vocab_size - 1}]; is the tokenizer the target's own?",
        )


def _bad_request(detail: str) -> WireError:
    return WireError(Code.INVALID_ARGUMENT, Reason.BAD_REQUEST, detail)


def _too_large(detail: str) -> WireError:
    return WireError(Code.INVALID_ARGUMENT, Reason.BATCH_TOO_LARGE, detail)
