"""Reads the reason out of a failed call: one line for people, the contract's reason name for decisions."""

from __future__ import annotations

import dataclasses

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from target_wire.causes import short_cause

DOMAIN = "target_wire"
STATUS_DETAILS_KEY = "grpc-status-details-bin"  # where grpcio-status puts google.rpc.Status


@dataclasses.dataclass(frozen=True)
class CallFailure:
    """Why a call failed."""

    code: grpc.StatusCode
    reason: str
    """A name of ``target_wire.errors.Reason``; empty when the failure is not the server's word (dead, unreachable)."""
    detail: str

    def __str__(self) -> str:
        return f"{self.reason or self.code.name}: {self.detail}" if self.detail else self.reason or self.code.name

    @property
    def cause(self) -> str:
        """In a few words, for a line that only says what is waited for."""
        return short_cause(self.code.name, self.detail)


def reason_of(error: grpc.RpcError) -> CallFailure:
    """The failure that a call ended with, sync or aio."""
    assert isinstance(error, grpc.aio.AioRpcError | grpc.Call)
    code = error.code() or grpc.StatusCode.UNKNOWN
    metadata = dict(error.trailing_metadata() or ())
    return CallFailure(code, _error_info_reason(metadata.get(STATUS_DETAILS_KEY)), one_line(error.details()))


def one_line(text: str | None) -> str:
    """The first line of a message, bounded."""
    return (text or "").strip().split("\n", 1)[0][:300]


def _error_info_reason(status_bytes: str | bytes | None) -> str:
    if not isinstance(status_bytes, bytes):
        return ""
    try:
        status = status_pb2.Status.FromString(status_bytes)
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == DOMAIN:
                return str(info.reason)
    except DecodeError:
        return ""
    return ""
