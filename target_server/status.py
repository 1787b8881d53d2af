"""`target-server status`: asks a front what it serves and prints it."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from typing import Any, cast

import grpc
from rich.live import Live
from rich.table import Table
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
    print(json.dumps(_as_dict(description)) if as_json else "\n".join(_lines(description)))
    return 0


def watch_status(address: str, *, timeout_s: float, interval_s: float = 1.0, rounds: int | None = None) -> int:
    """Draws a live table of the replicas until interrupted; returns the exit code.

    Args:
        address: of the front.
        timeout_s: for each answer.
        interval_s: between two of them; rates are over this time.
        rounds: end after so many; None for never.

    Raises:
        UserError: nothing answers there (any more).
    """
    with (
        grpc.insecure_channel(address, options=channel_options()) as channel,
        Live(auto_refresh=False) as live,
        contextlib.suppress(KeyboardInterrupt),
    ):
        before = _describe(channel, address, timeout_s)
        for _ in itertools.count() if rounds is None else range(rounds):
            time.sleep(interval_s)
            now = _describe(channel, address, timeout_s)
            live.update(_table(before, now, interval_s), refresh=True)
            before = now
    return 0


def _describe(channel: grpc.Channel, address: str, timeout_s: float) -> target_pb2.DescribeTargetResponse:
    try:
        return target_pb2_grpc.TargetFrontServiceStub(channel).DescribeTarget(
            target_pb2.DescribeTargetRequest(), timeout=timeout_s
        )
    except grpc.RpcError as error:
        call = cast("grpc.Call", error)
        raise UserError("address", address, f"{call.code().name.lower()}: {call.details()}") from error


def _table(
    before: target_pb2.DescribeTargetResponse, now: target_pb2.DescribeTargetResponse, interval_s: float
) -> Table:
    """Returns the replicas' table; time columns are seconds of batches spent there per second of the clock."""
    table = Table(title=f"{now.model.name}, version {now.version.number}")
    for column in ("replica", "state", "devices", "sessions", "queued", "running", "free slots", "tok/s", "MB/s"):
        table.add_column(column, justify="right")
    for stage in STAGES:
        table.add_column(f"{stage} s/s", justify="right")
    for old, new in zip(before.replicas, now.replicas, strict=True):
        stats, earlier = new.stats, old.stats
        row = [str(new.index), _state(new.state), ",".join(new.devices)]
        if new.HasField("stats") and stats.batch_count >= earlier.batch_count:
            row += [str(stats.session_count), str(stats.queued_count), str(stats.running_count)]
            row += [f"{stats.free_slot_count}/{stats.slot_count}"]
            row += [f"{(stats.token_count - earlier.token_count) / interval_s:.0f}"]
            row += [f"{(stats.sent_bytes - earlier.sent_bytes) / interval_s / 1e6:.1f}"]
            seconds = ((getattr(stats, f"{s}_seconds") - getattr(earlier, f"{s}_seconds")) for s in STAGES)
            row += [f"{value / interval_s:.2f}" for value in seconds]
        table.add_row(*row)
    return table


def _as_dict(description: target_pb2.DescribeTargetResponse) -> dict[str, Any]:
    """Returns the answer with the contract's field names, numbers as numbers and states by their short names."""
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
                "address": replica.address,
                "port": replica.port,
                "devices": list(replica.devices),
                "state": _state(replica.state),
                "restart_count": replica.restart_count,
                **_stats(replica),
            }
            for replica in description.replicas
        ],
    }


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
    return lines


def _endpoint(replica: target_pb2.Replica) -> str:
    return replica.address if replica.address.startswith("unix:") else f"port {replica.port}"


def _dtype(number: target_pb2.Dtype.ValueType) -> str:
    return target_pb2.Dtype.Name(number).removeprefix("DTYPE_").lower()


def _state(number: target_pb2.ReplicaState.ValueType) -> str:
    return target_pb2.ReplicaState.Name(number).removeprefix("REPLICA_STATE_").lower()
