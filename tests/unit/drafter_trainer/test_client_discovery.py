"""Addresses and waiting for the target."""

from __future__ import annotations

import socket
import time

import pytest
from target_wire.v1 import target_pb2 as pb

from drafter_trainer.client.addresses import check_address
from drafter_trainer.client.discovery import (
    TargetAbsentError,
    TargetsDifferError,
    replica_address,
    serving_addresses,
    wait_for_target,
)
from tests.support.fake_target import FakeTarget


@pytest.mark.parametrize("address", ["localhost:1", "10.0.0.1:65535", "[::1]:50051", "unix:/run/t.sock", "a-b.c:80"])
def test_an_address_is_taken(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    "address", ["", "localhost", "localhost:", ":80", "host:0", "host:65536", "http://h:1", "::1:5", "unix:", "h:1:2"]
)
def test_anything_else_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        check_address(address)


@pytest.mark.parametrize(
    ("front", "replica", "expected"),
    [
        ("server:1", pb.Replica(address="10.0.0.7:5"), "10.0.0.7:5"),
        ("server:1", pb.Replica(address=":5"), "server:5"),
        ("server:1", pb.Replica(address="", port=5), "server:5"),
        ("[::1]:1", pb.Replica(address=":5"), "[::1]:5"),
        ("unix:/front", pb.Replica(address=":5"), "localhost:5"),
        ("server:1", pb.Replica(address="unix:/replica"), "unix:/replica"),
    ],
)
def test_a_replica_without_a_host_has_the_fronts(front: str, replica: pb.Replica, expected: str) -> None:  # case 84
    assert replica_address(front, replica) == expected


def test_only_serving_replicas_count() -> None:
    states = (pb.REPLICA_STATE_LOADING, pb.REPLICA_STATE_SERVING, pb.REPLICA_STATE_RESTARTING, pb.REPLICA_STATE_FAILED)
    replicas = [pb.Replica(index=i, port=10 + i, state=state) for i, state in enumerate(states)]
    assert serving_addresses("h:1", pb.DescribeTargetResponse(replicas=replicas)) == ["h:11"]


def test_waiting_ends_with_the_reason_of_every_front() -> None:
    said: list[str] = []
    started_s = time.monotonic()
    with pytest.raises(
        TargetAbsentError, match=r"\(127\.0\.0\.1:1: connection refused; 127\.0\.0\.1:2: connection refused\)"
    ):
        wait_for_target(["127.0.0.1:1", "127.0.0.1:2"], timeout_s=0.7, say=said.append)
    assert time.monotonic() - started_s < 20
    assert len(said) == 1  # a line at once, the next one only ten seconds later
    assert "(127.0.0.1:1: connection refused; 127.0.0.1:2: connection refused)" in said[0]
    assert len(said[0]) < 150


def test_the_first_front_that_answers_is_taken() -> None:
    with FakeTarget() as target:
        described = wait_for_target(["127.0.0.1:1", target.address], timeout_s=30, say=lambda line: None)
    assert described.address == target.address
    assert described.response.model.architecture == "Fake"


def test_a_silent_front_delays_an_answer_by_one_call_at_most() -> None:
    with FakeTarget() as target, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        addresses = [f"127.0.0.1:{silent.getsockname()[1]}", target.address]
        started_s = time.monotonic()
        described = wait_for_target(addresses, timeout_s=30, say=lambda line: None, call_timeout_s=1.0)
        assert time.monotonic() - started_s < 5
    assert described.address == target.address


def test_servers_of_different_targets_are_refused() -> None:  # I3
    with FakeTarget() as one, FakeTarget(digest="other") as other, FakeTarget() as same:
        wait_for_target([one.address, same.address], timeout_s=30, say=lambda line: None)
        with pytest.raises(TargetsDifferError, match=rf"{one.address} serves 0123.* and {other.address} serves other"):
            wait_for_target([one.address, other.address], timeout_s=30, say=lambda line: None)
