"""I2: bytes in flight never exceed the credit granted, and a session that keeps the rules never deadlocks."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from target_wire.credits import CreditLedger, CreditWindow
from target_wire.errors import Code, Reason, WireError


class Session:
    """Both ends of one session and the wires between them, one step at a time.

    The server reserves in the order of the requests and may send what it reserved in any order; the trainer consumes
    in the order of its requests. Every step that is possible may happen next.
    """

    def __init__(self, window_bytes: int, batches: list[int], chance: random.Random) -> None:
        self.batches = batches
        self.chance = chance
        self.ledger = CreditLedger(window_bytes)
        self.window = CreditWindow(window_bytes)
        self.grants = [self.window.open()]  # on their way to the server
        self.reserved: list[int] = []  # indices of batches
        self.sent: list[int] = []  # on their way to the trainer
        self.received: set[int] = set()
        self.next_reserved = self.next_consumed = 0
        self.most_held = 0

    def run(self) -> None:
        while self.next_consumed < len(self.batches):
            steps = self.possible_steps()
            assert steps, f"deadlock at batch {self.next_consumed}: {self.ledger.snapshot()} {self.window.snapshot()}"
            self.chance.choice(steps)()
            self.ledger.check_integrity()
            self.window.check_integrity()
            self.most_held = max(self.most_held, self.bytes_in_flight())

    def bytes_in_flight(self) -> int:
        return sum(self.batches[i] for i in [*self.reserved, *self.sent]) + self.window.held_bytes

    def possible_steps(self) -> list:
        steps = []
        if self.grants:
            steps.append(self.deliver_grant)
        if self.next_reserved < len(self.batches) and self.ledger.reserve(self.batches[self.next_reserved]):
            self.ledger.release(self.batches[self.next_reserved])
            steps.append(self.reserve)
        if self.reserved:
            steps.append(self.send)
        if self.sent:
            steps.append(self.deliver_batch)
        if self.next_consumed in self.received:
            steps.append(self.consume)
        return steps

    def deliver_grant(self) -> None:
        self.ledger.grant(self.grants.pop(0))

    def reserve(self) -> None:
        assert self.ledger.reserve(self.batches[self.next_reserved])
        self.reserved.append(self.next_reserved)
        self.next_reserved += 1

    def send(self) -> None:
        index = self.reserved.pop(self.chance.randrange(len(self.reserved)))
        self.ledger.spend(self.batches[index])
        self.sent.append(index)

    def deliver_batch(self) -> None:
        index = self.sent.pop(0)
        self.window.receive(self.batches[index])
        self.received.add(index)

    def consume(self) -> None:
        grant = self.window.consume(self.batches[self.next_consumed])
        self.next_consumed += 1
        if grant is not None:
            self.grants.append(grant)


@st.composite
def sessions(draw: st.DrawFn) -> tuple[int, list[int]]:
    window = draw(st.integers(1, 1000))
    return window, draw(st.lists(st.integers(1, window), min_size=1, max_size=30))


@given(sessions(), st.integers(0, 1 << 32))
@example((100, [10, 95]), 0)  # less than a quarter is owed while the next batch needs more than the rest
@example((1, [1, 1, 1]), 0)
@example((7, [7] * 10), 0)
def test_session_conserves_credit_and_never_deadlocks(session: tuple[int, list[int]], seed: int) -> None:
    window, batches = session
    ends = Session(window, batches, random.Random(seed))
    ends.run()
    assert ends.most_held <= window
    total = sum(batches)
    assert ends.ledger.snapshot()["spent_bytes"] == total
    assert ends.window.snapshot()["consumed_bytes"] == total


@given(st.integers(4, 1000), st.integers(1, 1 << 32))
def test_grants_come_in_quarters_while_batches_wait(window: int, seed: int) -> None:
    chance = random.Random(seed)
    client = CreditWindow(window)
    client.receive(client.open())
    last = client.granted_bytes
    while client.held_bytes > 1:
        grant = client.consume(chance.randint(1, client.held_bytes - 1))
        if grant is not None:
            assert (grant - last) * 4 >= window
            last = grant


def test_the_last_byte_consumed_opens_the_window_in_full() -> None:
    client = CreditWindow(100)
    client.open()
    client.receive(10)
    assert client.consume(4) is None
    assert client.consume(6) == 110


def test_consuming_nothing_grants_nothing() -> None:
    client = CreditWindow(100)
    client.open()
    assert client.consume(0) is None


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


def test_bytes_without_credit_are_a_broken_protocol() -> None:
    client = CreditWindow(100)
    client.open()
    client.receive(60)
    with pytest.raises(WireError, match="the server sent 101 bytes where 100 were granted") as caught:
        client.receive(41)
    assert caught.value.reason is Reason.CREDIT_INVALID
    assert client.held_bytes == 60


def test_only_received_bytes_can_be_consumed() -> None:
    client = CreditWindow(100)
    client.open()
    client.receive(5)
    with pytest.raises(ValueError, match="only 5 received bytes are held"):
        client.consume(6)


@pytest.mark.parametrize("end", [CreditLedger, CreditWindow])
@pytest.mark.parametrize("window", [0, -1])
def test_window_without_room_is_refused(end: type, window: int) -> None:
    with pytest.raises(ValueError, match=f"window_bytes {window}: give at least 1"):
        end(window)


def test_negative_amounts_are_refused() -> None:
    ledger, client = CreditLedger(10), CreditWindow(10)
    for change in (ledger.reserve, ledger.spend, ledger.release, client.receive, client.consume):
        with pytest.raises(ValueError, match="payload_bytes -1: give at least 0"):
            change(-1)
