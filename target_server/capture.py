"""The forward that stops after the last tap, with the tapped rows written straight into the packed buffer.

Letters: T packed tokens, L taps, D hidden size, B sequences of one forward, S longest of them.

"Layer i" is the output of decoder block i, 0-based; this module alone maps it to a module of the model. Hooks sit on
the tapped blocks only, for the time of one forward. The hook of a tap copies the valid rows of the block's output into
its columns of `packed_TLD`; padding never enters. The hook of the last tap ends the forward with a private exception:
transformers restores its own state in `finally` clauses, and no later block, norm or logit is computed. Runs on the
replica's thread, on whatever stream is current.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from target_server.loading import LoadedTarget
from target_server.packing import ForwardPart, pad_part

__all__ = ["capture_batch", "is_finite"]


class _LastTapReached(BaseException):
    """Ends a forward; not an Exception, so that no model code takes it for a failure."""


def capture_batch(
    target: LoadedTarget,
    token_ids: array[int],
    parts: Sequence[ForwardPart],
    *,
    taps: Sequence[int],
    packed_TLD: torch.Tensor,
) -> float:
    """Writes every row of the batch into the packed buffer.

    Args:
        target: the model.
        token_ids: packed ids of the batch.
        parts: its division into forwards (`packing.plan_parts`), covering every sequence once.
        taps: layers, in the order of the buffer's columns.
        packed_TLD: the buffer, of the model's dtype; every element is written.

    Returns:
        Seconds of packing, as the host sees it.
    """
    pack_s = 0.0
    for part in parts:
        ids_BS, mask_BS = pad_part(token_ids, part)
        pack_s += _run_part(target, ids_BS, mask_BS, part, taps=taps, packed_TLD=packed_TLD)
    return pack_s


@torch.inference_mode()
def is_finite(packed: torch.Tensor) -> torch.Tensor:
    """Returns a scalar bool tensor: whether no element is NaN or infinite. One pass, no copy."""
    low, high = torch.aminmax(packed)
    return torch.isfinite(low) & torch.isfinite(high)


@torch.inference_mode()
def _run_part(
    target: LoadedTarget,
    ids_BS: torch.Tensor,
    mask_BS: torch.Tensor,
    part: ForwardPart,
    *,
    taps: Sequence[int],
    packed_TLD: torch.Tensor,
) -> float:
    pack_s: list[float] = []
    last = max(taps)
    handles = []
    try:
        for column, tap in enumerate(taps):
            hook = _build_hook(part, packed_TLD[:, column], pack_s, ends_forward=tap == last)
            handles.append(target.layers[tap].register_forward_hook(hook))
        target.decoder(
            input_ids=ids_BS.to(target.input_device, non_blocking=True),
            attention_mask=mask_BS.to(target.input_device, non_blocking=True),
            use_cache=False,
        )
    except _LastTapReached:
        return sum(pack_s)
    finally:
        for handle in handles:
            handle.remove()
    raise RuntimeError(f"the forward of {type(target.decoder).__name__} did not reach block {last}")


def _build_hook(
    part: ForwardPart, packed_TD: torch.Tensor, pack_s: list[float], *, ends_forward: bool
) -> Callable[..., None]:
    def copy_rows(_block: nn.Module, _inputs: Any, output: Any) -> None:
        hidden_BSD = output[0] if isinstance(output, tuple) else output
        if hidden_BSD.dtype != packed_TD.dtype:
            raise RuntimeError(f"a block's output is {hidden_BSD.dtype}, the model is {packed_TD.dtype}")
        began = time.perf_counter()
        for row, (start, length) in enumerate(zip(part.starts, part.lengths, strict=True)):
            packed_TD[start : start + length].copy_(hidden_BSD[row, :length])
        pack_s.append(time.perf_counter() - began)
        if ends_forward:
            raise _LastTapReached

    return copy_rows
