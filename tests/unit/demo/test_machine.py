"""Decisions that depend on the machine."""

from __future__ import annotations

import os

import pytest

from demo.machine import Machine, available_cores, measure_machine, steps_that_fit

SLOW_BF16 = Machine(cores=2, fp32_gflop_s=30.0, bf16_gflop_s=5.0)
FAST_BF16 = Machine(cores=8, fp32_gflop_s=50.0, bf16_gflop_s=400.0)


def test_the_faster_element_type_is_chosen() -> None:
    assert (SLOW_BF16.dtype, SLOW_BF16.gflop_s) == ("fp32", 30.0)
    assert (FAST_BF16.dtype, FAST_BF16.gflop_s) == ("bf16", 400.0)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (8, 4)])
def test_two_programs_never_get_more_threads_than_cores(cores: int, threads: int) -> None:
    assert Machine(cores, 1.0, 1.0).threads_each == threads


def test_steps_fill_the_time_in_multiples_of_ten() -> None:
    # 30 GFLOP at 30 GFLOP/s and 0.25 s: 1.25 s a step, 240 steps in 300 s.
    assert steps_that_fit(309.0, step_gflop=30.0, step_overhead_s=0.25, machine=SLOW_BF16) == 240
    assert steps_that_fit(-5.0, step_gflop=30.0, step_overhead_s=0.25, machine=SLOW_BF16) == 10


def test_measured_speed_is_that_of_the_matrix_product() -> None:
    machine = measure_machine(seconds=0.05)
    assert machine.cores == available_cores() == len(os.sched_getaffinity(0))
    # Any core since 2010 makes between 0.1 and 10 000 GFLOP/s.
    assert 0.1 < machine.fp32_gflop_s < 10_000
    assert 0.01 < machine.bf16_gflop_s < 10_000
