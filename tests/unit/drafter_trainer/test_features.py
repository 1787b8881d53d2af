"""What of a received row is context, and what only distillation reads."""

from __future__ import annotations

import torch

from drafter_trainer.features import FeatureLayout

ROWS_TW = torch.arange(2 * 9).view(2, 9)


def test_without_distillation_a_row_is_the_context() -> None:
    layout = FeatureLayout((4, 1, 7), 3)
    assert (layout.taps, layout.width) == ((4, 1, 7), 9)
    context_TC, last_TD = layout.split(ROWS_TW)
    assert torch.equal(context_TC, ROWS_TW)
    assert last_TD is None


def test_the_last_block_is_one_more_tap_that_is_no_context() -> None:
    layout = FeatureLayout((4, 1), 3, last_block=9)
    assert (layout.taps, layout.width) == ((4, 1, 9), 9)
    context_TC, last_TD = layout.split(ROWS_TW)
    assert context_TC.tolist() == [[0, 1, 2, 3, 4, 5], [9, 10, 11, 12, 13, 14]]
    assert last_TD is not None
    assert last_TD.tolist() == [[6, 7, 8], [15, 16, 17]]


def test_a_last_block_that_the_drafter_taps_anyway_is_asked_for_once() -> None:
    layout = FeatureLayout((4, 9, 1), 3, last_block=9)
    assert layout.taps == (4, 9, 1)
    context_TC, last_TD = layout.split(ROWS_TW)
    assert torch.equal(context_TC, ROWS_TW)
    assert last_TD is not None
    assert last_TD.tolist() == [[3, 4, 5], [12, 13, 14]]
