"""Tensors of which each rank holds a part (FSDP2's DTensors): made whole to be written, cut to be read.

Files hold whole tensors only, so that a checkpoint does not depend on how many ranks wrote it or will read it. Knows
DTensors, but neither ranks nor process groups: a DTensor brings its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["cut_like", "whole"]


def whole(values: Any, *, keep: bool) -> Any:
    """Nested dicts, lists and tuples with every sharded tensor in them replaced by the whole one, on the CPU.

    Takes part in an exchange for each sharded tensor: all ranks must call it, with the same structure.

    Args:
        values: Other tensors and values are passed through, not copied.
        keep: Whether this rank wants them; otherwise its whole tensors are dropped one by one, and None stands in
            their place.
    """
    if isinstance(values, DTensor):
        full: Tensor = values.full_tensor().detach()
        return full.cpu() if keep else None
    if isinstance(values, dict):
        return {key: whole(value, keep=keep) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(whole(value, keep=keep) for value in values)
    return values


def cut_like(value: Any, parameter: Tensor) -> Any:
    """This rank's part of a whole tensor that belongs to a sharded parameter; anything else as it is.

    Exchanges nothing: every rank has read the whole tensor.
    """
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
