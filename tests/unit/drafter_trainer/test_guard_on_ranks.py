"""Something not finite on one of two ranks: nobody hangs, nothing changes anywhere, everybody knows who it was."""

from __future__ import annotations

import multiprocessing
import os
import socket
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from drafter_trainer.parallel import join_ranks
from drafter_trainer.step import StepEngine
from tests.support.step_engine import assert_equal, fed_batch, micro_batch, run_step, state_of

NUM_RANKS = 2
ANSWER_TIMEOUT_S = 110.0
BAD = ("features", "marked", "loss", "gradient")


def sound(rank: int, step: int) -> Any:
    return fed_batch(micro_batch(10 * step + rank, (12, 8)))


def spoiled(kind: str, engine: StepEngine, step: int) -> tuple[Any, Any]:
    """A batch that isn't finite in this way, and what ends the injection."""
    micro = micro_batch(10 * step + 1, (12, 8))
    if kind == "features":
        return fed_batch(micro, scale=float("inf")), lambda: None
    if kind == "marked":
        return fed_batch(micro, finite=False), lambda: None
    if kind == "loss":
        module = engine.drafter.norm
        hook = module.register_forward_hook(lambda _module, _inputs, output: output * float("nan"))
        return fed_batch(micro), hook.remove
    gradient_hook = engine.drafter.fc.weight.register_hook(lambda gradient: gradient * float("inf"))
    return fed_batch(micro), gradient_hook.remove


def rank_main(rank: int, port: int, answers: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    ranks = join_ranks(device_type="cpu")
    first, engine = run_step([sound(rank, 1)], ranks=ranks)
    told = []
    for step, kind in enumerate(BAD, start=2):
        before = state_of(engine)
        end = lambda: None  # noqa: E731 - nothing to end on the sound rank
        batch = sound(rank, step)
        if rank == 1:
            batch, end = spoiled(kind, engine, step)
        outcome, _ = run_step([batch], engine=engine, step=step, ranks=ranks)
        end()
        after = state_of(engine)
        for counter in ("skipped_count", "skipped_in_a_row"):
            before["optimizer"].pop(counter)
            after["optimizer"].pop(counter)
        assert_equal(after, before)
        told.append((outcome.bad, [(c.rank, c.position, c.kind) for c in outcome.culprits], outcome.sums.bad))
    last, engine = run_step([sound(rank, 9)], engine=engine, step=9, ranks=ranks)
    weights = torch.cat([p.detach().flatten() for p in engine.drafter.parameters()]).double().sum().item()
    answers.send((told, first.bad, last.bad, last.loss, weights))
    ranks.leave()


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    """What two ranks saw."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(NUM_RANKS):
        ours, theirs = context.Pipe(duplex=False)
        pipes.append(ours)
        processes.append(context.Process(target=rank_main, args=(rank, port, theirs)))
        processes[-1].start()
    try:
        received = []
        for pipe in pipes:
            assert pipe.poll(ANSWER_TIMEOUT_S), "a rank hangs"
            received.append(pipe.recv())
        return received
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def test_no_rank_hangs_and_state_is_bit_unchanged_on_all(answers: list[Any]) -> None:  # I4, cases 7, 8, 12
    """That nothing changed is asserted within the ranks, after every bad step: they would not have answered."""
    for _, first, last, _, _ in answers:
        assert (first, last) == ("", "")
    assert answers[0][3:] == answers[1][3:], "the ranks train on with the same loss to the same weights"


@pytest.mark.parametrize("index", range(len(BAD)), ids=BAD)
def test_every_rank_leaves_the_step_out_and_names_the_same_culprit(index: int, answers: list[Any]) -> None:
    kind = "features" if BAD[index] == "marked" else BAD[index]
    for told, *_ in answers:
        reason, culprits, bad = told[index]
        assert reason
        assert culprits == [(1, 10 * (index + 2) + 1, kind)]
        assert bad == {"features": 0, "loss": 0, "gradient": 0, kind: 1}
