"""Fixtures for every test: fixed seeds, one thread, and hypothesis without chance.

Warnings are errors and every test has a timeout (pyproject.toml). Add fixtures here only when several rooms share them.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support.forking_trainer import ForkingTrainer
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

# Started in the background by a script (`make test &`), a process and all that it starts would ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the seeds of the fault runs: FAULT_SEEDS=7,8 repeats these, SOAK=N draws N new ones, else it's seed 1."""
    drawn = [str(time.time_ns() % 10**6 + index) for index in range(int(os.environ.get("SOAK", "0")))]
    # In the environment, where this process's workers find the same ones.
    os.environ.setdefault("FAULT_SEEDS", ",".join(drawn) or "1")


def pytest_collection_finish() -> None:
    """Leaves what was imported out of garbage collection: a million objects that stay."""
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    """Tells the seeds, before anything can hang."""
    return f"fault runs: FAULT_SEEDS={os.environ['FAULT_SEEDS']}"


@pytest.fixture(autouse=True)
def fixed_seed() -> int:
    """Seeds every generator before each test, and gives it one thread; returns the seed."""
    # A command that an earlier test ran in this process may have chosen others, and sums round by how they are split.
    torch.set_num_threads(1)
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


@pytest.fixture(scope="session")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkingTrainer]:
    """Starts training processes quickly."""
    from tests.support.forking_trainer import ForkingTrainer  # noqa: PLC0415

    with ForkingTrainer(tmp_path_factory.mktemp("trainers")) as forking:
        yield forking
