"""The book of outstanding requests; rules are numbered in drafter_trainer/client/book.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_trainer.client.book import ExhaustedError, Request, RequestBook
from drafter_trainer.client.terms import Patience

PATIENCE = Patience(max_attempts=3, backoff_initial_s=1.0, backoff_max_s=3.0)


def request(sequence: int, *, size: int = 10) -> Request:
    return Request(sequence=sequence, position=100 + sequence, slot=0, lengths=(1,), token_ids=b"", payload_bytes=size)


def book_with(count: int, *, depth: int = 4, size: int = 10) -> RequestBook:
    # This rank's own order is a, then b.
    book = RequestBook(PATIENCE, depth=depth, rank_name="r")
    for sequence in range(count):
        book.add(request(sequence, size=size))
    return book


def chosen(book: RequestBook, replicas: list[str], *, now_s: float = 0.0) -> list[tuple[int, str]]:
    """Everything that can be sent now."""
    pairs = []
    while (choice := book.choose(replicas, now_s=now_s)) is not None:
        pairs.append((choice[0].sequence, choice[1]))
    return pairs


def test_requests_go_out_in_plan_order_to_the_least_loaded_replica() -> None:  # rules 1, 2
    assert chosen(book_with(5), ["a", "b"]) == [(0, "a"), (1, "b"), (2, "a"), (3, "b"), (4, "a")]


def test_replicas_of_equal_load_take_turns() -> None:  # rule 2
    """Answered at once, so that no load tells them apart: still each one is asked before any is asked again."""
    book = book_with(6)
    asked = []
    for _ in range(6):
        taken, replica = book.choose(["a", "b", "c"], now_s=0.0) or pytest.fail("nothing chosen")
        book.complete(taken)
        asked.append(replica)
    assert sorted(asked[:3]) == ["a", "b", "c"]
    assert asked[3:] == asked[:3]


def test_ranks_begin_with_different_replicas() -> None:  # rule 2
    """24 ranks, 8 requests each, 64 replicas: ranks that all began with the first would leave 56 replicas idle."""
    replicas = [f"host:{port}" for port in range(64)]
    counts = dict.fromkeys(replicas, 0)
    for rank in range(24):
        book = RequestBook(PATIENCE, depth=4, rank_name=f"run/rank-{rank}")
        for sequence in range(8):
            book.add(request(sequence))
        for _, replica in chosen(book, replicas):
            counts[replica] += 1
    assert sum(counts.values()) == 192
    assert sum(count == 0 for count in counts.values()) <= 10
    assert max(counts.values()) <= 10


def test_a_replica_gets_no_more_than_its_depth() -> None:  # rule 2
    book = book_with(5, depth=2)
    assert len(chosen(book, ["a"])) == 2
    book.check_integrity()


def test_nothing_is_chosen_without_a_replica() -> None:
    assert book_with(2).choose([], now_s=0.0) is None


def test_a_request_that_waits_does_not_hold_up_the_next() -> None:  # rules 1, 3
    book = book_with(2, depth=1)
    first, holder = book.choose(["a"], now_s=0.0) or pytest.fail("nothing chosen")
    assert holder == "a"
    book.fail(first, "broken", now_s=0.0)
    assert chosen(book, ["a"], now_s=0.5) == [(1, "a")]
    assert book.wait_s(now_s=0.5) == 0.5
    assert first.reasons == ["a: broken"]


def test_a_failed_request_goes_to_another_replica_while_there_is_one() -> None:  # rule 2
    book = book_with(1)
    first, _ = book.choose(["a", "b"], now_s=0.0) or pytest.fail("nothing chosen")
    book.fail(first, "broken", now_s=0.0)
    assert chosen(book, ["a", "b"], now_s=10.0) == [(0, "b")]
    book.fail(first, "broken", now_s=10.0)
    assert chosen(book, ["b"], now_s=20.0) == [(0, "b")]


def test_a_request_that_waits_for_a_place_waits_for_no_back_off() -> None:
    """Nothing will change by itself: whoever asks may sleep until an answer comes."""
    book = book_with(3, depth=1)
    chosen(book, ["a"], now_s=5.0)
    assert book.wait_s(now_s=5.0) is None


def test_waits_double_up_to_the_longest() -> None:  # rule 3
    assert [PATIENCE.backoff_s(attempts) for attempts in (1, 2, 3, 9)] == [1.0, 2.0, 3.0, 3.0]


def test_the_last_attempt_ends_the_run_with_every_reason() -> None:  # rule 3
    book = book_with(1)
    for attempt in range(2):
        first, _ = book.choose(["a"], now_s=100.0 * attempt) or pytest.fail("nothing chosen")
        book.fail(first, f"reason {attempt}", now_s=100.0 * attempt)
    book.choose(["a"], now_s=1000.0)
    with pytest.raises(ExhaustedError) as caught:
        book.fail(first, "reason 2", now_s=1000.0)
    assert caught.value.request.reasons == ["a: reason 0", "a: reason 1", "a: reason 2"]


def test_losing_a_replica_fails_what_it_held_and_nothing_else() -> None:  # rule 4
    book = book_with(4)
    chosen(book, ["a", "b"])
    assert book.lose("a", "gone", now_s=0.0) == 2
    assert book.held_by("a") == []
    assert [r.sequence for r in book.held_by("b")] == [1, 3]


def test_only_the_holder_can_answer() -> None:
    book = book_with(1)
    chosen(book, ["a"])
    assert book.find(0, holder="b") is None
    assert book.find(7, holder="a") is None
    found = book.find(0, holder="a")
    assert found is not None
    book.complete(found)
    assert len(book) == 0


@given(st.lists(st.sampled_from(["choose", "fail", "lose a", "complete"]), max_size=60))
def test_every_request_ends_exactly_once_whatever_happens(events: list[str]) -> None:  # I1
    book = RequestBook(Patience(max_attempts=1000), depth=2)
    for sequence in range(6):
        book.add(request(sequence))
    done: list[int] = []
    now_s = 0.0
    for event in [*events, *["choose", "complete"] * 12]:
        now_s += 100.0
        held = [r for name in ("a", "b") for r in book.held_by(name)]
        if event == "choose":
            chosen(book, ["a", "b"], now_s=now_s)
        elif event == "lose a":
            book.lose("a", "gone", now_s=now_s)
        elif held and event == "fail":
            book.fail(held[0], "broken", now_s=now_s)
        elif held:
            done.append(held[0].sequence)
            book.complete(held[0])
        book.check_integrity()
    assert sorted(done) == list(range(6))
