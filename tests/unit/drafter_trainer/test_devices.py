"""What "auto" means for device, type and threads."""

from __future__ import annotations

import os

import pytest
import torch

from drafter_trainer import devices


def test_threads_are_shared_out_among_busy_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [devices.resolve_num_threads(None, processes_here=n) for n in (1, 2, 3, 9)] == [8, 4, 2, 1]
    assert devices.resolve_num_threads(5, processes_here=2) == 5


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bf16_only_where_the_cpu_multiplies_it(
    native: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "cpu_multiplies_bf16", lambda: native)
    cpu = torch.device("cpu")
    assert devices.resolve_compute_dtype("auto", cpu) == dtype
    assert devices.resolve_compute_dtype("bf16", cpu) == torch.bfloat16
    assert devices.resolve_compute_dtype("fp32", torch.device("cuda")) == torch.float32


def test_a_rank_takes_its_own_card_and_a_missing_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.resolve_device("auto", local_rank=1) == torch.device("cuda", 1)
    assert devices.resolve_device("cuda:0", local_rank=1) == torch.device("cuda", 0)
    assert devices.resolve_device("cpu", local_rank=1) == torch.device("cpu")
    with pytest.raises(ValueError, match="this machine has 2 CUDA devices; start at most 2 ranks on it, or cpu"):
        devices.resolve_device("auto", local_rank=2)
    with pytest.raises(ValueError, match="this machine has 2 CUDA devices; give cuda:0 to cuda:1, or cpu"):
        devices.resolve_device("cuda:2")


def test_a_machine_without_cuda_is_told_to_use_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"^this machine has no CUDA device; give cpu$"):
        devices.resolve_device("cuda:0")


def test_the_processor_can_be_asked() -> None:
    assert devices.cpu_multiplies_bf16() in (True, False)
