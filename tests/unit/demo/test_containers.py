"""The container files say what they should; whether the containers run is tried by hand with an engine."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

CHECKOUT = Path(__file__).resolve().parents[3]


def _compose(name: str) -> dict[str, Any]:
    return yaml.safe_load((CHECKOUT / name).read_text(encoding="utf-8"))


SERVICES = _compose("docker/compose.yaml")["services"]
GPU_SERVICES = _compose("docker/compose.gpu.yaml")["services"]


def test_root_compose_file_includes_the_one_in_docker() -> None:
    assert _compose("compose.yaml")["include"] == ["docker/compose.yaml"]


def test_trainer_waits_for_a_healthy_server() -> None:
    assert SERVICES["drafter-trainer"]["depends_on"] == {"target-server": {"condition": "service_healthy"}}
    assert SERVICES["target-server"]["healthcheck"]["test"][:3] == ["CMD", "target-server", "status"]


def test_results_appear_in_runs_of_the_checkout() -> None:
    service = SERVICES["drafter-trainer"]
    assert service["volumes"] == ["../runs:/runs"]
    assert any(word.startswith("--run.dir=/runs/") for word in service["command"])
    assert service["entrypoint"] == ["run_as_owner", "/runs"]


def test_no_port_reaches_the_host() -> None:
    assert not any("ports" in service for service in SERVICES.values())
    assert _compose("docker/compose.yaml")["networks"]["features"] == {"internal": True}


def test_gpu_file_gives_five_cards_to_the_server_and_three_to_the_trainer() -> None:
    cards = {
        name: service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, service in GPU_SERVICES.items()
    }
    assert cards == {"target-server": ["0", "1", "2", "3", "4"], "drafter-trainer": ["5", "6", "7"]}
    # Within a container its cards are numbered from 0: a replica on each, a rank on each.
    assert "--devices=cuda:0,cuda:1,cuda:2,cuda:3,cuda:4" in GPU_SERVICES["target-server"]["command"]
    assert "--nproc-per-node=3" in GPU_SERVICES["drafter-trainer"]["command"]


@pytest.mark.parametrize("service", [*SERVICES.values(), *GPU_SERVICES.values()])
def test_configs_that_containers_name_exist(service: dict[str, Any]) -> None:
    named = [word.partition("=")[2] for word in service["command"] if word.startswith("--config=")]
    assert named
    for name in named:
        assert (CHECKOUT / re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", name)).is_file()


def test_everything_the_dockerfile_copies_reaches_the_build() -> None:
    dockerfile = (CHECKOUT / "docker/Dockerfile").read_text(encoding="utf-8")
    allowed = {
        line[1:] for line in (CHECKOUT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"
    }
    copied = {
        source
        for line in re.findall(r"^COPY (.*)$", dockerfile, flags=re.MULTILINE)
        for source in [word for word in line.split() if not word.startswith("--")][:-1]
    }
    assert copied == allowed
    assert all((CHECKOUT / source).exists() for source in copied)


def test_image_does_not_run_as_root() -> None:
    dockerfile = (CHECKOUT / "docker/Dockerfile").read_text(encoding="utf-8")
    users = re.findall(r"^USER (\w+)$", dockerfile, flags=re.MULTILINE)
    assert users[-1] == "tributary"
    assert re.search(r"^ARG BASE_IMAGE=python:3\.11-slim\nFROM \$\{BASE_IMAGE\}", dockerfile, flags=re.MULTILINE)


def _run_as_owner(directory: Path) -> int:
    """User id that a command has when it is run as the owner of a directory."""
    command = ["sh", str(CHECKOUT / "docker/run_as_owner.sh"), str(directory), "id", "-u"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout)


def _is_true_root() -> bool:
    return os.getuid() == 0 and Path("/proc/self/uid_map").read_text().split()[1] == "0"


@pytest.mark.skipif(not _is_true_root(), reason="only root can step down to another user")
def test_root_steps_down_to_the_owner_of_the_directory(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    assert _run_as_owner(tmp_path) == 12345


@pytest.mark.skipif(_is_true_root(), reason="root steps down")
def test_anyone_else_stays_who_they_are(tmp_path: Path) -> None:
    assert _run_as_owner(tmp_path) == os.getuid()
