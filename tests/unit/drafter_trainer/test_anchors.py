"""Where blocks start."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drafter_trainer.anchors import draw_anchors
from drafter_trainer.types import MicroBatch
from tests.support.drafters import blocks_of, random_micro


def micro_of(masks: list[list[int]], *, sample_ids: tuple[int, ...] | None = None, epoch: int = 0) -> MicroBatch:
    mask = torch.tensor([bit for document in masks for bit in document], dtype=torch.bool)
    ids = tuple(range(len(masks))) if sample_ids is None else sample_ids
    lengths = tuple(len(document) for document in masks)
    return MicroBatch(0, epoch, ids, lengths, torch.zeros(mask.numel(), dtype=torch.int64), mask)


def test_eligible_are_tokens_supervised_with_their_successor() -> None:
    micro = micro_of([[0, 1, 1, 0, 1, 1, 1], [1, 0, 1], [1, 1]])
    anchors = draw_anchors(micro, num_anchors=99, seed=0)
    assert blocks_of(anchors.document_A, anchors.position_A) == [(0, 1), (0, 4), (0, 5), (2, 0)]
    assert anchors.index_A.tolist() == [1, 4, 5, 10]


def test_a_documents_last_token_is_no_anchor_though_the_next_document_is_supervised() -> None:
    assert draw_anchors(micro_of([[0, 0, 1], [1, 0]]), num_anchors=9, seed=0).index_A.numel() == 0


def test_supervision_only_at_the_very_end_is_used() -> None:  # cases 3, 4
    anchors = draw_anchors(micro_of([[0] * 40 + [1, 1, 1]]), num_anchors=9, seed=0)
    assert anchors.position_A.tolist() == [40, 41]


def test_no_eligible_token_gives_no_anchor_and_no_error() -> None:  # cases 1, 2
    assert len(draw_anchors(micro_of([[0, 0], [1], [1, 0, 1]]), num_anchors=9, seed=0)) == 0


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 12), st.integers(0, 2**63 - 1))
def test_anchors_are_sorted_unique_limited_and_eligible(lengths: list[int], count: int, seed: int) -> None:
    micro = random_micro(tuple(lengths))
    anchors = draw_anchors(micro, num_anchors=count, seed=seed)
    blocks = blocks_of(anchors.document_A, anchors.position_A)
    assert blocks == sorted(set(blocks))
    start = torch.tensor([0, *lengths]).cumsum(0)
    assert torch.equal(anchors.index_A, start[anchors.document_A] + anchors.position_A)
    for document, length in enumerate(lengths):
        mask: Tensor = micro.loss_mask_T[start[document] : start[document + 1]]
        eligible = [p for p in range(length - 1) if mask[p] and mask[p + 1]]
        drawn = [p for d, p in blocks if d == document]
        assert set(drawn) <= set(eligible)
        assert len(drawn) == min(count, len(eligible))


def test_anchors_do_not_depend_on_what_a_document_is_packed_with() -> None:
    documents = {3: [1] * 30, 8: [1] * 50, 5: [1] * 20}
    together = draw_anchors(micro_of(list(documents.values()), sample_ids=tuple(documents)), num_anchors=7, seed=4)
    for number, (sample, mask) in enumerate(documents.items()):
        alone = draw_anchors(micro_of([mask], sample_ids=(sample,)), num_anchors=7, seed=4)
        assert torch.equal(alone.position_A, together.position_A[together.document_A == number])


def test_anchors_change_with_seed_epoch_and_sample() -> None:
    def draw(sample: int, epoch: int, seed: int) -> list[int]:
        micro = micro_of([[1] * 200], sample_ids=(sample,), epoch=epoch)
        return draw_anchors(micro, num_anchors=20, seed=seed).position_A.tolist()

    draws = [draw(1, 0, 0), draw(2, 0, 0), draw(1, 1, 0), draw(1, 0, 1)]
    assert len({tuple(d) for d in draws}) == 4


def test_anchors_are_uniform_over_eligible_tokens() -> None:
    counts = torch.zeros(11)
    for epoch in range(600):
        counts[draw_anchors(micro_of([[1] * 11], epoch=epoch), num_anchors=4, seed=0).position_A] += 1
    assert counts[10] == 0
    assert ((counts[:10] - 240).abs() < 5 * (240 * 0.6) ** 0.5).all()


def test_draws_are_the_same_on_every_machine_and_version() -> None:
    """A golden draw: changing it silently changes what a resumed run trains on."""
    anchors = draw_anchors(micro_of([[1] * 100], sample_ids=(12345,), epoch=2), num_anchors=6, seed=77)
    assert anchors.position_A.tolist() == [51, 58, 70, 81, 82, 87]
