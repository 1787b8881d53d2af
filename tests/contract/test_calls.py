"""Every call of the contract is served, with its own streaming kind, and the paths that clients write by hand exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from target_wire.v1 import target_pb2, target_pb2_grpc

from target_server.front import FrontServicer
from target_server.servicer import ReplicaServicer, build_handler

ROOT = Path(__file__).parents[2]
SERVICES = target_pb2.DESCRIPTOR.services_by_name
FRONT = SERVICES["TargetFrontService"]
REPLICA = SERVICES["TargetReplicaService"]


class HandlerCall(grpc.HandlerCallDetails):
    """What grpc asks a handler with."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def strings_in(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_service_is_forgotten_here() -> None:
    assert set(SERVICES) == {FRONT.name, REPLICA.name}


@pytest.mark.parametrize("method", list(FRONT.methods), ids=lambda method: method.name)
def test_front_serves_the_call(method: MethodDescriptor) -> None:
    generated = getattr(target_pb2_grpc.TargetFrontServiceServicer, method.name)
    assert getattr(FrontServicer, method.name) is not generated


@pytest.mark.parametrize("method", list(REPLICA.methods), ids=lambda method: method.name)
def test_replica_serves_the_call_as_the_contract_says(method: MethodDescriptor) -> None:
    handler = build_handler(object.__new__(ReplicaServicer)).service(HandlerCall(path_of(method)))
    assert handler is not None
    assert handler.request_streaming == method.client_streaming
    assert handler.response_streaming == method.server_streaming
    parse = handler.request_deserializer
    assert parse(b"").DESCRIPTOR is method.input_type


@pytest.mark.parametrize("room", ["target_server", "drafter_trainer"])
def test_paths_written_by_hand_exist(room: str) -> None:
    known = {path_of(method) for service in SERVICES.values() for method in service.methods}
    written = {
        text
        for source in (ROOT / room).rglob("*.py")
        for text in strings_in(source)
        if re.fullmatch(r"/target_wire\.v1\.\w+/\w+", text)
    }
    assert written <= known


@pytest.mark.parametrize("name", ["DescribeTarget", "StreamHiddenStates", "FetchHead"])
def test_trainer_makes_the_call(name: str) -> None:
    sources = [ast.parse(file.read_text()) for file in (ROOT / "drafter_trainer" / "client").glob("*.py")]
    attributes = {node.attr for tree in sources for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    strings = {text for file in (ROOT / "drafter_trainer" / "client").glob("*.py") for text in strings_in(file)}
    assert name in attributes or any(text.endswith(f"/{name}") for text in strings)
