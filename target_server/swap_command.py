"""`target-server swap`: asks a front for another checkpoint, shows how far it is, and says what is served then.

The swap belongs to the server: when this command is interrupted it goes on, and the same request id joins it again.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from target_wire.causes import short_cause
from target_wire.channel import channel_options
from target_wire.errors import Reason
from target_wire.v1 import target_pb2, target_pb2_grpc

from target_server.errors import SwapFailedError, UserError

__all__ = ["swap_target"]

_GB = 1e9
_LINE_EVERY_S = 1.0
_EXIT_INTERRUPTED = 130
# What the caller can mend: exit code 2.
_MISTAKES = {Reason.SWAP_REFUSED, Reason.BAD_REQUEST, Reason.SWAP_IN_PROGRESS, Reason.TARGET_LOADING}

_Show = Callable[[target_pb2.SwapTargetResponse], None]


def swap_target(request: target_pb2.SwapTargetRequest, address: str, *, timeout_s: float) -> int:
    """Swaps and shows it; returns the exit code.

    Args:
        request: what is asked; an empty request id is filled in, a checkpoint that exists here is made absolute.
        address: of the front.
        timeout_s: for all of it.

    Raises:
        UserError: the swap is refused, or nothing answers there.
        SwapFailedError: the server could not do it.
    """
    given = request.checkpoint
    if Path(given).is_dir():
        request.checkpoint = str(Path(given).resolve())
    request.request_id = request.request_id or uuid.uuid4().hex
    last = target_pb2.SwapTargetResponse()
    with grpc.insecure_channel(address, options=channel_options()) as channel, _view() as show:
        try:
            for last in target_pb2_grpc.TargetFrontServiceStub(channel).SwapTarget(request, timeout=timeout_s):
                show(last)
        except grpc.RpcError as error:
            raise _failure(error, address, given) from error
        except KeyboardInterrupt:
            print(f"the server goes on with it; --request-id {request.request_id} joins it again", flush=True)
            return _EXIT_INTERRUPTED
    version = last.version
    served = "can be served:" if request.dry_run else f"version {version.number}"
    print(f"{served} {version.digest} {last.checkpoint}", flush=True)
    return 0


def _failure(error: grpc.RpcError, address: str, checkpoint: str) -> Exception:
    call = cast("grpc.Call", error)
    detail = call.details() or ""
    status = rpc_status.from_call(call)
    info = error_details_pb2.ErrorInfo()
    if status is None or not status.details or not status.details[0].Unpack(info):
        return UserError("--address", address, f"{short_cause(call.code().name, detail)}; is the server running?")
    if info.reason in _MISTAKES:
        return UserError("--checkpoint", checkpoint, detail.removeprefix("checkpoint: "))
    return SwapFailedError(f"{info.reason}: {detail}; what was served before still is")


@contextlib.contextmanager
def _view() -> Iterator[_Show]:
    """Shows progress: a bar for each replica on a terminal, else a line now and then."""
    console = Console()
    if not console.is_terminal:
        yield _Lines().show
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield _Bars(progress).show


class _Bars:
    """One bar for each replica, filled while it reads."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[int, TaskID] = {}

    def show(self, message: target_pb2.SwapTargetResponse) -> None:
        """Draws one message."""
        for replica in message.replicas:
            if replica.index not in self._tasks:
                self._tasks[replica.index] = self._progress.add_task("")
            stage = "committed" if replica.committed else _stage(message)
            self._progress.update(
                self._tasks[replica.index],
                description=f"replica {replica.index} {stage}",
                completed=replica.read_bytes,
                total=replica.total_bytes or None,
            )


class _Lines:
    """One line for each stage, and one a second while weights are read."""

    def __init__(self) -> None:
        self._stage = target_pb2.SWAP_STAGE_UNSPECIFIED
        self._text = ""
        self._said_s = 0.0

    def show(self, message: target_pb2.SwapTargetResponse) -> None:
        """Prints what is new in one message."""
        text = _line(message)
        now_s = time.monotonic()
        if text == self._text or (message.stage == self._stage and now_s - self._said_s < _LINE_EVERY_S):
            return
        self._stage, self._text, self._said_s = message.stage, text, now_s
        print(text, flush=True)


def _line(message: target_pb2.SwapTargetResponse) -> str:
    replicas = message.replicas
    text = f"{_stage(message):9}"
    if message.stage == target_pb2.SWAP_STAGE_READ:
        read, total = (
            sum(sizes) / _GB for sizes in zip(*((r.read_bytes, r.total_bytes) for r in replicas), strict=True)
        )
        text += f" {read:.2f} of {total:.2f} GB by {len(replicas)} replicas"
    elif message.stage == target_pb2.SWAP_STAGE_COMMIT:
        text += f" {sum(replica.committed for replica in replicas)} of {len(replicas)} replicas"
    elif message.stage == target_pb2.SWAP_STAGE_FOLLOW:
        text += f" {message.lagging_session_count} sessions have not had a batch of version {message.version.number}"
    return text.rstrip()


def _stage(message: target_pb2.SwapTargetResponse) -> str:
    return target_pb2.SwapStage.Name(message.stage).removeprefix("SWAP_STAGE_").lower()
