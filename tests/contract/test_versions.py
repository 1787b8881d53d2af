"""What pyproject.toml admits, constraints-dev.txt takes and generated code was made by, agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNTIME = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = [Requirement(line) for lines in PROJECT["optional-dependencies"].values() for line in lines]
GENERATED = ROOT / "proto" / "target_wire" / "v1"


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints-dev.txt").read_text().splitlines()
    requirements = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in requirements}


def floor_of(package: str) -> Version:
    (requirement,) = (requirement for requirement in RUNTIME if requirement.name == package)
    (floor,) = (spec.version for spec in requirement.specifier if spec.operator == ">=")
    return Version(floor)


@pytest.mark.parametrize("requirement", RUNTIME + EXTRAS, ids=lambda requirement: requirement.name)
def test_requirement_is_pinned_within_what_is_admitted(requirement: Requirement) -> None:
    assert pins()[canonicalize_name(requirement.name)] in requirement.specifier


def test_protobuf_floor_admits_no_runtime_that_refuses_the_generated_code() -> None:
    made_by = re.search(r"Protobuf Python Version: ([\d.]+)", (GENERATED / "target_pb2.py").read_text())
    assert made_by is not None
    assert floor_of("protobuf") >= Version(made_by[1])


def test_grpc_floor_admits_no_runtime_that_refuses_the_generated_code() -> None:
    made_by = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", (GENERATED / "target_pb2_grpc.py").read_text())
    assert made_by is not None
    assert floor_of("grpcio") >= Version(made_by[1])
    for package in ("grpcio-status", "grpcio-health-checking", "grpcio-reflection"):
        assert floor_of(package) == floor_of("grpcio")
