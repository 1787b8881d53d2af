"""Why a call, a session or one batch failed: canonical codes, reason names, and which reasons may be retried.

Standard library only: both ends and every process can import it. It must never format a status for a transport (the
server's room does that) nor be fed a text from another library: a detail is written for people, for one field.

    WireError                 code + reason + detail; crosses the wire as a status or as `BatchFailed`
      FrameError              the bytes of a message make no sense (client side; the batch can be asked for again)
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

__all__ = ["DOMAIN", "RETRYABLE", "Code", "FrameError", "Reason", "WireError"]

# The `domain` of google.rpc.ErrorInfo for every reason below.
DOMAIN = "target_wire"


class Code(IntEnum):
    """gRPC's canonical status codes (grpc.StatusCode has the same numbers, but needs grpc)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Reason(StrEnum):
    """The `reason` of google.rpc.ErrorInfo and of `BatchFailed`."""

    # What was asked can never be answered as it is.
    BAD_REQUEST = "BAD_REQUEST"
    """A field is missing, negative or contradicts another one."""
    TAP_OUT_OF_RANGE = "TAP_OUT_OF_RANGE"
    """A tap names no decoder block of the target."""
    DTYPE_MISMATCH = "DTYPE_MISMATCH"
    """The element type asked for is not the served model's."""
    TOKEN_OUT_OF_RANGE = "TOKEN_OUT_OF_RANGE"
    """A token id is not a row of the target's input embedding."""
    SEQUENCE_TOO_LONG = "SEQUENCE_TOO_LONG"
    """A sequence has more tokens than the server takes."""
    BATCH_TOO_LARGE = "BATCH_TOO_LARGE"
    """A batch has more tokens than the server, or the session's own terms, allow; or does not fit one message."""
    WINDOW_TOO_SMALL = "WINDOW_TOO_SMALL"
    """The session's largest batch could never be answered within its window."""
    REQUEST_DUPLICATE = "REQUEST_DUPLICATE"
    """The request id is already outstanding."""

    # The two ends disagree about the state of things.
    PROTOCOL_MISMATCH = "PROTOCOL_MISMATCH"
    """The ends speak different versions of the contract."""
    VERSION_MISMATCH = "VERSION_MISMATCH"
    """The target version asked for is not the one served."""
    SESSION_NOT_OPEN = "SESSION_NOT_OPEN"
    """The stream's first message was not `open`."""
    SESSION_ALREADY_OPEN = "SESSION_ALREADY_OPEN"
    """`open` was sent twice on one stream."""
    CREDIT_INVALID = "CREDIT_INVALID"
    """A grant went back, or exceeds the window."""
    SHARED_BUFFER_INVALID = "SHARED_BUFFER_INVALID"
    """A position in the shared buffer is not the one due, or there is no such buffer."""

    SWAP_REFUSED = "SWAP_REFUSED"
    """The checkpoint can't replace the one served; nothing has changed."""

    # The answer was lost on the way; asking again is right, here or at another replica.
    TARGET_LOADING = "TARGET_LOADING"
    """No replica has loaded the model yet."""
    REPLICA_LOST = "REPLICA_LOST"
    """The replica process or its device died."""
    SHUTTING_DOWN = "SHUTTING_DOWN"
    """The server drains and takes no new work."""
    OVERLOADED = "OVERLOADED"
    """More requests are outstanding than the replica queues."""
    FRAME_CORRUPT = "FRAME_CORRUPT"
    """A frame's bytes, offset or checksum are wrong."""
    CAPTURE_FAILED = "CAPTURE_FAILED"
    """The forward failed for this batch; the replica goes on."""

    SWAP_IN_PROGRESS = "SWAP_IN_PROGRESS"
    """Another swap runs; one at a time."""
    SWAP_FAILED = "SWAP_FAILED"
    """The new weights could not be taken; the version before is served."""

    # Neither retried nor a mistake in the request.
    CANCELLED = "CANCELLED"
    """The client withdrew the request."""
    STALLED = "STALLED"
    """The peer neither reads nor grants credit within the deadline; the session is closed."""
    INTERNAL = "INTERNAL"
    """A defect of the server; its log has the traceback."""


RETRYABLE: frozenset[Reason] = frozenset(
    {
        Reason.TARGET_LOADING,
        Reason.REPLICA_LOST,
        Reason.SHUTTING_DOWN,
        Reason.OVERLOADED,
        Reason.FRAME_CORRUPT,
        Reason.CAPTURE_FAILED,
        Reason.STALLED,
        Reason.SWAP_IN_PROGRESS,
        Reason.SWAP_FAILED,
    }
)


class WireError(Exception):
    """A failure that the other end is told about.

    Attributes:
        code: canonical status code, never OK.
        reason: name for programs.
        detail: one line for people: field, its value, what would be right.
    """

    def __init__(self, code: Code, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.code = code
        self.reason = reason
        self.detail = detail

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed when sent again."""
        return self.reason in RETRYABLE


class FrameError(WireError):
    """The bytes of a message are not what the contract says; raised where they are read."""

    def __init__(self, detail: str) -> None:
        super().__init__(Code.DATA_LOSS, Reason.FRAME_CORRUPT, detail)
