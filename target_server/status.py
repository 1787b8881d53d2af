"""`target-server status`: asks a front what it serves and prints it."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc
from grpc_status import rpc_status
from rich.live import Live
from rich.table import Table
from target_wire.causes import short_cause
from target_wire.channel import channel_options
from target_wire.v1 import target_pb2, target_pb2_grpc

from target_server.errors import UserError
from target_server.metrics import STAGES

__all__ = ["print_status", "watch_status"]


def print_status(address: str, *, as_json: bool, timeout_s: float) -> int:
    """Prints what the front at the address answers; returns the exit code.

    Raises:
        UserError: nothing answers there.
    """
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        description = _describe(channel, address, timeout_s)
    print(json.dumps(_as_dict(description, address)) if as_json else "\n".join(_lines(description)))
    return 0


def watch_status(address: str, *, timeout_s: float, interval_s: float = 1.0, rounds: int | None = None) -> int:
    """Shows the replicas until interrupted, as a live table or, without a terminal, as lines; returns the exit code.

    Args:
        address: of the front.
        timeout_s: for each answer.
        interval_s: between two of them; rates are over this time.
        rounds: end after so many; None for never.

    Raises:
        UserError: nothing answers there (any more).
    """
    with (
        contextlib.suppress(KeyboardInterrupt),
        grpc.insecure_channel(address, options=channel_options()) as channel,
        _shown() as show,
    ):
        before = _describe(channel, address, timeout_s)
        for _ in itertools.count() if rounds is None else range(rounds):
            time.sleep(interval_s)
            now = _describe(channel, address, timeout_s)
            show(_rows(before, now, interval_s), now)
            before = now
    return 0


@contextlib.contextmanager
def _shown() -> Iterator[Callable[[list[dict[str, str]], target_pb2.DescribeTargetResponse], None]]:
    """Yields what shows one look at the replicas."""
    if not sys.stdout.isatty():
        yield lambda rows, _now: _print_rows(rows)
        return
    with Live(auto_refresh=False) as live:
        yield lambda rows, now: live.update(_table(rows, now), refresh=True)


def _describe(channel: grpc.Channel, address: str, timeout_s: float) -> target_pb2.DescribeTargetResponse:
    try:
        return target_pb2_grpc.TargetFrontServiceStub(channel).DescribeTarget(
            target_pb2.DescribeTargetRequest(), timeout=timeout_s
        )
    except grpc.RpcError as error:
        call = cast("grpc.Call", error)
        cause = short_cause(call.code().name, call.details() or "")
        # A server that answers gives its reason; without one nobody did.
        silent = rpc_status.from_call(call) is None
        raise UserError("address", address, f"{cause}; is the server running?" if silent else cause) from error


def _rows(
    before: target_pb2.DescribeTargetResponse, now: target_pb2.DescribeTargetResponse, interval_s: float
) -> list[dict[str, str]]:
    """Returns each replica's columns; times are seconds of batches spent there per second of the clock."""
    rows = []
    for old, new in zip(before.replicas, now.replicas, strict=True):
        stats, earlier = new.stats, old.stats
        row = {"replica": str(new.index), "state": _state(new.state), "devices": ",".join(new.devices)}
        if new.HasField("stats") and stats.batch_count >= earlier.batch_count:
            row |= {
                "sessions": str(stats.session_count),
                "queued": str(stats.queued_count),
                "running": str(stats.running_count),
                "free slots": f"{stats.free_slot_count}/{stats.slot_count}",
                "tok/s": f"{(stats.token_count - earlier.token_count) / interval_s:.0f}",
                "MB/s": f"{(stats.sent_bytes - earlier.sent_bytes) / interval_s / 1e6:.1f}",
            }
            for stage in STAGES:
                seconds = getattr(stats, f"{stage}_seconds") - getattr(earlier, f"{stage}_seconds")
                row[f"{stage} s/s"] = f"{seconds / interval_s:.2f}"
        rows.append(row)
    return rows


def _table(rows: list[dict[str, str]], now: target_pb2.DescribeTargetResponse) -> Table:
    table = Table(title=f"{now.model.name}, version {now.version.number}")
    columns = max(rows, key=len, default={})
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row.values())
    return table


def _print_rows(rows: list[dict[str, str]]) -> None:
    """Prints a line a replica, for a pipe or a file."""
    clock = time.strftime("%H:%M:%S")
    for row in rows:
        print(clock, ", ".join(f"{column} {value}" for column, value in row.items()), flush=True)


def _as_dict(description: target_pb2.DescribeTargetResponse, front: str) -> dict[str, Any]:
    """Returns the answer with the contract's field names, numbers as numbers, states by their short names.

    A replica's address is where it is reached by one who reached the front as `front`.
    """
    model, version = description.model, description.version
    return {
        "protocol_version": description.protocol_version,
        "model": {
            "name": model.name,
            "architecture": model.architecture,
            "model_type": model.model_type,
            "hidden_size": model.hidden_size,
            "layer_count": model.layer_count,
            "vocab_size": model.vocab_size,
            "tie_word_embeddings": model.tie_word_embeddings,
            "dtype": _dtype(model.dtype),
            "max_position_count": model.max_position_count,
            "tokenizer_digest": model.tokenizer_digest,
        },
        "version": {"number": version.number, "digest": version.digest},
        "earlier_versions": [{"number": v.number, "digest": v.digest} for v in description.earlier_versions],
        "max_batch_token_count": description.max_batch_token_count,
        "max_sequence_token_count": description.max_sequence_token_count,
        "replicas": [
            {
                "index": replica.index,
                "address": _reached_at(front, replica),
                "port": replica.port,
                "devices": list(replica.devices),
                "state": _state(replica.state),
                "restart_count": replica.restart_count,
                **_stats(replica),
            }
            for replica in description.replicas
        ],
    }


def _reached_at(front: str, replica: target_pb2.Replica) -> str:
    """Returns where a replica listens, with the front's host where it gives none; empty while it does not serve."""
    host, _, port = replica.address.rpartition(":")
    if host or not (port or replica.port):
        return replica.address
    front_host = "localhost" if front.startswith("unix:") else front.rpartition(":")[0]
    return f"{front_host}:{port or replica.port}"


def _stats(replica: target_pb2.Replica) -> dict[str, Any]:
    """Returns a replica's counts, and its seconds by stage under "profile_stats"; nothing while it does not serve."""
    if not replica.HasField("stats"):
        return {}
    stats = replica.stats
    counts = {
        field.name: getattr(stats, field.name)
        for field in stats.DESCRIPTOR.fields
        if not field.name.endswith("_seconds")
    }
    counts["swap_pause_s"] = stats.swap_pause_seconds
    return {**counts, "profile_stats": {f"{stage}_s": getattr(stats, f"{stage}_seconds") for stage in STAGES}}


def _lines(description: target_pb2.DescribeTargetResponse) -> list[str]:
    model, version = description.model, description.version
    lines = [
        f"target    {model.name} ({model.architecture}), {model.layer_count} layers of {model.hidden_size}, "
        f"vocabulary {model.vocab_size}, {_dtype(model.dtype)}",
        f"version   {version.number} {version.digest}",
        f"limits    {description.max_batch_token_count} tokens a batch, "
        f"{description.max_sequence_token_count} a sequence",
    ]
    for replica in description.replicas:
        lines.append(
            f"replica {replica.index} {_state(replica.state)} on {','.join(replica.devices)}, {_endpoint(replica)}, "
            f"{replica.restart_count} restarts"
        )
        if replica.stats.session_count:
            lines.append(f"          {_sessions(replica.stats)}")
    return lines


def _sessions(stats: target_pb2.ReplicaStats) -> str:
    """Returns how many sessions there are and which way their hidden states go."""
    problem = f" (denied: {stats.shared_memory_problem})" if stats.shared_memory_problem else ""
    return f"{stats.session_count} sessions, {stats.shared_memory_session_count} through shared memory{problem}"


def _endpoint(replica: target_pb2.Replica) -> str:
    return replica.address if replica.address.startswith("unix:") else f"port {replica.port}"


def _dtype(number: target_pb2.Dtype.ValueType) -> str:
    return target_pb2.Dtype.Name(number).removeprefix("DTYPE_").lower()


def _state(number: target_pb2.ReplicaState.ValueType) -> str:
    return target_pb2.ReplicaState.Name(number).removeprefix("REPLICA_STATE_").lower()
