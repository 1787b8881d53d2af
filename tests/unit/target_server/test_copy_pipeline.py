"""The copy pipeline against an adversary (issue: overlap that can't corrupt), and the test of that test.

`World` drives the real code through orders of device, threads, transport and clients that the recorded events allow.
Every single wait and ownership check is then taken out, one at a time, and the same worlds must notice.
"""

from __future__ import annotations
import __future__

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from target_server import buffers, copier, publisher, replica, scheduler, servicer, session
from target_server.errors import CopyAuditError
from tests.support.pipeline_world import PROFILES, World

SEEDS_PER_PROFILE = 12


@given(
    seed=st.integers(0, 2**32 - 1),
    profile=st.sampled_from(PROFILES),
    device_buffers=st.integers(1, 3),
    overlap=st.booleans(),
    audit=st.sampled_from(["off", "always"]),
)
def test_every_delivered_byte_is_right_in_any_order_that_the_events_allow(
    seed: int, profile: Any, device_buffers: int, overlap: bool, audit: str
) -> None:
    """I2, I5, I6."""
    World(seed, profile, device_buffers=device_buffers, overlap=overlap, audit=audit).run()


def worlds() -> None:
    """The fixed worlds that mutants must survive to live; raises when any check fails."""
    for seed in range(SEEDS_PER_PROFILE):
        for profile in PROFILES:
            World(seed, profile, device_buffers=1 + seed % 3).run()


def test_the_fixed_worlds_pass_without_a_mutation() -> None:
    worlds()


def a_free_slot_list_that_holds_a_used_slot() -> None:
    pool, slot = _pool_with_a_used_slot()
    pool._free.append(slot)
    _must_refuse(lambda: pool.acquire(2))


def a_slot_that_is_filled_twice() -> None:
    pool, slot = _pool_with_a_used_slot()
    pool.fill_done(slot)
    _must_refuse(lambda: pool.fill_done(slot))


def a_slot_that_is_released_twice() -> None:
    pool, slot = _pool_with_a_used_slot()
    pool.release(slot)
    _must_refuse(lambda: pool.release(slot))


def a_session_that_wants_every_slot() -> None:
    pool, _ = _pool_with_a_used_slot()
    assert pool.may_acquire(1, active_owner_count=2)
    pool.acquire(1)
    assert not pool.may_acquire(1, active_owner_count=2), "the last slot is another session's"
    assert pool.may_acquire(2, active_owner_count=2)


def a_session_in_the_place_of_one_whose_batch_still_runs() -> None:
    pool, _ = _pool_with_a_used_slot()
    pool.acquire(1)
    pool.acquire(2)
    assert not pool.may_acquire(3, active_owner_count=2), "there is no free slot"


def a_batch_that_is_started_without_credit() -> None:
    from tests.unit.target_server.test_session_and_scheduler import Bench, ask  # noqa: PLC0415

    poor = Bench().session(1, credit_tokens=0)
    ask(poor, 1)
    _must_refuse(lambda: poor.start(poor._queue[0]))


def a_copy_that_the_audit_must_see() -> None:
    world = World(1, PROFILES[0], audit="always")
    world.streams.compute.wait_event = lambda event: None  # type: ignore[method-assign]
    world.streams.copy.wait_event = lambda event: None  # type: ignore[method-assign]
    world.streams._compute_bias = 0.2
    with pytest.raises(CopyAuditError):
        world.run()


def _pool_with_a_used_slot() -> tuple[buffers.SlotPool, buffers.HostSlot]:
    slots = [buffers.HostSlot(index, None, memoryview(b"")) for index in range(3)]
    pool = buffers.SlotPool(slots, max_owner_count=2)
    return pool, pool.acquire(1)


def _must_refuse(action: Callable[[], object]) -> None:
    with pytest.raises(AssertionError):
        action()


@dataclass(frozen=True)
class Mutation:
    """One safety taken out.

    Attributes:
        what: what could then happen.
        owner: class or module of the function.
        function: its name.
        old: text in its source, exactly once.
        new: what replaces it.
        killer: the test that must fail.
    """

    what: str
    owner: Any
    function: str
    old: str
    new: str
    killer: Callable[[], None] = worlds


RUN = (copier.CopyPipeline, "run")
MUTATIONS = (
    Mutation("a forward packs into a buffer that is being copied", *RUN, "compute.wait_event(buffer.copied)", "pass"),
    Mutation("a copy begins before packing has ended", *RUN, "self._copy.wait_event(filled)", "pass"),
    Mutation("a buffer forgets the copy out of it", *RUN, "buffer.copied = copied", "pass"),
    Mutation(
        "the packing event is recorded before packing",
        *RUN,
        "compute.enqueue(lambda: fill(packed))\n    filled = compute.record_event()",
        "filled = compute.record_event()\n    compute.enqueue(lambda: fill(packed))",
    ),
    Mutation(
        "the copy event is recorded before the copy",
        *RUN,
        "self._copy.enqueue(lambda: _copy_out(packed, slot_memory))\n    copied = self._copy.record_event()",
        "copied = self._copy.record_event()\n    self._copy.enqueue(lambda: _copy_out(packed, slot_memory))",
    ),
    Mutation(
        "a slot is read before its copy has ended", copier.Copier, "finish", "copied.wait(self._timeout_s)", "pass"
    ),
    Mutation(
        "a slot is free before its last frame was written",
        servicer.ReplicaServicer,
        "_send_batch",
        "    try:\n",
        "    self._scheduler.release(batch.slot)\n    try:\n",
    ),
    Mutation(
        "a slot is never given back",
        servicer.ReplicaServicer,
        "_send_batch",
        "finally:\n        self._scheduler.release(batch.slot)",
        "finally:\n        pass",
    ),
    Mutation(
        "a withdrawn batch keeps its slot",
        servicer.ReplicaServicer,
        "_send_batch",
        "        self._scheduler.release(batch.slot)\n        return",
        "        return",
    ),
    Mutation(
        "a session that ends takes back a slot that is being written",
        scheduler.Scheduler,
        "remove",
        "self.wake()",
        "[self._pool.release(job.slot) for job in self._in_flight if job.batch.session is session]\n    self.wake()",
    ),
    Mutation(
        "a session that ends keeps the slots of its unsent batches",
        scheduler.Scheduler,
        "remove",
        "self._pool.release(slot)",
        "pass",
    ),
    Mutation(
        "a batch nobody wants is delivered",
        session.Session,
        "wants",
        "return not self._closed and not batch.cancelled",
        "return True",
    ),
    Mutation(
        "a session takes the slot that is another's",
        buffers.SlotPool,
        "may_acquire",
        "return shared_in_use < shared and ",
        "return True or ",
        a_session_that_wants_every_slot,
    ),
    Mutation(
        "a slot is promised where none is free",
        buffers.SlotPool,
        "may_acquire",
        "if not self._free:",
        "if False:",
        a_session_in_the_place_of_one_whose_batch_still_runs,
    ),
    Mutation(
        "a forward starts without credit",
        session.Session,
        "head",
        "return batch if batch.payload_bytes <= self.ledger.available_bytes else None",
        "return batch",
    ),
    Mutation(
        "a start does not look at its reservation",
        session.Session,
        "start",
        'assert reserved, "a batch was started without credit"',
        "pass",
        a_batch_that_is_started_without_credit,
    ),
    Mutation("sent bytes are not accounted for", publisher, "publish", "ledger.spend(size)", "pass"),
    Mutation(
        "sent bytes are accounted for too late",
        publisher,
        "publish",
        "ledger.spend(size)\n        await write(message)",
        "await write(message)\n        ledger.spend(size)",
    ),
    Mutation(
        "a used slot is handed out",
        buffers.SlotPool,
        "acquire",
        "_expect(slot, SlotState.FREE)",
        "pass",
        a_free_slot_list_that_holds_a_used_slot,
    ),
    Mutation(
        "a slot that is being sent is handed to the publisher again",
        buffers.SlotPool,
        "fill_done",
        "_expect(slot, SlotState.FILLING)",
        "pass",
        a_slot_that_is_filled_twice,
    ),
    Mutation(
        "a slot is freed twice",
        buffers.SlotPool,
        "release",
        "raise AssertionError",
        "print",
        a_slot_that_is_released_twice,
    ),
    Mutation(
        "the audit compares nothing",
        replica.Replica,
        "_check_copy",
        "if copied_checksum != packed_checksum:",
        "if False:",
        a_copy_that_the_audit_must_see,
    ),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what.replace(" ", "-"))
def test_taking_out_one_safety_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation.owner, mutation.function, _mutated(mutation))
    if mutation.owner is publisher:
        monkeypatch.setattr(servicer, mutation.function, getattr(publisher, mutation.function))
    with pytest.raises(BaseException) as noticed:  # noqa: PT011 - whichever check sees it first
        mutation.killer()
    assert not isinstance(noticed.value, (SyntaxError, NameError)), noticed.value


def test_killers_pass_without_a_mutation() -> None:
    for killer in {mutation.killer for mutation in MUTATIONS} - {worlds}:
        killer()


def test_the_table_holds_every_wait_and_every_ownership_check() -> None:
    listed = " ".join(mutation.old for mutation in MUTATIONS)
    for module in (copier, buffers):
        for call in re.findall(r"(?:\.wait_event|\.wait|_expect)\([a-z][^)]*\)", inspect.getsource(module)):
            if "slot: " not in call:  # the definition
                assert call in listed, f"{module.__name__} has {call} and the table has not"


def _mutated(mutation: Mutation) -> Any:
    original = inspect.getattr_static(mutation.owner, mutation.function)
    function = original.fget if isinstance(original, property) else original
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutation.old) == 1, f"{mutation.function} does not hold exactly one {mutation.old!r}"
    code = compile(
        source.replace(mutation.old, mutation.new),
        f"<{mutation.what}>",
        "exec",
        flags=__future__.annotations.compiler_flag,
    )
    names: dict[str, Any] = {}
    exec(code, sys.modules[function.__module__].__dict__, names)
    return names[mutation.function]
