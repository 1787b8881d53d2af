"""Padding and the division of a batch into forwards."""

from __future__ import annotations

from array import array

import torch
from hypothesis import given
from hypothesis import strategies as st

from target_server.packing import pad_part, plan_parts

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=20)


@given(LENGTHS, st.integers(1, 400))
def test_parts_cover_every_row_once_and_keep_the_limit(lengths: list[int], limit: int) -> None:
    parts = plan_parts(lengths, limit)
    rows = sorted(
        row
        for part in parts
        for start, length in zip(part.starts, part.lengths, strict=True)
        for row in range(start, start + length)
    )
    assert rows == list(range(sum(lengths)))
    for part in parts:
        assert part.padded_token_count <= limit or len(part.lengths) == 1


def test_a_batch_that_fits_is_one_forward_in_its_own_order() -> None:
    (part,) = plan_parts([3, 9, 2], 27)
    assert part.lengths == (3, 9, 2)
    assert part.starts == (0, 3, 12)


@given(LENGTHS)
def test_padding_is_on_the_right_and_masked(lengths: list[int]) -> None:
    ids = array("i", range(1, sum(lengths) + 1))
    (part,) = plan_parts(lengths, 1 << 30)
    ids_BS, mask_BS = pad_part(ids, part)
    assert torch.equal(mask_BS.sum(1), torch.tensor(lengths))
    assert torch.equal(ids_BS[mask_BS.bool()], torch.arange(1, sum(lengths) + 1))
    assert (mask_BS.diff(dim=1) <= 0).all()
