"""Fixtures for every test: fixed seeds, one thread, and hypothesis without chance.

Warnings are errors and every test has a timeout (pyproject.toml). Add fixtures here only when several rooms share them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support.training_world import Server, TrainingWorld

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


@pytest.fixture(scope="session")
def training_world(tmp_path_factory: pytest.TempPathFactory) -> TrainingWorld:
    """A tiny target with tokenizer and prepared data. Read only."""
    from tests.support.training_world import make_training_world  # noqa: PLC0415 - transformers takes seconds

    return make_training_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def training_server(training_world: TrainingWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of that target with two replicas, for tests that leave it alone."""
    from tests.support.training_world import running_server  # noqa: PLC0415

    with running_server(training_world, tmp_path_factory.mktemp("server"), replicas=2) as server:
        yield server
