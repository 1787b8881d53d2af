"""`target-server status`: asks a front what it serves and prints it."""

from __future__ import annotations

import json
from typing import cast

import grpc
from google.protobuf import json_format
from target_wire.channel import channel_options
from target_wire.v1 import target_pb2, target_pb2_grpc

from target_server.errors import UserError

__all__ = ["print_status"]


def print_status(address: str, *, as_json: bool, timeout_s: float) -> int:
    """Prints what the front at the address answers; returns the exit code.

    Raises:
        UserError: nothing answers there.
    """
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        stub = target_pb2_grpc.TargetFrontServiceStub(channel)
        try:
            description = stub.DescribeTarget(target_pb2.DescribeTargetRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            call = cast("grpc.Call", error)
            raise UserError("address", address, f"{call.code().name.lower()}: {call.details()}") from error
    if as_json:
        print(
            json.dumps(
                json_format.MessageToDict(
                    description, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
                )
            )
        )
    else:
        print("\n".join(_lines(description)))
    return 0


def _lines(description: target_pb2.DescribeTargetResponse) -> list[str]:
    model, version = description.model, description.version
    lines = [
        f"target    {model.name} ({model.architecture}), {model.layer_count} layers of {model.hidden_size}, "
        f"vocabulary {model.vocab_size}, {target_pb2.Dtype.Name(model.dtype).removeprefix('DTYPE_').lower()}",
        f"version   {version.number} {version.digest}",
        f"limits    {description.max_batch_token_count} tokens a batch, "
        f"{description.max_sequence_token_count} a sequence",
    ]
    for replica in description.replicas:
        state = target_pb2.ReplicaState.Name(replica.state).removeprefix("REPLICA_STATE_").lower()
        lines.append(
            f"replica {replica.index} {state} on {','.join(replica.devices)}, port {replica.port}, "
            f"{replica.restart_count} restarts"
        )
    return lines
