"""Ranks as processes on this machine that talk through gloo; started from one process that has imported torch."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from drafter_trainer.parallel import Ranks, join_ranks

__all__ = ["on_ranks"]

TIMEOUT_S = 100.0


def on_ranks(num_ranks: int, main: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Runs `main(ranks, *arguments)` on every rank; returns what each returned, in rank order.

    Raises:
        AssertionError: A rank failed, or didn't answer in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["drafter_trainer.parallel", "tests.support.step_engine"])
    processes, pipes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=_run, args=(rank, num_ranks, port, theirs, main, arguments)))
        pipes.append(ours)
    for process in processes:
        process.start()
    try:
        return [_answer(rank, pipe) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(10)
            process.kill()  # only what hangs is still there


def _run(
    rank: int, num_ranks: int, port: int, answers: Connection, main: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(num_ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    ranks: Ranks = join_ranks(device_type="cpu")
    try:
        answer = io.BytesIO()
        torch.save(main(ranks, *arguments), answer)  # sent as it is a tensor would be a handle that dies with us
        answers.send((True, answer.getvalue()))
    except BaseException:
        answers.send((False, traceback.format_exc()))
        os._exit(1)  # the others must not wait for it
    ranks.leave()


def _answer(rank: int, pipe: Connection) -> Any:
    assert pipe.poll(TIMEOUT_S), f"rank {rank} does not answer"
    sound, value = pipe.recv()
    assert sound, f"rank {rank}: {value}"
    return torch.load(io.BytesIO(value), weights_only=False)
