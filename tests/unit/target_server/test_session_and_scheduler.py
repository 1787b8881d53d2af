"""Credit, order and fairness without a model, a thread or a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from target_wire.checks import ServedTarget, SessionTerms
from target_wire.errors import Code, Reason, WireError
from target_wire.spec import DType
from target_wire.v1 import target_pb2 as pb

from target_server.buffers import HostSlot, SlotPool, SlotState
from target_server.scheduler import CaptureJob, Scheduler
from target_server.session import Batch, Session

ROW_BYTES = 8
SERVED = ServedTarget(
    layer_count=4,
    hidden_size=4,
    vocab_size=100,
    dtype=DType.BFLOAT16,
    version_number=1,
    version_digest="d",
    max_batch_token_count=64,
    max_sequence_token_count=64,
)


class Bench:
    """A scheduler whose replica is the test: `started` holds the jobs that it was given."""

    def __init__(self, *, slots: int = 6, max_sessions: int = 4, depth: int = 2) -> None:
        self.started: list[CaptureJob] = []
        memory = [memoryview(bytearray(64 * ROW_BYTES)) for _ in range(slots)]
        self.pool = SlotPool([HostSlot(i, None, view) for i, view in enumerate(memory)], max_owner_count=max_sessions)
        self.scheduler = Scheduler(self.pool, self.started.append, max_session_count=max_sessions, depth=depth)

    def session(self, key: int, *, credit_tokens: int = 64, outstanding: int = 64) -> Session:
        terms = SessionTerms((0,), DType.BFLOAT16, ROW_BYTES, 64, 64 * ROW_BYTES, f"client-{key}")
        session = Session(key, terms, SERVED, max_outstanding_request_count=outstanding, on_change=self.scheduler.wake)
        self.scheduler.add(session)
        grant(session, credit_tokens)
        return session

    def finish(self) -> CaptureJob:
        """Ends the job that was started first."""
        job = self.started.pop(0)
        self.scheduler.captured(job, finite=True)
        return job

    def finish_and_send(self) -> CaptureJob:
        """Ends the job that was started first, and sends its batch."""
        job = self.finish()
        assert job.batch.session.begin_sending(job.batch)
        job.batch.session.ledger.spend(job.batch.payload_bytes)
        self.scheduler.release(job.slot)
        job.batch.session.sent(job.batch)
        return job


def grant(session: Session, tokens: int) -> None:
    session.take(pb.StreamHiddenStatesRequest(credit=pb.Credit(granted_bytes=tokens * ROW_BYTES)))


def ask(session: Session, request_id: int, lengths: Sequence[int] = (4,)) -> None:
    session.take(
        pb.StreamHiddenStatesRequest(
            batch_request=pb.BatchRequest(request_id=request_id, sequence_lengths=lengths, token_ids=[1] * sum(lengths))
        )
    )


def cancel(session: Session, request_id: int) -> None:
    session.take(pb.StreamHiddenStatesRequest(cancel=pb.Cancel(request_id=request_id)))


async def next_answer(session: Session) -> object:
    return await asyncio.wait_for(session.next_outgoing(), 1)


def names(jobs: Sequence[CaptureJob]) -> list[tuple[int, int]]:
    return [(job.batch.session.key, job.batch.request_id) for job in jobs]


async def test_no_forward_starts_without_credit_for_the_whole_batch() -> None:
    bench = Bench()
    session = bench.session(1, credit_tokens=3)
    ask(session, 1, [2, 2])
    assert bench.started == []
    grant(session, 4)
    assert names(bench.started) == [(1, 1)]
    assert session.ledger.available_bytes == 0


async def test_a_session_without_credit_holds_nobody_up() -> None:
    bench = Bench()
    poor, rich = bench.session(1, credit_tokens=0), bench.session(2)
    for request_id in range(4):
        ask(poor, request_id)
        ask(rich, request_id)
    for _ in range(4):
        assert bench.finish_and_send().batch.session is rich
    assert bench.started == []


async def test_batches_of_a_session_start_in_the_order_of_their_requests() -> None:
    bench = Bench(depth=1)
    session = bench.session(1, credit_tokens=10)
    ask(session, 1, [8])
    ask(session, 2, [8])
    ask(session, 3, [1])
    bench.finish()
    # Request 3 would fit the remaining credit, but it may not overtake: request 2 could starve.
    assert bench.started == []


async def test_sessions_share_by_tokens_and_not_by_requests() -> None:
    bench = Bench(slots=8, depth=1)
    large, small = bench.session(1), bench.session(2)
    for request_id in range(4):
        ask(large, request_id, [12])
    for request_id in range(12):
        ask(small, request_id, [4])
    served = {1: 0, 2: 0}
    for _ in range(8):
        job = bench.finish_and_send()
        served[job.batch.session.key] += job.batch.token_count
    assert abs(served[1] - served[2]) <= 12


async def test_an_idle_session_saves_up_no_turns() -> None:
    bench = Bench(slots=8, depth=1)
    busy, late = bench.session(1), bench.session(2)
    for request_id in range(8):
        ask(busy, request_id)
    for _ in range(4):
        bench.finish_and_send()
    for request_id in range(4):
        ask(late, request_id)
    order = []
    for _ in range(6):
        order.append(bench.finish_and_send().batch.session.key)
    assert order.count(1) >= 2, order


async def test_a_withdrawn_request_saves_up_no_turns() -> None:
    """A turn that was due and then withdrawn must not be worth more the longer the session is idle."""
    bench = Bench(slots=8, depth=1)
    late, busy = bench.session(1), bench.session(2)
    ask(late, 0, [20])
    ask(late, 1)
    for request_id in range(24):
        ask(busy, request_id, [2])
    bench.finish_and_send()
    assert names(bench.started) == [(2, 0)]  # chosen before (1, 1), whose turn is noted
    cancel(late, 1)
    for _ in range(20):
        assert bench.finish_and_send().batch.session is busy
    for request_id in range(2, 8):
        ask(late, request_id, [2])
    order = [bench.finish_and_send().batch.session.key for _ in range(6)]
    assert order.count(2) >= 2, order


async def test_a_new_session_waits_for_the_slot_of_one_that_left_while_its_batch_ran() -> None:
    bench = Bench(slots=3, max_sessions=2, depth=2)
    leaver, stalled = bench.session(1), bench.session(2)
    for request_id in range(2):
        ask(stalled, request_id)
    bench.finish()
    bench.finish()
    ask(leaver, 0)
    bench.scheduler.remove(leaver)
    assert bench.pool.snapshot() == {"free": 0, "filling": 1, "sending": 2}
    newcomer = bench.session(3)
    ask(newcomer, 0)  # its place among the sessions is free, the slot that goes with it isn't yet
    bench.finish()
    assert names(bench.started) == [(3, 0)]
    bench.scheduler.check_integrity()


async def test_the_time_of_a_batch_does_not_count_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """I7: two batches are with the thread; the second one's deadline begins when the first has ended."""
    now_s = 1000.0
    monkeypatch.setattr("target_server.scheduler.time", SimpleNamespace(monotonic=lambda: now_s))
    bench = Bench(depth=2)
    session = bench.session(1)
    ask(session, 0)
    ask(session, 1)
    now_s += 400.0
    assert bench.scheduler.longest_running_s() == 400.0
    bench.finish()
    now_s += 300.0
    assert bench.scheduler.longest_running_s() == 300.0
    bench.finish()
    assert bench.scheduler.longest_running_s() == 0.0


async def test_unread_batches_of_one_session_leave_a_slot_for_every_other() -> None:
    bench = Bench(slots=6, max_sessions=4)
    stalled = bench.session(1)
    for request_id in range(8):
        ask(stalled, request_id)
    while bench.started:
        bench.finish()
    assert bench.pool.snapshot()["sending"] == 3  # its own and the two shared ones
    for key in (2, 3, 4):
        ask(bench.session(key), 0)
        assert names([bench.finish()]) == [(key, 0)]


async def test_a_closed_session_gives_back_its_slots_but_not_one_that_is_being_written() -> None:
    bench = Bench(depth=2)
    session = bench.session(1)
    ask(session, 1)
    ask(session, 2)
    bench.finish()
    bench.scheduler.remove(session)
    assert bench.pool.snapshot() == {"free": 5, "filling": 1, "sending": 0}
    bench.finish()
    assert bench.pool.snapshot()["free"] == 6
    bench.scheduler.check_integrity()


@pytest.mark.parametrize("stage", ["queued", "running", "ready"])
async def test_cancel_is_answered_once_and_returns_credit_and_slot(stage: str) -> None:
    bench = Bench(depth=1)
    session = bench.session(1, credit_tokens=0 if stage == "queued" else 4)
    ask(session, 7)
    if stage == "ready":
        bench.finish()
    cancel(session, 7)
    if stage == "running":
        bench.finish()
    answer = await next_answer(session)
    if stage == "ready":
        assert isinstance(answer, Batch)
        assert answer.slot is not None
        assert not session.begin_sending(answer)
        bench.scheduler.release(answer.slot)
        answer = await next_answer(session)
    assert isinstance(answer, pb.StreamHiddenStatesResponse)
    assert (answer.batch_failed.request_id, answer.batch_failed.reason) == (7, "CANCELLED")
    assert session.ledger.snapshot()["reserved_bytes"] == 0
    assert bench.pool.snapshot()["free"] == 6
    ask(session, 7)  # the id is free again
    session.check_integrity()


async def test_cancel_of_a_batch_that_is_being_sent_is_ignored() -> None:
    bench = Bench()
    session = bench.session(1)
    ask(session, 7)
    batch = bench.finish().batch
    assert session.begin_sending(batch)
    cancel(session, 7)
    assert not batch.cancelled


async def test_a_failed_forward_fails_its_request_alone() -> None:
    bench = Bench()
    session = bench.session(1)
    ask(session, 1)
    ask(session, 2)
    bench.scheduler.failed(bench.started.pop(0), WireError(Code.INTERNAL, Reason.CAPTURE_FAILED, "broken"))
    bench.finish()
    failed, batch = await next_answer(session), await next_answer(session)
    assert isinstance(failed, pb.StreamHiddenStatesResponse)
    assert failed.batch_failed.reason == "CAPTURE_FAILED"
    assert isinstance(batch, Batch)
    assert batch.request_id == 2
    bench.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [([], "BAD_REQUEST"), ([0], "BAD_REQUEST"), ([65], "SEQUENCE_TOO_LONG"), ([60, 60], "BATCH_TOO_LARGE")],
)
async def test_a_bad_request_is_answered_and_the_session_goes_on(lengths: list[int], reason: str) -> None:
    bench = Bench()
    session = bench.session(1)
    ask(session, 1, lengths)
    ask(session, 2)
    answer = await next_answer(session)
    assert isinstance(answer, pb.StreamHiddenStatesResponse)
    assert answer.batch_failed.reason == reason
    assert names(bench.started) == [(1, 2)]


async def test_too_many_outstanding_requests_are_refused() -> None:
    bench = Bench()
    session = bench.session(1, credit_tokens=0, outstanding=2)
    for request_id in range(3):
        ask(session, request_id)
    answer = await next_answer(session)
    assert isinstance(answer, pb.StreamHiddenStatesResponse)
    assert (answer.batch_failed.request_id, answer.batch_failed.reason) == (2, "OVERLOADED")


async def test_a_client_that_reads_nothing_is_not_read_from_without_bound() -> None:
    bench = Bench()
    session = bench.session(1, outstanding=2)
    taken = 0
    while taken < 1000:
        ask(session, 5, [])
        taken += 1
        try:
            await asyncio.wait_for(session.wait_for_room(), 0.01)
        except TimeoutError:
            break
    assert taken < 100
    await next_answer(session)
    await asyncio.wait_for(session.wait_for_room(), 1)


async def test_half_closed_session_ends_when_what_has_credit_was_sent() -> None:
    bench = Bench()
    session = bench.session(1, credit_tokens=4)
    ask(session, 1)
    ask(session, 2)
    session.end_requests()
    batch = bench.finish().batch
    assert await next_answer(session) is batch
    session.begin_sending(batch)
    session.ledger.spend(batch.payload_bytes)
    session.sent(batch)
    assert await next_answer(session) is None


async def test_refused_session_sends_what_runs_and_ends_with_the_error() -> None:
    bench = Bench(depth=1)
    session = bench.session(1)
    ask(session, 1)
    ask(session, 2)
    error = WireError(Code.UNAVAILABLE, Reason.SHUTTING_DOWN, "closing")
    bench.scheduler.refuse_new(error, at_once=False)
    queued = await next_answer(session)
    assert isinstance(queued, pb.StreamHiddenStatesResponse)
    assert (queued.batch_failed.request_id, queued.batch_failed.reason) == (2, "SHUTTING_DOWN")
    batch = bench.finish().batch
    assert await next_answer(session) is batch
    session.begin_sending(batch)
    session.ledger.spend(batch.payload_bytes)
    session.sent(batch)
    assert await next_answer(session) is error


async def test_one_session_too_many_is_refused() -> None:
    bench = Bench(max_sessions=2, slots=3)
    bench.session(1)
    bench.session(2)
    with pytest.raises(WireError) as refused:
        bench.scheduler.check_room()
    assert refused.value.reason is Reason.OVERLOADED


def test_slot_states_refuse_a_wrong_hand() -> None:
    bench = Bench()
    slot = bench.pool.acquire(1)
    bench.pool.fill_done(slot)
    with pytest.raises(AssertionError, match="expected filling"):
        bench.pool.fill_done(slot)
    bench.pool.release(slot)
    assert slot.state is SlotState.FREE
    with pytest.raises(AssertionError, match="released twice"):
        bench.pool.release(slot)


ACTION = st.tuples(
    st.sampled_from(["ask", "grant", "cancel", "finish", "fail", "send", "leave"]),
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(1, 20),
)


@given(st.lists(ACTION, max_size=60))
def test_any_history_keeps_credit_and_slots_conserved(actions: list[tuple[str, int, int, int]]) -> None:
    """I2: whatever happens in whatever order, nothing leaks and nothing runs without credit."""

    async def play() -> None:
        bench = Bench(slots=5, max_sessions=3)
        sessions = {key: bench.session(key, credit_tokens=0) for key in range(3)}
        for name, key, request_id, amount in actions:
            session = sessions.get(key)
            if name == "finish" and bench.started:
                bench.finish()
            elif name == "fail" and bench.started:
                bench.scheduler.failed(bench.started.pop(0), WireError(Code.INTERNAL, Reason.CAPTURE_FAILED, "x"))
            elif session is not None:
                await _act(bench, session, name, request_id, amount)
                if name == "leave":
                    del sessions[key]
            bench.scheduler.check_integrity()
        while bench.started:
            bench.finish()
        for session in sessions.values():
            bench.scheduler.remove(session)
        bench.scheduler.check_integrity()
        assert bench.pool.snapshot()["free"] == 5

    asyncio.run(play())


async def _act(bench: Bench, session: Session, name: str, request_id: int, amount: int) -> None:
    if name == "ask":
        ask(session, request_id, [amount])
    elif name == "grant":
        account = session.ledger.snapshot()
        ceiling = account["spent_bytes"] + account["window_bytes"]
        granted = min(ceiling, account["granted_bytes"] + amount * ROW_BYTES)
        session.take(pb.StreamHiddenStatesRequest(credit=pb.Credit(granted_bytes=granted)))
    elif name == "cancel":
        cancel(session, request_id)
    elif name == "leave":
        bench.scheduler.remove(session)
    elif name == "send" and session._outbox.qsize():
        outgoing = await session.next_outgoing()
        if isinstance(outgoing, Batch):
            assert outgoing.slot is not None
            if session.begin_sending(outgoing):
                session.ledger.spend(outgoing.payload_bytes)
                bench.scheduler.release(outgoing.slot)
                session.sent(outgoing)
            else:
                bench.scheduler.release(outgoing.slot)
