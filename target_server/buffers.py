"""Who owns each buffer between the forward and the wire. Ownership is a state, checked at every change of hands.

Host slots are allocated once, each for the largest batch, and go round:

    FREE --acquire--> FILLING --fill_done--> SENDING --release--> FREE
                         |                                         ^
                         +---------------- release ----------------+   (the batch failed or nobody wants it any more)

    FILLING   belongs to the replica's thread: the forward or its copy may write to it
    SENDING   belongs to the publisher: it is read, never written

A stalled peer must cost others overlap, never progress: each of the possible sessions owns one slot, only the slots
above that are shared, and of these a session gets at most its fair part. Runs on the event loop alone; no torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["HostSlot", "SlotPool", "SlotState"]


class SlotState(Enum):
    """Who owns a slot."""

    FREE = "free"
    FILLING = "filling"
    SENDING = "sending"


@dataclass
class HostSlot:
    """One host buffer.

    Attributes:
        index: position in the pool.
        memory: what the replica's thread writes to (a flat uint8 tensor, pinned beside an accelerator).
        view: the same bytes, for the publisher.
        state: who owns it now.
        owner: the session it is for; None while free.
    """

    index: int
    memory: Any
    view: memoryview
    state: SlotState = SlotState.FREE
    owner: int | None = None


class SlotPool:
    """The host slots of one replica."""

    def __init__(self, slots: list[HostSlot], *, max_owner_count: int) -> None:
        if len(slots) < max_owner_count:
            raise ValueError(f"{len(slots)} slots for {max_owner_count} owners: give each owner one")
        self._slots = slots
        # Last in, first out: the slots in use stay few and warm, and the others' pages are never touched.
        self._free = list(reversed(slots))
        self._held: Counter[int] = Counter()
        self._max_owner_count = max_owner_count

    @property
    def slot_bytes(self) -> int:
        """Size of each slot."""
        return self._slots[0].view.nbytes

    def may_acquire(self, owner: int, *, active_owner_count: int) -> bool:
        """Whether `acquire` would succeed; never while a session that has left has yet to give back the last free slot.

        Args:
            owner: the session that asks.
            active_owner_count: sessions that are open now; the shared slots are divided among them.
        """
        if not self._free:
            return False
        if not self._held[owner]:
            return True
        shared = len(self._slots) - self._max_owner_count
        shared_in_use = sum(held - 1 for held in self._held.values() if held)
        fair_part = -(-shared // max(1, active_owner_count))
        return shared_in_use < shared and self._held[owner] - 1 < fair_part

    def acquire(self, owner: int) -> HostSlot:
        """Hands a free slot to the replica's thread; `may_acquire` must hold."""
        slot = self._free.pop()
        _expect(slot, SlotState.FREE)
        slot.state, slot.owner = SlotState.FILLING, owner
        self._held[owner] += 1
        return slot

    def fill_done(self, slot: HostSlot) -> None:
        """Hands a filled slot to the publisher; every write to it has ended."""
        _expect(slot, SlotState.FILLING)
        slot.state = SlotState.SENDING

    def release(self, slot: HostSlot) -> None:
        """Takes a slot back: nothing reads or writes it any more."""
        if slot.state is SlotState.FREE or slot.owner is None:
            raise AssertionError(f"slot {slot.index} is released twice")
        self._held[slot.owner] -= 1
        if not self._held[slot.owner]:
            del self._held[slot.owner]
        slot.state, slot.owner = SlotState.FREE, None
        self._free.append(slot)

    def snapshot(self) -> dict[str, int]:
        """Returns how many slots are in each state."""
        states = Counter(slot.state for slot in self._slots)
        return {state.value: states[state] for state in SlotState}

    def check_integrity(self) -> None:
        """Asserts that every slot is in exactly one place; for tests and idle moments."""
        free = {slot.index for slot in self._free}
        assert len(free) == len(self._free), "a slot is free twice"
        assert free == {slot.index for slot in self._slots if slot.state is SlotState.FREE}, self.snapshot()
        held = Counter(slot.owner for slot in self._slots if slot.owner is not None)
        assert held == self._held, (held, self._held)


def _expect(slot: HostSlot, state: SlotState) -> None:
    if slot.state is not state:
        raise AssertionError(f"slot {slot.index} is {slot.state.value}, expected {state.value}")
