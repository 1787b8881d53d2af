"""The real target of parts *stream* and *overlap*, and how it is run on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.options import BenchError, Options
from bench.workload import Workload
from demo.errors import DemoError
from demo.smollm2 import ensure_smollm2
from drafter_trainer.drafter_config import default_target_layer_ids

__all__ = ["RealTarget", "real_target"]

_LAYER_COUNT = 30
_HIDDEN_SIZE = 576
_VOCAB_SIZE = 49_152
_TAPS = 5


@dataclass(frozen=True)
class RealTarget:
    """SmolLM2-135M-Instruct and its batches.

    Attributes:
        path: its directory.
        device: "cuda:0" where there is one, else "cpu".
        dtype: bfloat16 beside a GPU; float32 on a CPU, which may have to emulate bfloat16.
        threads: compute threads. One core is left to the client, as on a GPU's host.
        taps: where the published trainers tap a model of this depth.
        hidden_size: width.
        workload: the batches.
    """

    path: Path
    device: str
    dtype: str
    threads: int
    taps: tuple[int, ...]
    hidden_size: int
    workload: Workload

    def argument(self) -> dict[str, Any]:
        """Returns what a child process needs to run it."""
        return {
            "model": str(self.path),
            "device": self.device,
            "dtype": self.dtype,
            "threads": self.threads,
            "taps": list(self.taps),
            "workload": self.workload.as_json(),
        }


def real_target(options: Options) -> RealTarget:
    """Returns the target, downloaded and converted on the first call.

    Raises:
        BenchError: it can't be had.
    """
    try:
        path = ensure_smollm2(options.cache)
    except DemoError as error:
        raise BenchError(str(error)) from error
    on_gpu = torch.cuda.is_available()
    workload = Workload(
        batches=options.pick(full=64 if on_gpu else 4, quick=2),
        batch_tokens=8192 if on_gpu else options.pick(full=512, quick=128),
        shortest=16,
        longest=1024 if on_gpu else options.pick(full=256, quick=64),
        vocab_size=_VOCAB_SIZE,
    )
    return RealTarget(
        path=path,
        device="cuda:0" if on_gpu else "cpu",
        dtype="bfloat16" if on_gpu else "float32",
        threads=max(1, len(os.sched_getaffinity(0)) - 1),
        taps=default_target_layer_ids(_LAYER_COUNT, _TAPS),
        hidden_size=_HIDDEN_SIZE,
        workload=workload,
    )
