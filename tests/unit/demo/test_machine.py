"""Decisions that depend on the machine."""

from __future__ import annotations

import os

from demo.machine import Machine, available_cores, measure_machine, steps_that_fit

SLOW_BF16 = Machine(cores=2, fp32_gflop_s=30.0, bf16_gflop_s=5.0)
FAST_BF16 = Machine(cores=8, fp32_gflop_s=50.0, bf16_gflop_s=400.0)


def test_the_faster_element_type_is_chosen() -> None:
    assert (SLOW_BF16.dtype, SLOW_BF16.gflop_s) == ("fp32", 30.0)
    assert (FAST_BF16.dtype, FAST_BF16.gflop_s) == ("bf16", 400.0)


def test_steps_fill_the_time_in_multiples_of_ten() -> None:
    # 60 GFLOP at 2 x 30 GFLOP/s and 0.25 s: 1.25 s a step, 240 steps in 300 s.
    assert steps_that_fit(309.0, step_gflop=60.0, step_overhead_s=0.25, machine=SLOW_BF16) == 240
    assert steps_that_fit(-5.0, step_gflop=60.0, step_overhead_s=0.25, machine=SLOW_BF16) == 10
    assert steps_that_fit(1e6, step_gflop=60.0, step_overhead_s=0.25, machine=SLOW_BF16) == 3000


def test_measured_speed_is_that_of_the_matrix_product() -> None:
    machine = measure_machine(seconds=0.05)
    assert machine.cores == available_cores() == len(os.sched_getaffinity(0))
    # Any core since 2010 makes between 0.1 and 10 000 GFLOP/s.
    assert 0.1 < machine.fp32_gflop_s < 10_000
    assert 0.01 < machine.bf16_gflop_s < 10_000
