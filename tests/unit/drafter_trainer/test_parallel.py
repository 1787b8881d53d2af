"""What ranks exchange: two real gloo processes, and the single rank that exchanges nothing."""

from __future__ import annotations

import multiprocessing
import os
import socket
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import nn

from drafter_trainer import parallel
from drafter_trainer.parallel import Ranks, join_ranks


def test_a_single_rank_exchanges_nothing() -> None:
    ranks = Ranks()
    parameter = nn.Parameter(torch.ones(2))
    ranks.sum_gradients([parameter])
    ranks.barrier()
    ranks.leave()
    assert parameter.grad is None
    assert (ranks.gather([1.0, 2.0]), ranks.sum(3.0), ranks.is_first) == ([[1.0, 2.0]], 3.0, True)


def rank_main(rank: int, port: int, answers: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    parallel.BUCKET_BYTES = 16  # several buckets
    ranks = join_ranks(device_type="cpu")
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad = torch.full((3,), float(rank + 1))
    if rank == 0:  # the other rank had nothing to train here (case 71)
        parameters[1].grad = torch.full((2, 2), 5.0)
    ranks.sum_gradients(parameters)
    copied = torch.full((2,), float(rank))
    ranks.copy_from_first([copied])
    ranks.barrier()
    gradients = [p.grad.tolist() for p in parameters if p.grad is not None]
    answers.send((ranks.rank, ranks.num_local_ranks, gradients, copied.tolist(), ranks.gather([rank, 0.1])))
    ranks.leave()


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    """What two ranks saw."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=rank_main, args=(rank, port, theirs)))
        pipes.append(ours)
    for process in processes:
        process.start()
    received = []
    for pipe in pipes:
        assert pipe.poll(110), "a rank does not answer"
        received.append(pipe.recv())
    for process in processes:
        process.join(20)
    return received


def test_gradients_are_summed_and_missing_ones_count_as_zero(answers: list[Any]) -> None:
    for _, _, gradients, _, _ in answers:
        assert gradients == [[3.0] * 3, [[5.0, 5.0], [5.0, 5.0]], [0.0]]


def test_every_rank_sees_all_values_in_rank_order(answers: list[Any]) -> None:
    assert [answer[:2] for answer in answers] == [(0, 2), (1, 2)]
    assert [answer[4] for answer in answers] == [[[0.0, 0.1], [1.0, 0.1]]] * 2


def test_weights_are_the_first_ranks(answers: list[Any]) -> None:
    assert [answer[3] for answer in answers] == [[0.0, 0.0]] * 2
