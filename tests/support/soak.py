"""What takes longer than `make test` may and runs in `make soak`, and the seeds of the fault runs."""

from __future__ import annotations

import os

import pytest

__all__ = ["FAULT_SEEDS", "SOAKS", "soak_only"]

SOAKS = "SOAK" in os.environ

# tests/conftest.py draws them, once for all test processes.
FAULT_SEEDS = [int(seed) for seed in os.environ["FAULT_SEEDS"].split(",")]

soak_only = pytest.mark.skipif(not SOAKS, reason="takes long; run by `make soak`")
