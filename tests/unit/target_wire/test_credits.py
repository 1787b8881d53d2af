"""I2: bytes in flight never exceed the credit granted, and a session that keeps the rules never deadlocks."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from target_wire.credits import CreditGrants, CreditLedger
from target_wire.errors import Code, Reason, WireError


class Session:
    """Both ends of one session and the wires between them, one step at a time.

    The trainer asks for a batch when the window has room for it; the server reserves in the order of the requests, may
    answer what it reserved in any order, and may fail some. Every step that is possible may happen next.
    """

    def __init__(self, window_bytes: int, batches: list[int], chance: random.Random) -> None:
        self.window_bytes = window_bytes
        self.batches = batches
        self.chance = chance
        self.ledger = CreditLedger(window_bytes)
        self.grants = CreditGrants()
        self.upstream: list[tuple[str, int]] = []  # grants and requests, on their way to the server in order
        self.queued: list[int] = []  # indices of batches at the server
        self.reserved: list[int] = []
        self.downstream: list[tuple[str, int]] = []  # answers on their way to the trainer
        self.held: list[int] = []  # received and not yet consumed
        self.asked = self.answered = 0

    def run(self) -> None:
        while self.answered < len(self.batches) or self.held:
            steps = self.possible_steps()
            assert steps, f"deadlock after {self.answered} answers: {self.ledger.snapshot()} {self.grants.snapshot()}"
            self.chance.choice(steps)()
            self.ledger.check_integrity()
            self.grants.check_integrity()
            assert self.bytes_in_memory() <= self.window_bytes

    def bytes_in_memory(self) -> int:
        """What the trainer's memory holds or is reserved for."""
        return self.grants.owed_bytes + sum(self.batches[index] for index in self.held)

    def possible_steps(self) -> list:
        steps = []
        if self.asked < len(self.batches) and self.bytes_in_memory() + self.batches[self.asked] <= self.window_bytes:
            steps.append(self.ask)
        if self.upstream:
            steps.append(self.deliver_up)
        if self.queued and self.ledger.available_bytes >= self.batches[self.queued[0]]:
            steps.append(self.reserve)
        if self.reserved:
            steps += [self.send, self.fail]
        if self.downstream:
            steps.append(self.deliver_down)
        if self.held:
            steps.append(self.consume)
        return steps

    def ask(self) -> None:
        self.upstream.append(("grant", self.grants.request(self.batches[self.asked])))
        self.upstream.append(("request", self.asked))
        self.asked += 1

    def deliver_up(self) -> None:
        kind, value = self.upstream.pop(0)
        if kind == "grant":
            self.ledger.grant(value)
        else:
            self.queued.append(value)

    def reserve(self) -> None:
        assert self.ledger.reserve(self.batches[self.queued[0]])
        self.reserved.append(self.queued.pop(0))

    def send(self) -> None:
        index = self.reserved.pop(self.chance.randrange(len(self.reserved)))
        self.ledger.spend(self.batches[index])
        self.downstream.append(("batch", index))

    def fail(self) -> None:
        index = self.reserved.pop(self.chance.randrange(len(self.reserved)))
        self.ledger.release(self.batches[index])
        self.downstream.append(("failed", index))

    def deliver_down(self) -> None:
        kind, index = self.downstream.pop(0)
        self.answered += 1
        if kind == "batch":
            self.grants.receive(self.batches[index])
            self.held.append(index)
        else:
            self.grants.forgive(self.batches[index])

    def consume(self) -> None:
        self.held.pop(self.chance.randrange(len(self.held)))


@st.composite
def sessions(draw: st.DrawFn) -> tuple[int, list[int]]:
    window = draw(st.integers(1, 1000))
    return window, draw(st.lists(st.integers(1, window), min_size=1, max_size=30))


@given(sessions(), st.integers(0, 1 << 32))
@example((100, [10, 95]), 0)
@example((1, [1, 1, 1]), 0)
@example((7, [7] * 10), 0)
def test_no_grant_goes_too_far_and_no_session_deadlocks(session: tuple[int, list[int]], seed: int) -> None:
    window, batches = session
    ends = Session(window, batches, random.Random(seed))
    ends.run()
    assert ends.grants.owed_bytes == 0
    assert ends.ledger.snapshot()["spent_bytes"] == ends.grants.snapshot()["received_bytes"]


def test_what_a_failed_request_was_granted_is_used_up_by_the_next() -> None:
    grants = CreditGrants()
    assert grants.request(60) == 60
    grants.forgive(60)
    assert grants.request(50) == 60
    grants.receive(50)
    assert grants.request(20) == 70


def test_grant_repeated_does_no_harm() -> None:
    ledger = CreditLedger(100)
    ledger.grant(80)
    ledger.grant(80)
    assert ledger.available_bytes == 80


@pytest.mark.parametrize(
    ("granted", "detail"),
    [
        (59, "granted_bytes 59 is less than the 60 granted before"),
        (-1, "granted_bytes -1 is less than the 60 granted before"),
        (111, "granted_bytes 111 is more than window_bytes 100 ahead of the 10 bytes sent; grant at most 110"),
    ],
)
def test_grant_that_goes_back_or_too_far_is_refused_and_changes_nothing(granted: int, detail: str) -> None:
    ledger = CreditLedger(100)
    ledger.grant(60)
    assert ledger.reserve(10)
    ledger.spend(10)
    before = ledger.snapshot()
    with pytest.raises(WireError, match=detail) as caught:
        ledger.grant(granted)
    assert (caught.value.code, caught.value.reason) == (Code.FAILED_PRECONDITION, Reason.CREDIT_INVALID)
    assert not caught.value.retryable
    assert ledger.snapshot() == before


def test_reserve_beyond_the_credit_is_atomic() -> None:
    ledger = CreditLedger(100)
    ledger.grant(50)
    assert not ledger.reserve(51)
    assert ledger.available_bytes == 50
    assert ledger.reserve(50)
    assert not ledger.reserve(1)


def test_released_credit_can_be_reserved_again() -> None:
    ledger = CreditLedger(100)
    ledger.grant(100)
    assert ledger.reserve(100)
    ledger.release(100)
    assert ledger.reserve(100)
    ledger.check_integrity()


def test_frames_of_a_batch_are_spent_one_by_one() -> None:
    ledger = CreditLedger(100)
    ledger.grant(100)
    assert ledger.reserve(30)
    ledger.spend(20)
    ledger.spend(10)
    with pytest.raises(ValueError, match="only 0 bytes are reserved"):
        ledger.spend(1)


def test_bytes_that_nobody_asked_for_are_a_broken_protocol() -> None:
    grants = CreditGrants()
    grants.request(100)
    grants.receive(60)
    with pytest.raises(WireError, match="the server sent 41 bytes where 40 are owed") as caught:
        grants.receive(41)
    assert caught.value.reason is Reason.CREDIT_INVALID
    assert grants.owed_bytes == 40


def test_no_more_is_forgiven_than_is_owed() -> None:
    grants = CreditGrants()
    grants.request(5)
    with pytest.raises(ValueError, match="only 5 bytes are owed"):
        grants.forgive(6)


@pytest.mark.parametrize("window", [0, -1])
def test_window_without_room_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match=f"window_bytes {window}: give at least 1"):
        CreditLedger(window)


def test_negative_amounts_are_refused() -> None:
    ledger, grants = CreditLedger(10), CreditGrants()
    for change in (ledger.reserve, ledger.spend, ledger.release, grants.request, grants.receive, grants.forgive):
        with pytest.raises(ValueError, match="payload_bytes -1: give at least 0"):
            change(-1)
