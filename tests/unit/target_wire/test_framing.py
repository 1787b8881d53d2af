"""The cutting of a batch into frames; the bytes of a frame are compared with protobuf in tests/contract."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from target_wire.framing import TARGET_FRAME_BYTES, plan_frames

MIB = 1 << 20


@given(st.integers(1, 300), st.integers(0, 200), st.integers(1, 4000))
def test_frames_partition_the_body_at_rows(row_bytes: int, rows: int, target: int) -> None:
    payload = row_bytes * rows
    frames = plan_frames(payload, row_bytes, target)
    position = 0
    for offset, size in frames:
        assert offset == position
        assert size > 0
        assert size % row_bytes == 0
        assert size <= max(target, row_bytes)
        position += size
    assert position == payload
    # As few as the target allows: every frame but the last is as full as rows make it.
    assert all(size + row_bytes > target for _, size in frames[:-1])


@given(st.integers(1, 2 * MIB), st.integers(1, 20))
def test_frames_are_one_to_four_mib_as_the_contract_says(row_bytes: int, megabytes: int) -> None:
    rows = max(1, megabytes * MIB // row_bytes)
    frames = plan_frames(rows * row_bytes, row_bytes)
    assert all(MIB <= size <= 4 * MIB for _, size in frames[:-1])
    assert frames[-1][1] <= 4 * MIB


def test_a_row_longer_than_a_frame_is_one_frame() -> None:
    row = TARGET_FRAME_BYTES + 2
    assert plan_frames(2 * row, row) == [(0, row), (row, row)]


def test_an_empty_body_has_no_frame() -> None:
    assert plan_frames(0, 8) == []


@pytest.mark.parametrize(("payload", "row"), [(7, 2), (1, 2), (-2, 2), (8, 0), (8, -1)])
def test_a_body_of_broken_rows_is_refused(payload: int, row: int) -> None:
    with pytest.raises(ValueError, match=f"payload_bytes {payload}: give a whole number of rows"):
        plan_frames(payload, row)
