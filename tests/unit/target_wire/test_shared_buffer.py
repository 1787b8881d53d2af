"""Room in a shared buffer: no byte is ever both ends', nobody waits for ever, false positions are refused (I2).

The test of the test: with any one rule taken away, some order of events delivers other bytes than were put, or is
refused by the other end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from target_wire import shared_buffer
from target_wire.errors import Code, Reason, WireError
from target_wire.shared_buffer import BufferReader, BufferSpace, largest_body


class Buffer:
    """Both ends of a buffer, its memory and the wires between them; any step that is possible may come next.

    The client finds a body, later copies it out, and later still gives its bytes back, so that the server has every
    chance to write in between.
    """

    def __init__(self, size_bytes: int, bodies: list[bytes], chance: random.Random) -> None:
        self.bodies = bodies
        self.chance = chance
        self.memory = bytearray(size_bytes)
        self.space = BufferSpace(size_bytes)
        self.reader = BufferReader(size_bytes)
        self.put = 0
        self.frames: list[tuple[int, int]] = []  # position and size, on their way to the client
        self.releases: list[int] = []  # on their way to the server
        self.found: tuple[int, int, int] | None = None  # position, size, where in memory
        self.copied: list[bytes] = []

    def run(self) -> None:
        while len(self.copied) < len(self.bodies):
            steps = self.possible_steps()
            assert steps, f"deadlock after {len(self.copied)} bodies: {self.space.snapshot()}"
            self.chance.choice(steps)()
            self.check()
        assert self.copied == self.bodies

    def check(self) -> None:
        account = self.space.snapshot()
        assert 0 <= account["written_bytes"] - account["released_bytes"] <= account["size_bytes"]

    def possible_steps(self) -> list[Callable[[], None]]:
        steps: list[Callable[[], None]] = []
        if self.put < len(self.bodies) and self.may_put():
            steps.append(self.put_body)
        if self.frames and self.found is None:
            steps.append(self.find)
        if self.found is not None:
            steps.append(self.copy)
        if self.releases:
            steps.append(self.deliver_release)
        return steps

    def may_put(self) -> bool:
        space = BufferSpace(len(self.memory))
        space.__dict__.update(self.space.__dict__)
        return space.place(len(self.bodies[self.put])) is not None

    def put_body(self) -> None:
        body = self.bodies[self.put]
        position = self.space.place(len(body))
        assert position is not None
        start = position % len(self.memory)
        assert start + len(body) <= len(self.memory), "past the end"
        self.memory[start : start + len(body)] = body
        self.frames.append((position, len(body)))
        self.put += 1

    def find(self) -> None:
        position, size = self.frames.pop(0)
        self.found = position, size, self.reader.find(position, size)

    def copy(self) -> None:
        assert self.found is not None
        position, size, start = self.found
        self.copied.append(bytes(self.memory[start : start + size]))
        assert self.copied[-1] == self.bodies[len(self.copied) - 1], "written again before its release"
        self.found = None
        release = self.reader.copied(position, size)
        if release is not None:
            self.releases.append(release)

    def deliver_release(self) -> None:
        self.space.release(self.releases.pop(0))


class Unchecked(Buffer):
    """Nobody looks at the account: only bytes count."""

    def check(self) -> None:
        pass


class EarlyRelease(Buffer):
    """A client that gives back what it has found and not yet copied."""

    def find(self) -> None:
        super().find()
        assert self.found is not None
        position, size, _ = self.found
        self.releases.append(position + size)


def bodies_of(size_bytes: int, chance: random.Random, count: int = 60) -> list[bytes]:
    most = largest_body(size_bytes)
    sizes = [chance.choice((1, most, chance.randint(1, most))) for _ in range(count)]
    return [bytes(chance.randbytes(size)) for size in sizes]


@given(st.integers(4, 300), st.randoms(use_true_random=False))
def test_what_is_put_is_copied_whole_and_in_order(size_bytes: int, chance: random.Random) -> None:
    Buffer(size_bytes, bodies_of(size_bytes, chance), chance).run()


@given(st.integers(4, 300), st.randoms(use_true_random=False))
def test_bodies_of_the_largest_size_never_wait_for_ever(size_bytes: int, chance: random.Random) -> None:
    Buffer(size_bytes, [chance.randbytes(largest_body(size_bytes)) for _ in range(40)], chance).run()


def no_wait(self: BufferSpace, body_bytes: int) -> int:
    position = shared_buffer._place_after(self._written, body_bytes, self._size_bytes)
    self._written = position + body_bytes
    return position


def stays(end: int, _body_bytes: int, _size_bytes: int) -> int:
    return end


MUTATIONS = {
    "the server does not wait for room": lambda: patch.object(BufferSpace, "place", no_wait),
    "bodies go past the end": lambda: patch.object(shared_buffer, "_place_after", stays),
    "the client never releases": lambda: patch.object(BufferReader, "copied", lambda *_: None),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_rule_is_needed(mutation: str) -> None:
    with MUTATIONS[mutation](), pytest.raises((AssertionError, WireError)):
        run_often(Buffer)


def test_a_release_before_the_copy_is_noticed() -> None:
    with pytest.raises(AssertionError, match="written again before its release"):
        run_often(EarlyRelease)


def test_the_wait_alone_keeps_bytes_whole() -> None:
    """Without it bytes are overwritten: no other check saves them."""
    with (
        patch.object(BufferSpace, "place", no_wait),
        pytest.raises(AssertionError, match="written again before its release"),
    ):
        run_often(Unchecked)


def run_often(kind: type[Buffer]) -> None:
    for seed in range(50):
        chance = random.Random(seed)
        kind(64, bodies_of(64, chance), chance).run()


@pytest.mark.parametrize("released", [-1, 9, 21])
def test_a_release_goes_neither_back_nor_ahead_of_what_was_written(released: int) -> None:
    space = BufferSpace(40)
    assert (space.place(10), space.place(10)) == (0, 10)
    space.release(10)
    space.release(10)
    with pytest.raises(WireError, match=rf"released_bytes {released} must be in \[10, 20\]") as refused:
        space.release(released)
    assert (refused.value.code, refused.value.reason) == (Code.FAILED_PRECONDITION, Reason.SHARED_BUFFER_INVALID)
    assert space.snapshot() == {"size_bytes": 40, "written_bytes": 20, "released_bytes": 10}


@pytest.mark.parametrize(
    ("position", "size"),
    [(0, 5), (15, 5), (5, 5), (-10, 5), (10, 0), (10, -1), (10, 11), (50, 5), (1 << 62, 5), (10, 1 << 40)],
)
def test_a_body_elsewhere_than_due_is_refused(position: int, size: int) -> None:
    reader = BufferReader(40)
    assert reader.find(0, 10) == 0
    reader.copied(0, 10)
    with pytest.raises(WireError) as refused:
        reader.find(position, size)
    assert refused.value.reason is Reason.SHARED_BUFFER_INVALID
    assert reader.find(10, 5) == 10  # the account is as it was


def test_a_body_that_would_go_past_the_end_starts_at_the_beginning() -> None:
    space, reader = BufferSpace(40), BufferReader(40)
    for position in (0, 9, 18, 27):
        assert space.place(9) == position
        assert reader.find(position, 9) == position
        released = reader.copied(position, 9)
    assert space.place(9) is None
    space.release(released or 0)
    assert space.place(9) == 40  # 36 to 39 stay empty
    assert reader.find(40, 9) == 0


def test_sizes_that_hold_no_body_are_refused() -> None:
    for kind in (BufferSpace, BufferReader):
        with pytest.raises(ValueError, match="give at least 4"):
            kind(3)
    with pytest.raises(ValueError, match="give 1 to 10"):
        BufferSpace(40).place(11)
