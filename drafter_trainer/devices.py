"""Where and in what type the drafter computes: device, compute type, CPU threads.

Owns the meaning of "auto" for each. Weights are fp32 in every case; the compute type is autocast's.
"""

from __future__ import annotations

import logging
import os

import torch

__all__ = ["pin_host_memory", "resolve_compute_dtype", "resolve_device", "resolve_num_threads"]

logger = logging.getLogger(__name__)

_NAMED = {"bf16": torch.bfloat16, "fp32": torch.float32}


def resolve_device(name: str, *, local_rank: int = 0) -> torch.device:
    """The device a rank computes on.

    Raises:
        ValueError: A CUDA device that this machine doesn't have.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    index = local_rank if device.index is None else device.index
    if not count:
        raise ValueError("this machine has no CUDA device; give cpu")
    if index >= count:
        fix = f"start at most {count} ranks on it" if device.index is None else f"give cuda:0 to cuda:{count - 1}"
        raise ValueError(f"this machine has {count} CUDA devices; {fix}, or cpu")
    return torch.device("cuda", index)


def resolve_compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of the drafter's products; "auto" is bf16 where the hardware multiplies it natively.

    Without native products bf16 is emulated: 6 times slower than fp32 on an AVX2 machine.
    """
    if name != "auto":
        return _NAMED[name]
    native = device.type == "cuda" or cpu_multiplies_bf16()
    return torch.bfloat16 if native else torch.float32


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has AVX512-BF16 or AMX."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def resolve_num_threads(given: int | None, *, processes_here: int) -> int:
    """CPU threads for torch in this process.

    Args:
        given: As configured; None shares the cores out.
        processes_here: Busy processes on this machine, this one included (ranks, and a server on the same host). A
            second busy process beside two OpenMP threads on two cores slows them 3 to 10 times: they spin and wait.
    """
    if given is not None:
        return given
    return max(1, len(os.sched_getaffinity(0)) // max(processes_here, 1))


def pin_host_memory(view: memoryview) -> bool:
    """Page-locks memory that is not torch's, so that copies from it to a CUDA device run beside the host.

    The memory must stay mapped while the process lives or uses the device. Without enough lockable memory copies are
    slower and nothing else changes.

    Returns:
        Whether it's pinned.
    """
    whole = torch.frombuffer(view, dtype=torch.uint8)
    error = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)  # type: ignore[no-untyped-call]
    if int(error) != 0:
        logger.warning("%d bytes of batch memory can't be pinned (CUDA error %d)", whole.numel(), int(error))
    return int(error) == 0
