"""The ranks of one run, what they exchange, and how they share a drafter.

Only this module knows a process group or reads torchrun's variables.

A step's loss is normalised over all ranks before the backward pass, so gradients are summed, not averaged. Small facts
of a step travel in one gather of doubles and are summed in rank order by everybody, so every rank decides alike and the
result doesn't depend on the collective's algorithm.

Gradients are torch's engines' business: DistributedDataParallel where every rank holds the whole drafter, FSDP2
(`fully_shard`) where weights, gradients and moments are spread over the ranks. Without torchrun there's one rank and
nothing is exchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from drafter_trainer.attention import BlockLayout
from drafter_trainer.model import Drafter, DrafterConfig
from drafter_trainer.sharded import whole
from drafter_trainer.stopwatch import Stopwatch

__all__ = ["Ranks", "SharedDrafter", "join_ranks"]

# Longer than any wait that a rank may have alone: for its batches (target.wait_timeout_s) or a checkpoint's fsync.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
STOP_KEY = "stop"


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    num_local_ranks: int = 1
    """Ranks on this machine."""
    store: Store | None = dataclasses.field(default=None, repr=False, compare=False)
    """What all ranks can read and write at any time, without waiting for each other."""

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

    def announce_stop(self) -> None:
        """Has `stop_announced` say so on every rank. Doesn't wait for them; may be called from any thread."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):  # whoever holds the store has ended
                self.store.set(STOP_KEY, "1")

    def stop_announced(self) -> bool:
        """Whether a rank has announced that the run is to stop; False also where whoever holds the store has ended."""
        if self.store is None:
            return False
        try:
            return bool(self.store.check([STOP_KEY]))
        except RuntimeError:
            return False

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
    store, rank, _ = next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
    group_store = PrefixStore("group", store)
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=num_ranks, timeout=COLLECTIVE_TIMEOUT)
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Ranks(rank, num_ranks, local_rank, num_local_ranks, PrefixStore("run", store))


def _collective_device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


class SharedDrafter:
    """A drafter that all ranks train together: called like the drafter itself, its gradients end up summed over ranks.

    Every rank makes equally many passes a step, those with nothing to train with `idle_pass`: an engine's exchanges are
    part of the passes. Build the optimizer after this: sharding replaces the drafter's parameters.

    Attributes:
        drafter: The module that holds the parameters, or this rank's parts of them.
        ranks: Who takes part.
        is_sharded: Whether each rank holds only a part of it.
    """

    def __init__(self, drafter: Drafter, ranks: Ranks, *, shard: bool = False) -> None:
        """Join the ranks' drafters.

        Args:
            drafter: On its device; the first rank's weights are everybody's from here on.
            ranks: Who takes part.
            shard: FSDP2 instead of DDP.
        """
        self.drafter = drafter
        self.ranks = ranks
        self.is_sharded = shard and ranks.num_ranks > 1
        self._scratch: Drafter | None = None
        self._replica: DistributedDataParallel | None = None
        self._own_sizes: list[Tensor] = []
        ranks.copy_from_first(drafter.state_dict().values())
        if self.is_sharded:
            _shard(drafter, ranks.num_ranks)
        elif ranks.num_ranks > 1:
            self._replica = DistributedDataParallel(drafter, gradient_as_bucket_view=True)
            # A lambda: DDP checks annotations, and can't read those of a module that keeps them as text.
            self._replica.register_comm_hook(self._own_sizes, lambda sizes, bucket: _sum_bucket(sizes, bucket))  # noqa: PLW0108

    @property
    def config(self) -> DrafterConfig:
        """The drafter's shape."""
        return self.drafter.config

    @property
    def stopwatch(self) -> Stopwatch:
        """What times the drafter's parts."""
        return self.drafter.stopwatch

    def __call__(self, block_embeds: Tensor, context_TC: Tensor, *, layout: BlockLayout) -> Tensor:
        """Run the drafter; see `Drafter.forward`."""
        model = self.drafter if self._replica is None else self._replica
        hidden_QE: Tensor = model(block_embeds, context_TC, layout=layout)
        return hidden_QE

    def accumulating(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        """To be held around a pass, forward and backward; `last` says whether it's the step's last one.

        Replicas exchange gradients in the last pass only. Shards do in each: a rank has no room for whole gradients.
        """
        return contextlib.nullcontext() if last or self._replica is None else self._replica.no_sync()

    def idle_pass(self) -> None:
        """A forward and backward of no block: all gradients are zero."""
        parameter = self.drafter.fc.weight
        layout = BlockLayout((), torch.empty(0).long(), torch.empty(0).long(), self.config.block_size)
        embeds_QE, context_TC = (torch.zeros(0, width, device=parameter.device) for width in parameter.shape)
        self(embeds_QE, context_TC, layout=layout).sum().backward()  # type: ignore[no-untyped-call]
        self._own_sizes.clear()

    def gradient_size(self) -> Tensor:
        """A scalar that is finite when all gradients of this rank's passes since the step began are; doesn't wait.

        Those of the other ranks don't count: the point is to tell who is to blame. Of shards, which are summed at
        once, nobody can tell: it's 0.
        """
        sizes = list(self._own_sizes)
        self._own_sizes.clear()
        if not sizes and not self.is_sharded:
            gradients = [p.grad for p in self.drafter.parameters() if p.grad is not None]
            sizes = list(torch._foreach_norm(gradients, math.inf)) if gradients else []
        return torch.stack(sizes).amax() if sizes else torch.zeros(())

    def whole_drafter(self) -> Drafter | None:
        """The drafter with whole weights, on the first rank; None on others. All ranks must call it.

        A sharded one is copied into a drafter that is kept for the next call; of any other it's the drafter itself.
        """
        if not self.is_sharded:
            return self.drafter if self.ranks.is_first else None
        weights = whole(self.drafter.state_dict(), keep=self.ranks.is_first)
        if not self.ranks.is_first:
            return None
        if self._scratch is None:
            self._scratch = Drafter(self.config).to(self.drafter.fc.weight.device).requires_grad_(False)
        self._scratch.load_state_dict(weights)
        return self._scratch


def _shard(drafter: Drafter, num_ranks: int) -> None:
    """Spread the parameters over the ranks: a layer is gathered for its pass, the rest for the whole one."""
    mesh = init_device_mesh(drafter.fc.weight.device.type, (num_ranks,))
    for module in [*drafter.draft_layers(), drafter]:
        sharded = fully_shard(module, mesh=mesh)
        # Sums, not means; and plain ones, which gloo has too.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _sum_bucket(own_sizes: list[Tensor], bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's exchange, with a sum where its own takes the mean; notes the size of this rank's part before."""
    own_sizes.append(torch.linalg.vector_norm(bucket.buffer(), math.inf))
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None, "this rank is not in the group"
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return summed
