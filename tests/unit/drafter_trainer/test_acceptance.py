"""Acceptance length is counted one way everywhere."""

from __future__ import annotations

import pytest

from drafter_trainer.acceptance import Round, choose_block_length, expected_emitted, summarise


def test_micro_weighs_rounds_and_macro_weighs_sequences() -> None:
    found = summarise([[Round(3, 3)], [Round(3, 0), Round(3, 0), Round(3, 1)], []], block_size=4)
    assert found.micro == (4 + 4) / 4
    assert found.macro == pytest.approx((4 / 1 + 4 / 3) / 2)
    assert (found.emitted, found.rounds) == (8, 4)


def test_slots_are_conditional_on_all_before_them() -> None:
    found = summarise([[Round(3, 3), Round(3, 1), Round(3, 0), Round(3, 2)]], block_size=4)
    assert found.by_slot == (3 / 4, 2 / 3, 1 / 2)


def test_slots_behind_an_answers_end_are_neither_accepted_nor_rejected() -> None:
    # The last round emitted one draft and the bonus; nothing is known of slots 2 and 3.
    found = summarise([[Round(1, 1)]], block_size=4)
    assert found.by_slot == (1.0, None, None)
    assert found.micro == 2.0


def test_nothing_decoded_is_zero_and_unknown() -> None:
    found = summarise([], block_size=3)
    assert (found.micro, found.macro, found.by_slot) == (0.0, 0.0, (None, None))


def test_expected_tokens_of_a_round_sum_the_reach_of_slots() -> None:
    assert expected_emitted([0.5, 0.5, None], 4) == 1 + 0.5 + 0.25
    assert expected_emitted([0.5, 0.5], 1) == 1


@pytest.mark.parametrize(
    ("round_s", "by_slot", "best"),
    [
        ({1: 1.0, 4: 1.1, 8: 1.2}, [0.9] * 7, 8),  # long blocks are almost free and right
        ({1: 1.0, 4: 1.1, 8: 1.9}, [0.6, 0.4, 0.2, 0.1, 0.1, 0.1, 0.1], 4),  # rows cost
        ({1: 1.0, 4: 1.9, 8: 2.5}, [0.3] * 7, 1),  # drafting does not pay
        ({4: 1.0, 2: 1.0}, [0.5, 0.0, 0.0], 2),  # equal: the shorter
    ],
)
def test_block_length_maximises_expected_speed(round_s: dict[int, float], by_slot: list[float], best: int) -> None:
    length, speed = choose_block_length(round_s, by_slot)
    assert length == best
    assert speed == expected_emitted(by_slot, best) / round_s[best]


def test_no_block_length_to_choose_from_is_refused() -> None:
    with pytest.raises(ValueError, match="no block length"):
        choose_block_length({}, [0.5])
