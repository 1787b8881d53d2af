"""framing.py against the generated class: the same bytes out, the same values in, the same refusals."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from target_wire.errors import Code, FrameError, Reason
from target_wire.framing import BatchFrameView, decode_response, encode_batch_frame
from target_wire.v1 import target_pb2

INT64_MAX = (1 << 63) - 1
EDGES = [0, 1, 127, 128, 16_383, 16_384, (1 << 31) - 1, 1 << 31, (1 << 63) - 1]
INT64 = st.sampled_from(EDGES) | st.integers(0, INT64_MAX)
CRC = st.sampled_from([0, 1, 0xFFFFFFFF]) | st.integers(0, 0xFFFFFFFF)
# Lengths around each step of the varint, of the body and of the message around it.
BODY = st.sampled_from([b"", b"\0", b"x" * 125, b"x" * 127, b"x" * 128, b"y" * 16_383, b"y" * 16_384]) | st.binary(
    max_size=200
)


def message_of(request_id: int, offset_bytes: int, crc32c: int, body: bytes) -> target_pb2.StreamHiddenStatesResponse:
    return target_pb2.StreamHiddenStatesResponse(
        batch_frame=target_pb2.BatchFrame(request_id=request_id, offset_bytes=offset_bytes, crc32c=crc32c, body=body)
    )


def varint(value: int, *, padding: int = 0) -> bytes:
    """A varint, with `padding` superfluous bytes: valid, and made by no sensible writer."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    for _ in range(padding):
        out[-1] |= 0x80
        out.append(0)
    return bytes(out)


def field(number: int, wire_type: int, value: bytes) -> bytes:
    return varint(number << 3 | wire_type) + value


def delimited(number: int, value: bytes) -> bytes:
    return field(number, 2, varint(len(value)) + value)


def assert_judged_as_protobuf_does(data: bytes) -> None:
    """Decoding gives what the generated class gives, be it a value or a refusal."""
    try:
        message = target_pb2.StreamHiddenStatesResponse.FromString(data)
    except DecodeError:
        with pytest.raises(FrameError):
            decode_response(data)
        return
    decoded = decode_response(data)
    if message.WhichOneof("message") == "batch_frame":
        frame = message.batch_frame
        assert isinstance(decoded, BatchFrameView)
        assert decoded.request_id == frame.request_id
        assert decoded.offset_bytes == frame.offset_bytes
        assert decoded.crc32c == frame.crc32c
        assert bytes(decoded.body) == frame.body
    else:
        assert decoded == message


@given(INT64, INT64, CRC, BODY)
def test_encode_makes_the_bytes_of_the_generated_class(request_id: int, offset: int, crc: int, body: bytes) -> None:
    made = encode_batch_frame(request_id, offset, crc, memoryview(body))
    assert type(made) is bytes
    assert made == message_of(request_id, offset, crc, body).SerializeToString()


@pytest.mark.parametrize("present", range(16))
def test_encode_leaves_out_what_is_zero(present: int) -> None:
    values = [value if present >> i & 1 else type(value)() for i, value in enumerate((300, 70_000, 9, b"body"))]
    request_id, offset, crc, body = values
    made = encode_batch_frame(request_id, offset, crc, memoryview(body))
    assert made == message_of(request_id, offset, crc, body).SerializeToString()
    assert_judged_as_protobuf_does(made)


@given(INT64, INT64, CRC, BODY)
def test_decode_returns_what_was_encoded(request_id: int, offset: int, crc: int, body: bytes) -> None:
    view = decode_response(encode_batch_frame(request_id, offset, crc, memoryview(body)))
    assert view == BatchFrameView(request_id, offset, crc, memoryview(body))


def test_a_frame_of_two_mebibytes_is_read_without_a_copy() -> None:
    body = bytes(range(256)) * (8 << 10)
    data = encode_batch_frame(3, 2 << 20, 0xDEADBEEF, memoryview(body))
    view = decode_response(data)
    assert isinstance(view, BatchFrameView)
    assert view.body.obj is data
    assert view.body == body


@st.composite
def unusual_frames(draw: st.DrawFn) -> bytes:
    """Valid spellings of frames: any order, repeats, unknown fields, padded varints, signs, other messages around."""
    parts = st.one_of(
        st.builds(lambda value, pad: field(1, 0, varint(value, padding=pad)), INT64, st.integers(0, 1)),
        st.builds(lambda value: field(1, 0, varint(value % (1 << 64))), st.integers(-(1 << 63), -1)),
        st.builds(lambda value: field(2, 0, varint(value)), INT64),
        st.builds(lambda value: field(3, 5, value.to_bytes(4, "little")), CRC),
        st.builds(lambda value: delimited(16, value), st.binary(max_size=20)),
        st.builds(delimited, st.integers(4, 3000), st.binary(max_size=9)),
        st.builds(lambda number, value: field(number, 0, varint(value)), st.integers(17, 3000), INT64),
        st.builds(lambda value: field(1, 5, value), st.binary(min_size=4, max_size=4)),
    )
    inner = b"".join(draw(st.lists(parts, max_size=6)))
    around = st.sampled_from(
        [b"", delimited(4, b"\x08\x05"), delimited(1, b"\x08\x02"), delimited(9, b"future"), field(7, 0, b"\x01")]
    )
    return draw(around) + delimited(4, inner) + draw(around)


@given(unusual_frames())
@example(delimited(4, field(1, 0, varint(1, padding=9))))  # a varint of ten bytes
@example(b"\x22" + varint(2, padding=4) + b"\x08\x05")  # a length of five
@example(b"\x22" + varint(2, padding=5) + b"\x08\x05")  # and of six
@example(delimited(4, b"\x82\x01" + varint(1, padding=5) + b"x"))
@example(delimited(4, b"\x82\x81\x00\x01x"))  # the body's tag in three bytes
@example(delimited(4, b"\x82\x02\x01x"))  # field 32
@example(b"")
def test_decode_of_unusual_spellings_is_protobufs(data: bytes) -> None:
    assert_judged_as_protobuf_does(data)


@given(INT64, INT64, CRC, st.binary(max_size=40), st.data())
def test_decode_of_a_truncated_frame_is_protobufs(
    request_id: int, offset: int, crc: int, body: bytes, data: st.DataObject
) -> None:
    whole = encode_batch_frame(request_id, offset, crc, memoryview(body))
    for length in range(len(whole)):
        assert_judged_as_protobuf_does(whole[:length])
    position = data.draw(st.integers(0, len(whole) - 1))
    assert_judged_as_protobuf_does(whole[:position] + data.draw(st.binary(min_size=1, max_size=3)) + whole[position:])


@given(st.binary(max_size=40) | st.builds(lambda inner: delimited(4, inner), st.binary(max_size=40)))
def test_decode_of_noise_is_protobufs(data: bytes) -> None:
    assert_judged_as_protobuf_does(data)


def test_a_frame_cut_short_is_a_retryable_data_loss() -> None:
    whole = encode_batch_frame(1, 2, 3, memoryview(b"body"))
    with pytest.raises(FrameError, match=rf"message of {len(whole) - 1} bytes is cut short") as caught:
        decode_response(whole[:-1])
    assert (caught.value.code, caught.value.reason) == (Code.DATA_LOSS, Reason.FRAME_CORRUPT)
    assert caught.value.retryable


@pytest.mark.parametrize(("request_id", "offset"), [(-1, 0), (0, -1), (1 << 63, 0), (0, 1 << 63)])
def test_encode_refuses_what_int64_does_not_hold(request_id: int, offset: int) -> None:
    with pytest.raises(ValueError, match=r"both must be in \[0, 2\*\*63 - 1\]"):
        encode_batch_frame(request_id, offset, 0, memoryview(b""))
