"""The client with several configured servers: all are used, and each may come, go and come back at any time (I1)."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from target_wire.spec import DType

from drafter_trainer.client.delivery import Delivery
from drafter_trainer.client.receiver import set_within
from drafter_trainer.client.terms import Patience, StreamTerms
from tests.support.fake_target import HIDDEN_SIZE, Abort, Asked, FakeTarget, expected_rows

TAPS = (0, 1)
PATIENCE = Patience(
    max_attempts=6,
    backoff_initial_s=0.01,
    backoff_max_s=0.05,
    connect_timeout_s=8.0,
    stall_timeout_s=2.0,
    absence_timeout_s=20.0,
    rediscover_s=0.2,
    call_timeout_s=8.0,
)
TERMS = StreamTerms(taps=TAPS, hidden_size=HIDDEN_SIZE, dtype=DType.FLOAT32, max_batch_tokens=8, slot_count=4)
WITHIN_S = 15.0


class Reading:
    """Reads batch after batch and checks that each is the next one and whole."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._receiver_pid = delivery.receiver_pid
        self._positions = itertools.count()
        self.consumed = 0

    def until(self, condition: Callable[[], bool]) -> None:
        """Reads on until something has happened."""
        deadline_s = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < deadline_s, "waited in vain"
            self.one()

    def one(self) -> None:
        while self._delivery.free_slots:
            position = next(self._positions)
            ids = ids_of(position)
            self._delivery.submit(position=position, lengths=(len(ids),), token_ids=ids.tobytes())
        slot = self._delivery.take()
        assert slot.position == self.consumed
        assert self._delivery.receiver_pid == self._receiver_pid, "the receiver process had to be replaced"
        rows = np.frombuffer(slot.payload, dtype=np.float32).reshape(-1, len(TAPS) * HIDDEN_SIZE)
        np.testing.assert_array_equal(rows, expected_rows(ids_of(slot.position).tolist(), TAPS))
        self._delivery.release(slot)
        self.consumed += 1


def ids_of(position: int) -> np.ndarray:
    """Token ids that say which position they belong to."""
    return np.asarray([position // 300, position % 300, *range(position % 6)], dtype="<i4")


def more_asked(target: FakeTarget) -> Callable[[], bool]:
    """Whether a server has been asked for more since now."""
    before = len(target.asked)
    return lambda: len(target.asked) > before + 3


@pytest.fixture
def unused_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def silent_address() -> Iterator[str]:
    """A server that takes connections and never says a word, as a machine that hangs does."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def delivery_from(*addresses: str) -> Delivery:
    return Delivery(addresses, terms=TERMS, patience=PATIENCE)


def test_replicas_of_all_servers_are_used() -> None:
    with (
        FakeTarget(replicas=2) as one,
        FakeTarget() as other,
        delivery_from(one.address, other.address) as delivery,
    ):
        Reading(delivery).until(lambda: {asked.replica for asked in one.asked} == {0, 1} and bool(other.asked))
    assert one.errors == other.errors == []


def test_a_server_that_is_added_later_is_used(unused_port: int) -> None:
    with FakeTarget() as first, delivery_from(f"127.0.0.1:{unused_port}", first.address) as delivery:
        reading = Reading(delivery)
        reading.until(more_asked(first))
        with FakeTarget(port=unused_port) as added:
            reading.until(more_asked(added))


def test_a_server_that_is_removed_is_missed_by_nobody() -> None:
    with FakeTarget() as stays:
        with FakeTarget(replicas=2) as leaves, delivery_from(leaves.address, stays.address) as delivery:
            reading = Reading(delivery)
            reading.until(lambda: bool(leaves.asked))
            leaves.stop()
            end = reading.consumed + 50
            reading.until(lambda: reading.consumed == end)
        assert stays.errors == []


def test_a_server_that_returns_on_its_port_is_used_again_also_when_all_were_gone(unused_port: int) -> None:
    with FakeTarget() as other, delivery_from(f"127.0.0.1:{unused_port}", other.address) as delivery:
        reading = Reading(delivery)
        for _ in range(2):
            with FakeTarget(port=unused_port) as returning:
                reading.until(more_asked(returning))
        reading.until(more_asked(other))
        other.stop()
        with FakeTarget(port=unused_port) as alone:
            reading.until(more_asked(alone))


def test_a_silent_server_delays_no_other(silent_address: str) -> None:  # I7
    with FakeTarget() as answers, delivery_from(silent_address, answers.address) as delivery:
        started_s = time.monotonic()
        reading = Reading(delivery)
        reading.until(lambda: reading.consumed > 20)
        assert time.monotonic() - started_s < PATIENCE.call_timeout_s


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancellation_that_meets_the_awaited_event_is_not_lost(turns: int) -> None:  # I7
    event = asyncio.Event()
    waiting = asyncio.create_task(set_within(event, 10.0))
    await asyncio.sleep(0.01)
    event.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    was_done = waiting.done()
    waiting.cancel()
    done, _ = await asyncio.wait({waiting}, timeout=5)
    assert done
    assert waiting.cancelled() != was_done


def test_a_replica_that_breaks_off_every_stream_is_asked_ever_less_often() -> None:
    """Two servers; one opens streams and drops them at the first request. The other does the work."""
    with FakeTarget(fault=drop) as broken, FakeTarget() as sound:
        patience = Patience(backoff_initial_s=0.2, backoff_max_s=5.0, rediscover_s=0.05)
        with Delivery([broken.address, sound.address], terms=TERMS, patience=patience) as delivery:
            reading = Reading(delivery)
            until_s = time.monotonic() + 2.0
            reading.until(lambda: time.monotonic() > until_s)
    # After waits of 0.2, 0.4 and 0.8 s; without them some twenty.
    assert 2 <= len(broken.opens) <= 5


def drop(asked: Asked, messages: list[bytes]) -> list[bytes]:
    """Ends the stream instead of an answer."""
    raise Abort
