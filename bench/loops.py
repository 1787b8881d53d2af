"""`python -m bench.loops`: two loops over the same batches in one process, without any server.

    plain   what a user would write: `model(input_ids, attention_mask, output_hidden_states=True)`
    limit   the least that has to be computed: the blocks up to the last tap, whose valid rows are written into a buffer

Each loop is a process of its own with its own copy of the model. Written without the product's capture code, so that
the product is compared with something else than itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from target_wire.channel import tune_malloc
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench.child import commands, reply
from bench.workload import Workload

__all__ = ["Batch", "flops_per_token", "limit_loop", "matrix_flops_per_s", "padded", "plain_loop"]

Batch = tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Batch:
    """Returns right-padded ids, their mask (both int64 [sequences, longest]) and the lengths."""
    lengths = tuple(len(ids) for ids in sequences)
    ids_BS = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask_BS = torch.zeros_like(ids_BS)
    for row, ids in enumerate(sequences):
        ids_BS[row, : len(ids)] = torch.tensor(ids)
        mask_BS[row, : len(ids)] = 1
    return ids_BS.to(device), mask_BS.to(device), lengths


def plain_loop(model: Any) -> Callable[[Batch], None]:
    """Returns what a user would write for one batch."""

    def forward(batch: Batch) -> None:
        ids_BS, mask_BS, _ = batch
        model(input_ids=ids_BS, attention_mask=mask_BS, output_hidden_states=True)

    return forward


def limit_loop(model: Any, taps: Sequence[int], max_tokens: int) -> Callable[[Batch], None]:
    """Cuts the model behind its last tap; returns the forward that writes the tapped rows of one batch."""
    decoder = model.get_decoder()
    del decoder.layers[max(taps) + 1 :]
    decoder.config.num_hidden_layers = len(decoder.layers)
    decoder.norm = nn.Identity()
    weight = decoder.layers[0].mlp.down_proj.weight
    packed_TLD = torch.empty(max_tokens, len(taps), weight.shape[0], dtype=weight.dtype, device=weight.device)
    lengths: tuple[int, ...] = ()

    def write(column: int) -> Callable[..., None]:
        def hook(_block: nn.Module, _inputs: object, output: Any) -> None:
            hidden_BSD = output[0] if isinstance(output, tuple) else output
            start = 0
            for row, length in enumerate(lengths):
                packed_TLD[start : start + length, column] = hidden_BSD[row, :length]
                start += length

        return hook

    for column, tap in enumerate(taps):
        decoder.layers[tap].register_forward_hook(write(column))

    def forward(batch: Batch) -> None:
        nonlocal lengths
        ids_BS, mask_BS, lengths = batch
        decoder(input_ids=ids_BS, attention_mask=mask_BS, use_cache=False)

    return forward


def matrix_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Returns what one large matrix product reaches here: the most that a forward could."""
    size = 2048 if device.type == "cpu" else 8192
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best_s = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        torch.mm(left, right)
        _synchronize(device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * size**3 / best_s


def flops_per_token(blocks: nn.ModuleList) -> int:
    """Returns the operations of the blocks' matrices for one token; attention scores and norms are left out."""
    return 2 * sum(parameter.numel() for parameter in blocks.parameters() if parameter.dim() == 2)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def _main(
    *, kind: str, model: str, device: str, dtype: str, threads: int, taps: list[int], workload: dict[str, int]
) -> None:
    if kind == "limit":
        tune_malloc()  # as a replica process does
    torch.set_num_threads(threads)
    disable_progress_bar()
    where, element = torch.device(device), getattr(torch, dtype)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=element, local_files_only=True).to(where).eval()
    works = Workload(**workload)
    batches = [padded(sequences, where) for sequences in works.sequences()]
    forward = plain_loop(loaded) if kind == "plain" else limit_loop(loaded, taps, works.batch_tokens)
    forward(batches[-1])
    blocks = loaded.get_decoder().layers
    reply({"flops_per_token": flops_per_token(blocks), "matrix_flops_per_s": matrix_flops_per_s(where, element)})
    for command in commands():
        began_s = time.perf_counter()
        for batch in batches[command["first"] : command["end"]]:
            forward(batch)
        _synchronize(where)
        reply({"seconds": time.perf_counter() - began_s})


if __name__ == "__main__":
    _main(**json.loads(sys.argv[1]))
