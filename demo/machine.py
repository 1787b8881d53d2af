"""Measures what this machine computes and decides from it: element type, and how many steps fit.

Owns every decision that depends on the machine, so that the demo takes about the same time everywhere and only the
number of steps differs. It must never guess from a processor's name or flags: cores without bf16 instructions emulate
them (twenty times slower than fp32 on one, four times faster on the next), and a shared core computes half of what it
says.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Machine", "available_cores", "measure_machine", "steps_that_fit"]

_SIZE = 512  # rows and columns of the measured product: like the drafter's own, and within a core's cache
_STEPS_MULTIPLE = 10
_MAX_STEPS = 3000


@dataclass(frozen=True)
class Machine:
    """What was measured.

    Attributes:
        cores: Processors this process may use.
        fp32_gflop_s: Giga floating-point operations a second of one core, with one more core busy where there is one.
        bf16_gflop_s: The same in bfloat16.
    """

    cores: int
    fp32_gflop_s: float
    bf16_gflop_s: float

    @property
    def dtype(self) -> str:
        """The faster element type: "bf16" or "fp32"."""
        return "bf16" if self.bf16_gflop_s > self.fp32_gflop_s else "fp32"

    @property
    def gflop_s(self) -> float:
        """Speed of one core in that type."""
        return max(self.bf16_gflop_s, self.fp32_gflop_s)


def available_cores() -> int:
    """Processors this process may use: fewer than the machine's in a container or under taskset."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure_machine(*, seconds: float = 1.0) -> Machine:
    """Multiplies matrices for `seconds` in all, one thread a core, on two cores at once where there are two.

    Leaves torch with one thread in this process: the demo's own process has nothing to compute while others train.
    """
    import torch  # noqa: PLC0415  # seconds, which a mistyped flag need not wait for

    torch.set_num_threads(1)
    cores = available_cores()
    speed = {dtype: _gflop_s(dtype, seconds / 2, busy=min(2, cores)) for dtype in (torch.float32, torch.bfloat16)}
    return Machine(cores, fp32_gflop_s=speed[torch.float32], bf16_gflop_s=speed[torch.bfloat16])


def steps_that_fit(seconds: float, *, step_gflop: float, step_overhead_s: float, machine: Machine) -> int:
    """Returns how many training steps fit into `seconds`: a multiple of 10, from 10 to 3000.

    Args:
        seconds: Time for training alone.
        step_gflop: Work of one step in giga floating-point operations, as far as matrix products go.
        step_overhead_s: What a step takes besides, on any machine.
        machine: The measured machine.
    """
    step_s = step_gflop / (machine.gflop_s * machine.cores) + step_overhead_s
    return min(_MAX_STEPS, max(_STEPS_MULTIPLE, int(seconds / step_s) // _STEPS_MULTIPLE * _STEPS_MULTIPLE))


def _gflop_s(dtype: torch.dtype, seconds: float, *, busy: int) -> float:
    """Mean speed of `busy` cores that all multiply at once. torch lets go of the interpreter's lock meanwhile."""
    import torch  # noqa: PLC0415  # as above

    speeds: list[float] = []

    def multiply() -> None:
        a = torch.randn(_SIZE, _SIZE).to(dtype)
        a @ a  # the first product also prepares the kernel
        started, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - started) < seconds or count == 0:
            a @ a
            count += 1
        speeds.append(count * 2 * _SIZE**3 / elapsed / 1e9 if elapsed else 0.0)

    threads = [threading.Thread(target=multiply) for _ in range(busy)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(speeds) / len(speeds)
