"""The rules of following a target; numbers are those of the module's docstring."""

from __future__ import annotations

import logging

import pytest

from drafter_trainer.errors import UserError
from drafter_trainer.following import Follower, OnChange, Span, pack_counts, unpack_counts
from drafter_trainer.types import Version

A, B, A_AGAIN, A_COPY = Version(1, "a" * 32), Version(2, "b" * 32), Version(3, "a" * 32), Version(2, "a" * 32)


def follower(on_change: OnChange = "follow", *, window: int = 4) -> Follower:
    return Follower([Span(A, 0, 0)], on_change=on_change, window=window)


@pytest.mark.parametrize("on_change", ["follow", "finish_step_then_follow", "stop"])
@pytest.mark.parametrize("counts", [{A: 2}, {A: 1, A_COPY: 1}, {A_COPY: 2}])
def test_a_step_of_the_same_weights_is_always_made(on_change: OnChange, counts: dict[Version, int]) -> None:  # rule 1
    assert follower(on_change).may_train(counts)


def test_a_step_that_mixes_weights_is_made_unless_that_is_not_wanted() -> None:  # rules 2, 3
    assert follower("follow").may_train({A: 1, B: 1})
    assert not follower("finish_step_then_follow").may_train({A: 1, B: 1})
    assert follower("finish_step_then_follow").may_train({B: 2})


@pytest.mark.parametrize("counts", [{B: 2}, {A: 1, B: 1}])
def test_stop_ends_the_run_at_other_weights_and_names_both(counts: dict[Version, int]) -> None:  # rule 4
    with pytest.raises(UserError) as caught:
        follower("stop").may_train(counts)
    message = str(caught.value)
    assert message.startswith("target.on_target_change: stop: the target has changed: target.digest was aaaa")
    assert B.digest in message
    assert "--run.allow_changed target.digest" in message


def test_a_switch_is_told_when_it_begins_and_when_all_that_was_outstanding_is_trained(
    caplog: pytest.LogCaptureFixture,
) -> None:  # rule 5
    caplog.set_level(logging.INFO)
    following = follower(window=4)
    following.trained(1, range(0, 2), {A: 2})
    assert caplog.messages == []
    following.trained(2, range(2, 4), {A: 1, B: 1})
    following.trained(3, range(4, 6), {A: 1, B: 1}, asked_again=3)  # late batches of A begin no other switch
    following.trained(4, range(6, 8), {B: 2})
    assert caplog.messages == [
        "switch from target version 1 (aaaaaaaaaaaa) to 2 (bbbbbbbbbbbb) begins with step 2",
        "switch to target version 2 (bbbbbbbbbbbb) ends with step 3: since step 2, batches trained: "
        "2 of 1 (aaaaaaaaaaaa), 2 of 2 (bbbbbbbbbbbb); asked for again: 3",
    ]
    assert following.history == (Span(A, 0, 0), Span(B, 2, 2))
    assert following.current == B


def test_a_swap_back_within_a_switch_is_another_version(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    following = follower(window=4)
    following.trained(1, range(0, 1), {B: 1})
    following.trained(2, range(1, 2), {A_AGAIN: 1})
    following.trained(3, range(2, 4), {A: 1, B: 1})  # late, both
    following.trained(4, range(4, 5), {A_AGAIN: 1})
    assert [span.version for span in following.history] == [A, B, A_AGAIN]
    assert "2 of 2 (bbbbbbbbbbbb), 2 of 3 (aaaaaaaaaaaa)" in caplog.messages[-1]


def test_servers_that_are_swapped_one_after_another_make_one_switch(caplog: pytest.LogCaptureFixture) -> None:  # rule 6
    caplog.set_level(logging.INFO)
    following = follower(window=4)
    other_number = Version(7, "b" * 32)
    for step in range(1, 41):  # the second server is swapped long after the first one
        following.trained(step, range(2 * step - 2, 2 * step), {A: 1, B: 1} if step % 3 else {A: 2})
    for step in range(41, 81):
        following.trained(step, range(2 * step - 2, 2 * step), {B: 1, other_number: 1} if step % 3 else {B: 2})
    assert [span.version for span in following.history] == [A, B, other_number]
    assert sum("begins with step" in message for message in caplog.messages) == 2
    assert "the same weights begins with step 41" in caplog.messages[2]


def test_a_version_that_comes_back_is_switched_to_when_the_current_one_is_gone() -> None:  # rule 6
    following = follower(window=4)
    following.trained(1, range(0, 2), {B: 2})
    following.trained(2, range(2, 4), {A: 2})
    assert following.current == B, "what is on its way may still be of the version before"
    following.trained(3, range(4, 6), {A: 2})
    assert following.current == A
    following.trained(4, range(6, 8), {B: 2})
    following.trained(5, range(8, 10), {A: 1, B: 1})
    assert following.current == A
    assert [(span.version, span.step) for span in following.history] == [(A, 0), (B, 1), (A, 3)]


def test_a_run_that_goes_on_takes_up_at_once_what_is_served_then() -> None:  # rule 6
    following = Follower([Span(A, 0, 0), Span(B, 3, 6)], on_change="follow", window=4)
    following.trained(5, range(8, 9), {A: 1})
    assert following.current == A


def test_a_restarted_server_that_counts_from_one_again_is_followed() -> None:  # case 106
    following = follower(window=2)
    other = Version(1, "c" * 32)
    following.trained(1, range(0, 2), {other: 2})
    following.trained(2, range(2, 4), {A: 2})  # and back again, after the switch has ended
    assert [span.version for span in following.history] == [A, other, A]


def test_history_survives_a_checkpoint() -> None:
    span = Span(B, 7, 14)
    assert Span.from_json(span.to_json()) == span


@pytest.mark.parametrize("counts", [{}, {A: 3}, {A: 1, B: 2}, {Version(2**31, "d"): 1, A: 5, B: 1}])
def test_counts_survive_the_exchange_between_ranks(counts: dict[Version, int]) -> None:
    row = pack_counts(counts, entries=3)
    assert len(row) == len(pack_counts({}, entries=3))
    assert unpack_counts(row) == counts
