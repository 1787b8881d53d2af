"""Part *swap*: what a swap takes from the clients of a replica, on a real model and a perturbed copy of it.

One client discards what one replica makes; windows with and without swaps take turns. While `--dry-run` swaps follow
one another, a replica reads and checks a whole checkpoint all the time: what is left of the speed is the throughput
during prepare, with a core that the forwards leave free and, on a CPU, also without. Then real swaps back and forth:
the time in which no batch was made, as the server counts it and as the client sees it, over the time of the weights'
plain copy and one forward, both measured between the swaps.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from sys import executable

import grpc
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from target_wire.channel import channel_options
from target_wire.spec import DType
from target_wire.v1 import target_pb2, target_pb2_grpc

from bench.options import BenchError, Options, say
from bench.pairs import ratios, take_turns
from bench.rank import DiscardingRank, Work, discarding_rank
from bench.results import Figure, figure
from bench.swap_client import swap_messages, swap_to
from bench.target import RealTarget, real_target
from demo.errors import DemoError
from demo.programs import start_program, wait_for_file
from drafter_trainer.client.terms import StreamTerms

__all__ = ["run"]

_START_TIMEOUT_S = 300.0
_STATS_TIMEOUT_S = 30.0
_SLOTS = 4  # batches that the client asks for ahead
_MIN_BATCHES = 4  # of a window, beside those
_BEFORE_S = 2.0  # that batches are received before and after a swap, for the usual time of one
_WEIGHTS = "model.safetensors"
# A thousandth of each value: other weights everywhere, and all of them finite.
_PERTURBATION = 1.001


@dataclasses.dataclass(frozen=True)
class _Swaps:
    """What real swaps cost, one value a swap.

    Attributes:
        pause_s: in which the replica made no batch, as it counts.
        gap_s: the longest time between two batches around the swap, less the usual one, as the client sees.
        allowed_s: the weights' copy and one forward.
    """

    pause_s: list[float]
    gap_s: list[float]
    allowed_s: list[float]


def run(options: Options) -> list[Figure]:
    """Measures swaps."""
    target = real_target(options)
    # Short batches: a window then holds many, and the edges of a window and of a swap cut few.
    tokens = 8192 if target.device != "cpu" else options.pick(full=128, quick=64)
    sequences = [ids for batch in target.workload.sequences() for ids in batch]
    flat = list(itertools.chain.from_iterable(sequences))[:tokens]
    work = Work.of([flat[start : start + 64] for start in range(0, tokens, 64)])
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.cache) as scratch:
        checkpoints = _write_checkpoints(target.path, Path(scratch))
        with _client(target, checkpoints[0], work, threads=target.threads) as (front, rank):
            during = _preparing(front, rank, work, checkpoints[1], options)
            swaps = _swapping(front, rank, work, checkpoints, options, target)
        figures = _figures(swaps, during, f"SmolLM2-135M, {target.device}, {target.dtype}")
        if target.device == "cpu":
            cores = len(os.sched_getaffinity(0))
            with _client(target, checkpoints[0], work, threads=cores) as (front, rank):
                during = _preparing(front, rank, work, checkpoints[1], options)
            note = f"the same, forwards on all {cores} cores"
            figures.append(figure("swap_prepare_no_free_core", ratios(during, "preparing", "normal"), "x", note=note))
    return figures


def _figures(swaps: _Swaps, during: list[dict[str, float]], where: str) -> list[Figure]:
    pause, gap = (_over(times_s, swaps.allowed_s) for times_s in (swaps.pause_s, swaps.gap_s))
    prepare = ratios(during, "preparing", "normal")
    return [
        figure("swap_pause", pause, "x", goal="<= 1", note="pause / (weights' copy + one forward)"),
        figure("swap_gap", gap, "x", goal="<= 1", note="the same as the client sees it"),
        figure("swap_pause_s", swaps.pause_s, "s", note="no batch is made"),
        figure("swap_allowed_s", swaps.allowed_s, "s", note="the weights' copy and one forward"),
        figure("swap_prepare", prepare, "x", goal=">= 0.9", note="speed while a checkpoint is read, a core free"),
        figure("swap_normal_tokens_per_s", [turn["normal"] for turn in during], "tok/s", note=where),
    ]


def _over(above: list[float], below: list[float]) -> list[float]:
    return [first / second for first, second in zip(above, below, strict=True)]


def _write_checkpoints(path: Path, root: Path) -> tuple[Path, Path]:
    """A copy of the model, and one whose weights are all a little different."""
    same = Path(shutil.copytree(path, root / "same"))
    other = Path(shutil.copytree(path, root / "other", ignore=shutil.ignore_patterns(_WEIGHTS)))
    tensors = {name: tensor * _PERTURBATION for name, tensor in load_file(path / _WEIGHTS).items()}
    save_file(tensors, other / _WEIGHTS, metadata={"format": "pt"})
    return same, other


@contextmanager
def _client(target: RealTarget, checkpoint: Path, work: Work, *, threads: int) -> Iterator[tuple[str, DiscardingRank]]:
    """A server of one replica and a client of it; gives the front's address and the client."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        port_file = Path(scratch) / "port"
        settings = {
            "model.path": checkpoint,
            "model.dtype": target.dtype,
            "devices": target.device,
            "listen": "127.0.0.1:0",
            "replica.num_threads": threads,
            "swap.state_file": Path(scratch) / "state.json",
            "limits.max_batch_token_count": work.tokens,
            "limits.max_tap_count": len(target.taps),
            "limits.max_session_count": 2,
            "buffers.host_slot_count": 5,
        }
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        command = [executable, "-m", "target_server", "serve", *flags, "--port-file", str(port_file)]
        terms = StreamTerms(
            taps=target.taps,
            hidden_size=target.hidden_size,
            dtype=DType(target.dtype),
            max_batch_tokens=work.tokens,
            slot_count=_SLOTS,
            client_name="bench",
        )
        try:
            with start_program("target-server", command, log=Path(scratch) / "log", environment={}) as program:
                front = f"127.0.0.1:{wait_for_file(port_file, program=program, timeout_s=_START_TIMEOUT_S).strip()}"
                with discarding_rank(front, terms, work) as rank:
                    yield front, rank
        except DemoError as error:
            raise BenchError(str(error)) from error


def _preparing(
    front: str, rank: DiscardingRank, work: Work, checkpoint: Path, options: Options
) -> list[dict[str, float]]:
    """Tokens a second in windows without and with reading, in turns."""
    window_s = float(options.pick(full=8, quick=6))

    def normal() -> float:
        times_s = rank.arrivals_until(time.monotonic() + window_s, work)
        while len(times_s) < _SLOTS + _MIN_BATCHES:
            times_s += rank.arrivals_until(time.monotonic(), work)
        return _tokens_per_s(times_s, work)

    def preparing() -> float:
        with _dry_runs(front, checkpoint):
            return normal()

    return take_turns({"normal": normal, "preparing": preparing}, rounds=options.pick(full=6, quick=2))


def _tokens_per_s(times_s: list[float], work: Work) -> float:
    """Speed between arrivals, those left out that may have waited since an earlier window."""
    times_s = times_s[_SLOTS:]
    return (len(times_s) - 1) * work.tokens / (times_s[-1] - times_s[0])


@contextmanager
def _dry_runs(front: str, checkpoint: Path) -> Iterator[None]:
    """Has the replica read a checkpoint again and again for the time of a block."""
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            for _ in swap_messages(front, checkpoint, dry_run=True):
                pass

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            yield
        finally:
            ended.set()
        reading.result()


def _swapping(
    front: str, rank: DiscardingRank, work: Work, checkpoints: tuple[Path, Path], options: Options, target: RealTarget
) -> _Swaps:
    """Swaps back and forth, each with a copy and forwards measured beside it."""
    copy = _copier(checkpoints[0], target)
    swaps = _Swaps([], [], [])
    for number in range(options.pick(full=8, quick=4)):
        copy_s = copy()
        times_s: list[float] = []
        other = checkpoints[1 - number % 2]
        with ThreadPoolExecutor(1) as pool:
            swap = pool.submit(_swap_in_a_moment, front, other)
            while not swap.done():
                times_s += rank.arrivals_until(time.monotonic(), work)
            times_s += rank.arrivals_until(time.monotonic() + _BEFORE_S, work)
            swap.result()
        times_s = times_s[_SLOTS:]
        gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
        forward_s = statistics.median(gaps_s)
        swaps.pause_s.append(_pause_s(front, other_than=swaps.pause_s[-1] if swaps.pause_s else 0.0))
        swaps.gap_s.append(max(gaps_s) - forward_s)
        swaps.allowed_s.append(copy_s + forward_s)
        say(
            f"bench:   swap {number + 1}: pause {swaps.pause_s[-1]:.3g} s, gap {swaps.gap_s[-1]:.3g} s; "
            f"copy {copy_s:.3g} s, forward {forward_s:.3g} s"
        )
    return swaps


def _swap_in_a_moment(front: str, checkpoint: Path) -> None:
    time.sleep(_BEFORE_S)
    swap_to(front, checkpoint)


def _copier(checkpoint: Path, target: RealTarget) -> Callable[[], float]:
    """What copies a checkpoint's mapped weights over others of the served type, and says how many seconds it took."""
    with safe_open(checkpoint / _WEIGHTS, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    live = {name: tensor.to(target.device, getattr(torch, target.dtype)) for name, tensor in stored.items()}

    def copy() -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(target.threads)
        began_s = time.perf_counter()
        for name, tensor in stored.items():
            live[name].copy_(tensor)
        if target.device != "cpu":
            torch.cuda.synchronize()
        torch.set_num_threads(before)
        return time.perf_counter() - began_s

    return copy


def _pause_s(front: str, *, other_than: float) -> float:
    """The replica's own measure of its last swap, once it has reported another one than before."""
    deadline_s = time.monotonic() + _STATS_TIMEOUT_S
    with grpc.insecure_channel(front, options=channel_options()) as channel:
        stub = target_pb2_grpc.TargetFrontServiceStub(channel)
        while time.monotonic() < deadline_s:
            (replica,) = stub.DescribeTarget(target_pb2.DescribeTargetRequest(), timeout=_STATS_TIMEOUT_S).replicas
            if replica.stats.swap_pause_seconds not in (0.0, other_than):
                return replica.stats.swap_pause_seconds
            time.sleep(0.1)
    raise BenchError(f"no report of a swap within {_STATS_TIMEOUT_S:.0f} s")
