"""The server's own failures, and how each one leaves the process.

The tree::

    ServerError
      UserError            a mistake in what the user gave: one line on stderr, exit code 2
      ReplicaStartError    no replica came up, for a reason that is not the user's
      SwapFailedError      a server could not do the swap that it was asked for; one line, exit code 1
      ReplicaFatalError    the replica's device or thread can't be trusted any more: the process ends and is restarted
        DeadlineError      a wait inside the replica ran out of time
        CopyAuditError     a host slot does not hold what the device packed

What a *caller* did wrong is a `target_wire.errors.WireError`; `abort_with` is the one place that turns one into a
canonical status with `google.rpc.ErrorInfo`. The text of an exception that is not ours never goes onto the wire.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status
from target_wire.errors import DOMAIN, Code, Reason, WireError

__all__ = [
    "CopyAuditError",
    "DeadlineError",
    "ReplicaFatalError",
    "ReplicaStartError",
    "ServerError",
    "SwapFailedError",
    "UserError",
    "abort_with",
    "maps_errors",
]

_log = logging.getLogger(__name__)
_Response = TypeVar("_Response")


class ServerError(Exception):
    """Base of everything this room raises on purpose."""


class UserError(ServerError):
    """A mistake in what the user gave.

    Attributes:
        field: dotted name of the setting or flag.
        value: what was given, as text.
        fix: what is wrong with it and what to give instead.
    """

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(f"{field}: {value}: {fix}")
        self.field = field
        self.value = str(value)
        self.fix = fix


class ReplicaStartError(ServerError):
    """Every replica was given up; the replicas' own output says why."""


class SwapFailedError(ServerError):
    """A server that was asked for a swap failed, for a reason that is not the caller's."""


class ReplicaFatalError(ServerError):
    """The replica can't go on: its device context, its thread or its weights are in an unknown state."""


class DeadlineError(ReplicaFatalError):
    """A wait inside the replica ran out of time; the message says what it waited for and how long."""


class CopyAuditError(ReplicaFatalError):
    """A copy delivered other bytes than were packed: buffers are not owned as they should be. Names batch and slot."""


def _status_of(error: WireError) -> grpc.Status:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN))
    status = status_pb2.Status(code=int(error.code), message=error.detail, details=[detail])
    answer: grpc.Status = rpc_status.to_status(status)
    return answer


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: WireError) -> NoReturn:
    """Ends the call with the error's canonical code and its reason as ErrorInfo."""
    await context.abort_with_status(_status_of(error))
    raise AssertionError("abort_with_status returned")


def maps_errors(
    handler: Callable[[Any, Any, Any], Awaitable[_Response]],
) -> Callable[[Any, Any, Any], Awaitable[_Response]]:
    """Wraps an RPC handler so that every failure reaches the caller as a status with a reason.

    A `WireError` goes out as it is; anything else is a defect: logged with its traceback, INTERNAL without its text.
    """

    @functools.wraps(handler)
    async def wrapped(servicer: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> _Response:
        try:
            return await handler(servicer, request, context)
        except WireError as error:
            failure = error
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            _log.exception("%s failed", handler.__name__)
            failure = WireError(Code.INTERNAL, Reason.INTERNAL, "the server failed; its log has the traceback")
        return await abort_with(context, failure)

    return wrapped
