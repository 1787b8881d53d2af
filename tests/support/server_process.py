"""`target-server` as a user runs it: real processes, on free ports, always cleaned up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from target_wire.channel import channel_options
from target_wire.v1 import target_pb2 as pb
from target_wire.v1 import target_pb2_grpc

from demo.programs import ending_with_parent

# Importing torch and transformers takes 5 seconds, and ten times that beside other test processes.
START_TIMEOUT_S = 240.0


class ServerProcess:
    """A running front with its replicas.

    Attributes:
        address: of the front.
        process: the front.
    """

    def __init__(self, checkpoint: Path, work: Path, *flags: str) -> None:
        self._port_file = work / "port"
        self._log = (work / "server.log").open("wb")
        command = [
            *(sys.executable, "-m", "target_server", "serve"),
            *("--model.path", str(checkpoint), "--listen", "127.0.0.1:0", "--port-file", str(self._port_file)),
            *("--replica.num_threads", "1", *flags),
        ]
        self.process = subprocess.Popen(ending_with_parent(command), stdout=self._log, stderr=subprocess.STDOUT)

    def wait_until_serving(self) -> None:
        """Waits for the port file."""
        wait_until(lambda: self._port_file.exists() or self.process.poll() is not None, START_TIMEOUT_S)
        assert self._port_file.exists(), self.log()
        self.address = f"127.0.0.1:{self._port_file.read_text().strip()}"

    def describe(self) -> pb.DescribeTargetResponse:
        """Returns what the front answers."""
        with grpc.insecure_channel(self.address, options=channel_options()) as channel:
            return target_pb2_grpc.TargetFrontServiceStub(channel).DescribeTarget(
                pb.DescribeTargetRequest(), timeout=10
            )

    def replica_address(self, index: int = 0) -> str:
        """Returns where a serving replica's data endpoint is."""
        return f"127.0.0.1:{self.describe().replicas[index].port}"

    def replica_pids(self) -> list[int]:
        """Returns the replica processes in the order of their starts."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return sorted(int(pid) for pid in children)

    def log(self) -> str:
        """Returns what was printed so far."""
        return Path(self._log.name).read_text(errors="replace")

    def close(self) -> None:
        """Ends everything, whatever state it is in."""
        pids = self.replica_pids() if self.process.poll() is None else []
        for pid in [self.process.pid, *pids]:
            if pid != self.process.pid or self.process.poll() is None:
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        self._log.close()


@contextmanager
def running_server(checkpoint: Path, work: Path, *flags: str) -> Iterator[ServerProcess]:
    """Runs a server for the time of a block."""
    server = ServerProcess(checkpoint, work, *flags)
    try:
        server.wait_until_serving()
        yield server
    finally:
        server.close()


def status_json(address: str) -> dict[str, Any]:
    """Returns what `target-server status --json` prints."""
    command = [sys.executable, "-m", "target_server", "status", address, "--json"]
    return json.loads(subprocess.run(command, timeout=60, check=True, capture_output=True).stdout)


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie doesn't)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Any, timeout_s: float = 30.0) -> None:
    """Waits until the condition holds; fails after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
