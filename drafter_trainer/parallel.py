"""The ranks of one run and what they exchange. Only this module knows a process group or reads torchrun's variables.

A step's loss is normalised over all ranks before the backward pass, so gradients are summed, not averaged. Small facts
of a step travel in one gather of doubles and are summed in rank order by everybody, so every rank decides alike and the
result doesn't depend on the collective's algorithm.

Without torchrun there's one rank and nothing is exchanged. Sharded parameters (FSDP2) would replace
``sum_gradients`` and the model's preparation; nothing else here assumes whole parameters.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Ranks", "join_ranks"]

# Longer than any wait that a rank may have alone: for its batches (target.wait_timeout_s) or a checkpoint's fsync.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
# Gradients are summed in pieces of this size: large enough for bandwidth, small enough to need no second copy of the
# model. The same as torch's DDP.
BUCKET_BYTES = 25 << 20


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    num_local_ranks: int = 1
    """Ranks on this machine."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and talks to people."""
        return self.rank == 0

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values, in rank order; all ranks give equally many. Exact for float64."""
        if self.num_ranks == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64, device=_collective_device())
        everyone = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(everyone, mine)
        return [tensor.tolist() for tensor in everyone]

    def gather_texts(self, texts: Sequence[str]) -> list[str]:
        """Every rank's texts, in rank order; ranks may give different numbers of them."""
        if self.num_ranks == 1:
            return list(texts)
        mine = json.dumps(list(texts)).encode()
        sizes = [int(row[0]) for row in self.gather([len(mine)])]
        rows = self.gather([*mine, *[0] * (max(sizes) - len(mine))])
        everyones = (json.loads(bytes(map(int, row[:size]))) for row, size in zip(rows, sizes, strict=True))
        return [text for texts_of_one in everyones for text in texts_of_one]

    def sum(self, value: float) -> float:
        """The sum over ranks, in rank order."""
        return sum(row[0] for row in self.gather([value]))

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replaces every gradient by its sum over ranks; a missing one counts as zero."""
        if self.num_ranks == 1:
            return
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat)
            for gradient, total in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites the tensors with the first rank's."""
        if self.num_ranks == 1:
            return
        for tensor in tensors:
            dist.broadcast(tensor, src=0)

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.num_ranks > 1:
            self.gather([0.0])  # unlike dist.barrier it needs no device of its own

    def leave(self) -> None:
        """Ends the process group; the last thing a rank does."""
        if self.num_ranks > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join_ranks(*, device_type: str) -> Ranks:
    """Joins the ranks that torchrun started, or returns the single one.

    Args:
        device_type: "cpu" (gloo) or "cuda" (nccl).
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks == 1:
        return Ranks()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Ranks(dist.get_rank(), num_ranks, local_rank, num_local_ranks)


def _collective_device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _buckets(gradients: list[Tensor]) -> Iterable[list[Tensor]]:
    """Gradients of one type in groups of about ``BUCKET_BYTES``, in order."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or sum(g.nbytes for g in bucket) >= BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
