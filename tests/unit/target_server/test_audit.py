"""The checksum and which batches it is taken of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from target_server.audit import AuditPolicy, checksum


@given(words=st.integers(1, 5000), position=st.integers(0, 8 * 5000 - 1), flip=st.integers(1, 255))
def test_any_changed_byte_changes_the_checksum(words: int, position: int, flip: int) -> None:
    memory = torch.randint(0, 256, (8 * words,), dtype=torch.uint8)
    before = int(checksum(memory))
    memory[position % (8 * words)] ^= flip
    assert int(checksum(memory)) != before


@pytest.mark.parametrize("rows", [2, 7])
def test_blocks_in_another_order_change_the_checksum(rows: int) -> None:
    memory = torch.randint(0, 256, (rows, 8192), dtype=torch.uint8)
    assert int(checksum(memory.flatten())) != int(checksum(memory.flip(0).flatten()))


def test_memory_of_any_size_has_a_checksum() -> None:
    for words in (1, 1023, 1024, 1025):
        assert int(checksum(torch.zeros(8 * words, dtype=torch.uint8))) == 0
        assert int(checksum(torch.ones(8 * words, dtype=torch.uint8))) != 0


@pytest.mark.parametrize(("mode", "taken"), [("off", 0), ("sampled", 4), ("always", 50)])
def test_policy_takes_none_a_part_or_all(mode: str, taken: int) -> None:
    policy = AuditPolicy(mode)  # type: ignore[arg-type]
    assert sum(policy.takes_next() for _ in range(50)) == taken
