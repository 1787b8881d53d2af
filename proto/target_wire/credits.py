"""Byte credit, as arithmetic: how far a server may run ahead of a trainer.

HTTP/2 flow control does not bound what matters: a server runs tens to hundreds of MB ahead of a stalled reader, and the
expensive thing is the forward, not the frame. So the trainer grants bytes, cumulatively since the session opened, and
the server reserves a batch's exact size before its forward starts.

Pure state machines: no I/O, no clock, no thread safety (each end keeps its object on one thread or loop). Server side
`CreditLedger`, client side `CreditGrants`; together they keep

    spent + reserved <= granted <= spent + window      (server)
    received + owed  <= granted                        (client)

The client grants a request's bytes together with the request, and sends only requests whose memory is free: its free
memory is the credit, however many streams it has and wherever a request moves when a replica dies. As long as no more
than a window is owed at a time, no grant goes too far. A session cannot deadlock when (1) no batch is larger than the
window (refused at open) and (2) the server reserves in the order of the requests: all that is owed is granted.
"""

from __future__ import annotations

from target_wire.errors import Code, Reason, WireError

__all__ = ["CreditGrants", "CreditLedger"]


class CreditLedger:
    """The server's account of one session.

    A batch goes reserve -> spend (its bytes were handed to the transport) or reserve -> release (it failed or was
    cancelled before its header).
    """

    def __init__(self, window_bytes: int) -> None:
        if window_bytes < 1:
            raise ValueError(f"window_bytes {window_bytes}: give at least 1")
        self._window_bytes = window_bytes
        self._granted_bytes = 0
        self._reserved_bytes = 0
        self._spent_bytes = 0

    @property
    def window_bytes(self) -> int:
        """The most bytes ever outstanding as credit."""
        return self._window_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that can be reserved now."""
        return self._granted_bytes - self._reserved_bytes - self._spent_bytes

    def grant(self, granted_bytes: int) -> None:
        """Takes a cumulative grant; a repeat does nothing.

        Raises:
            WireError: CREDIT_INVALID, when it is less than an earlier grant or more than the window allows. The
                account is unchanged.
        """
        if granted_bytes < self._granted_bytes:
            raise WireError(
                Code.FAILED_PRECONDITION,
                Reason.CREDIT_INVALID,
                f"granted_bytes {granted_bytes} is less than the {self._granted_bytes} granted before; "
                "grants are cumulative since the session opened",
            )
        limit = self._spent_bytes + self._window_bytes
        if granted_bytes > limit:
            raise WireError(
                Code.FAILED_PRECONDITION,
                Reason.CREDIT_INVALID,
                f"granted_bytes {granted_bytes} is more than window_bytes {self._window_bytes} ahead of the "
                f"{self._spent_bytes} bytes sent; grant at most {limit}",
            )
        self._granted_bytes = granted_bytes

    def reserve(self, payload_bytes: int) -> bool:
        """Sets credit aside for one batch, or changes nothing and returns False when there is not enough yet."""
        _check_amount(payload_bytes)
        if payload_bytes > self.available_bytes:
            return False
        self._reserved_bytes += payload_bytes
        return True

    def spend(self, payload_bytes: int) -> None:
        """Turns reserved bytes into sent bytes; called as each frame (or the whole batch) leaves."""
        self._take_reserved(payload_bytes)
        self._spent_bytes += payload_bytes

    def release(self, payload_bytes: int) -> None:
        """Gives reserved bytes back: they will not be sent."""
        self._take_reserved(payload_bytes)

    def snapshot(self) -> dict[str, int]:
        """Returns the account for metrics and logs."""
        return {
            "window_bytes": self._window_bytes,
            "granted_bytes": self._granted_bytes,
            "reserved_bytes": self._reserved_bytes,
            "spent_bytes": self._spent_bytes,
            "available_bytes": self.available_bytes,
        }

    def check_integrity(self) -> None:
        """Asserts the invariant of the module; for tests and idle moments."""
        assert self._reserved_bytes >= 0, self.snapshot()
        assert self._spent_bytes + self._reserved_bytes <= self._granted_bytes, self.snapshot()
        assert self._granted_bytes <= self._spent_bytes + self._window_bytes, self.snapshot()

    def _take_reserved(self, payload_bytes: int) -> None:
        _check_amount(payload_bytes)
        if payload_bytes > self._reserved_bytes:
            raise ValueError(f"payload_bytes {payload_bytes}: only {self._reserved_bytes} bytes are reserved")
        self._reserved_bytes -= payload_bytes


class CreditGrants:
    """The client's account of one session: what was granted, what has come, what is still owed."""

    def __init__(self) -> None:
        self._granted_bytes = 0
        self._received_bytes = 0
        self._owed_bytes = 0

    @property
    def owed_bytes(self) -> int:
        """Bytes asked for that have neither come nor failed."""
        return self._owed_bytes

    def request(self, payload_bytes: int) -> int:
        """Notes a request; returns the cumulative grant to send before it. It never goes back."""
        _check_amount(payload_bytes)
        self._owed_bytes += payload_bytes
        self._granted_bytes = max(self._granted_bytes, self._received_bytes + self._owed_bytes)
        return self._granted_bytes

    def receive(self, payload_bytes: int) -> None:
        """Notes bytes of a request that arrived.

        Raises:
            WireError: CREDIT_INVALID, when more came than was asked for. The account is unchanged.
        """
        _check_amount(payload_bytes)
        if payload_bytes > self._owed_bytes:
            raise WireError(
                Code.FAILED_PRECONDITION,
                Reason.CREDIT_INVALID,
                f"the server sent {payload_bytes} bytes where {self._owed_bytes} are owed",
            )
        self._received_bytes += payload_bytes
        self._owed_bytes -= payload_bytes

    def forgive(self, payload_bytes: int) -> None:
        """Notes a request that failed before its first byte: its grant stays, and the next request uses it up."""
        _check_amount(payload_bytes)
        if payload_bytes > self._owed_bytes:
            raise ValueError(f"payload_bytes {payload_bytes}: only {self._owed_bytes} bytes are owed")
        self._owed_bytes -= payload_bytes

    def snapshot(self) -> dict[str, int]:
        """Returns the account for metrics and logs."""
        return {
            "granted_bytes": self._granted_bytes,
            "received_bytes": self._received_bytes,
            "owed_bytes": self._owed_bytes,
        }

    def check_integrity(self) -> None:
        """Asserts the invariant of the module; for tests and idle moments."""
        assert self._owed_bytes >= 0, self.snapshot()
        assert self._received_bytes + self._owed_bytes <= self._granted_bytes, self.snapshot()


def _check_amount(payload_bytes: int) -> None:
    if payload_bytes < 0:
        raise ValueError(f"payload_bytes {payload_bytes}: give at least 0")
