"""Everything a training run needs, in miniature: a target with its tokenizer, prepared data, and real processes.

The target has a padded vocabulary (640 rows, some 500 tokens), as real ones do. Runs are deterministic on the CPU, so
that two of them can be compared bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import psutil
import torch
from safetensors.torch import load_file
from target_wire.channel import channel_options
from target_wire.v1 import target_pb2, target_pb2_grpc

from demo.programs import ending_with_parent
from drafter_trainer.config.resolve import resolve_config
from drafter_trainer.launch import run_training
from drafter_trainer.prepare import PrepareSettings, open_dataset
from tests.support.chaos_proxy import HOST as PROXY_HOST
from tests.support.forking_trainer import ForkedRun
from tests.support.tiny_tokenizer import conversations, write_jsonl, write_tiny_tokenizer

VOCAB_SIZE = 640
HIDDEN_SIZE = 64
MASK_ID = 600
TAPS = (0, 2)
# A loaded machine imports torch in half a minute.
START_TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class TrainingWorld:
    """Paths of what was made."""

    target: Path
    data: Path

    def flags(self, address: str, run_dir: Path, **changes: Any) -> list[str]:
        """Command line flags of a small run; `optim__lr=1` changes --optim.lr, None leaves it out."""
        values: dict[str, Any] = {
            "target.addresses": address,
            # Behind the proxy a server counts as one on another host: nothing may come past it.
            "target.shared_memory": "off" if PROXY_HOST in address else "auto",
            "target.retry_backoff_s": 0.02,
            "target.retry_backoff_max_s": 0.5,
            "target.wait_timeout_s": 60,
            "data.path": self.data,
            "data.tokenizer": self.target,
            "data.max_length_tokens": 96,
            "drafter.num_layers": 1,
            "drafter.block_size": 4,
            "drafter.target_layer_ids": ",".join(map(str, TAPS)),
            "drafter.mask_token_id": MASK_ID,
            "anchors.num_anchors": 8,
            "batch.max_tokens": 160,
            "batch.max_sequences": 4,
            "batch.shuffle_window_samples": 16,
            "optim.lr": 3e-3,
            "run.dir": run_dir,
            "run.steps": 12,
            "run.dtype": "fp32",
            "run.num_threads": 1,
            "run.tensorboard": "false",
            "run.checkpoint_every_steps": 5,
        }
        values.update({name.replace("__", "."): value for name, value in changes.items()})
        given = {name: str(value) for name, value in values.items() if value is not None}
        return [part for name, value in given.items() for part in (f"--{name}", value)]


def make_training_world(directory: Path) -> TrainingWorld:
    """Writes target, tokenizer and prepared data."""
    target = directory / "target"
    write_tiny_tokenizer(target)
    _write_target(target)
    source = write_jsonl(directory / "data.jsonl", conversations(60, max_words=12))
    settings = PrepareSettings(max_length_tokens=96)
    dataset = open_dataset(source, tokenizer=target, settings=settings, prepared_dir=directory / "prepared")
    assert dataset.meta.largest_token_id < VOCAB_SIZE
    return TrainingWorld(target, directory / "prepared")


def _write_target(directory: Path) -> None:
    import transformers  # noqa: PLC0415 - takes seconds

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(5)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)


class Server:
    """A real target-server, in a process group of its own."""

    def __init__(self, world: TrainingWorld, directory: Path, *flags: str, port: int = 0, replicas: int = 1) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._port_file = directory / f"port-{time.monotonic_ns()}"
        self.log = directory / "server.log"
        command = [
            sys.executable, "-m", "target_server", "serve",
            "--model.path", str(world.target),
            "--listen", f"127.0.0.1:{port}",
            "--devices", ",".join(["cpu"] * replicas),
            "--port-file", str(self._port_file),
            "--replica.num_threads", "1",
            *flags,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(ending_with_parent(command), stdout=log, stderr=log, start_new_session=True)
        self._port: int | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """The front's port, once it serves."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self._port is None:
            if self._port_file.exists():
                self._port = int(self._port_file.read_text().strip().rpartition(":")[2])
                break
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline_s, f"the server does not serve:\n{self.log.read_text()}"
            time.sleep(0.05)
        return self._port

    @property
    def address(self) -> str:
        """HOST:PORT of the front, once it serves."""
        return f"127.0.0.1:{self.port}"

    def replica_pids(self) -> list[int]:
        """Processes of the replicas that run now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            return [child.pid for child in children if "replica_process" in " ".join(child.cmdline())]
        return []

    def describe(self) -> target_pb2.DescribeTargetResponse:
        """What the front answers."""
        with grpc.insecure_channel(self.address, options=channel_options()) as channel:
            front = target_pb2_grpc.TargetFrontServiceStub(channel)
            return front.DescribeTarget(target_pb2.DescribeTargetRequest(), timeout=10)

    def serving_pids(self) -> list[int]:
        """Processes of the replicas that the front lists as serving."""
        ports = {replica.port for replica in self.describe().replicas if replica.port}
        return [pid for pid in self.replica_pids() if ports & listening_ports(pid)]

    def kill(self) -> None:
        """The front dies at once; what becomes of its replicas is the server's business."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ends the whole group."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which a process listens; none when it's gone."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        connections = psutil.Process(pid).net_connections(kind="tcp")
        return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
    return set()


class Trainer:
    """A real drafter-trainer process, one rank."""

    def __init__(self, flags: Sequence[str], log: Path, *, environment: dict[str, str] | None = None) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                ending_with_parent([sys.executable, "-m", "drafter_trainer", "train", *flags]),
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
            )

    def wait(self, timeout_s: float = 300.0) -> int:
        """Its exit code.

        Raises:
            AssertionError: It still runs after ``timeout_s`` seconds.
        """
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the trainer still ran after {timeout_s:g} s:\n{self.text()}") from None

    @property
    def has_ended(self) -> bool:
        """Whether it's over, however it ended."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """Ends it as a power cut would."""
        self.process.kill()
        self.process.wait()

    def text(self) -> str:
        """Everything it has said."""
        return self.log.read_text()

    def wait_for_line(self, part: str, timeout_s: float = 300.0) -> None:
        """Waits until it has said something."""
        deadline_s = time.monotonic() + timeout_s
        while part not in self.text():
            assert self.process.poll() is None, f"the trainer ended before {part!r}:\n{self.text()}"
            assert time.monotonic() < deadline_s, f"no {part!r} from the trainer:\n{self.text()}"
            time.sleep(0.02)


def wait_for_step(run_dir: Path, step: int, trainer: Trainer | ForkedRun, timeout_s: float = 300.0) -> None:
    """Waits until a run has recorded a step."""
    deadline_s = time.monotonic() + timeout_s
    while not any(record["step"] >= step for record in read_records(run_dir / "metrics.jsonl")):
        if trainer.has_ended:
            return  # it was faster
        assert time.monotonic() < deadline_s, f"step {step} is not reached:\n{trainer.text()}"
        time.sleep(0.01)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def final_state(run_dir: Path) -> dict[str, Any]:
    """What two equal runs must have in common: weights, optimizer, counters, consumed samples, losses."""
    latest = run_dir / "checkpoints" / "latest"
    state = json.loads((latest / "state.json").read_text())
    metrics = read_records(run_dir / "metrics.jsonl")
    return {
        "model": load_file(latest / "model.safetensors"),
        "moments": load_file(latest / "optimizer.safetensors"),
        "average": load_file(average) if (average := latest / "average.safetensors").exists() else {},
        "optimizer": state["optimizer"],
        "progress": (state["step"], state["position"], state["counters"]),
        "consumed": read_records(run_dir / "consumed-rank-0.jsonl"),
        "losses": [(m["step"], m["loss"], m["lr"], m["grad_norm"], m["accept_len"]) for m in metrics],
    }


def assert_same_run(run_dir: Path, reference: dict[str, Any]) -> None:
    """Asserts that a run ended bit-equal to another (I6)."""
    state = final_state(run_dir)
    for name in ("progress", "consumed", "losses", "optimizer"):
        assert state[name] == reference[name], name
    for name in ("model", "moments", "average"):
        assert state[name].keys() == reference[name].keys()
        for key, tensor in reference[name].items():
            assert torch.equal(state[name][key], tensor), f"{name} {key}"


def train(world: TrainingWorld, address: str, run_dir: Path, **changes: Any) -> bool:
    """A run in this process; whether it was finished."""
    return run_training(resolve_config(flags=world.flags(address, run_dir, **changes)).config)


@contextlib.contextmanager
def running_server(world: TrainingWorld, directory: Path, **options: Any) -> Iterator[Server]:
    """A server that serves."""
    with Server(world, directory, **options) as server:
        assert server.port
        yield server
