"""Fixtures for every test: fixed seeds, one thread, and hypothesis without chance.

Warnings are errors and every test has a timeout (pyproject.toml). Add fixtures here only when several rooms share them.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# "ci" always tries the same few examples, so that a red run is red again. "deep" searches: HYPOTHESIS_PROFILE=deep.
settings.register_profile(
    "ci", derandomize=True, max_examples=40, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("deep", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Two test processes and their servers share the machine's cores: more threads each would only fight.
torch.set_num_threads(1)

SEED = 20240607


@pytest.fixture(autouse=True)
def fixed_seed() -> int:
    """Seeds every generator before each test; returns the seed."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    return SEED


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny ChatML tokenizer, as a target's would be. Read only."""
    from tests.support.tiny_tokenizer import write_tiny_tokenizer  # noqa: PLC0415 - transformers takes seconds

    return write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
