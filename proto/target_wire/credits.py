"""Byte credit, as arithmetic: how far a server may run ahead of a trainer.

HTTP/2 flow control does not bound what matters: a server runs tens to hundreds of MB ahead of a stalled reader, and the
expensive thing is the forward, not the frame. So the trainer grants bytes, cumulatively since the session opened, and
the server reserves a batch's exact size before its forward starts.

Pure state machines: no I/O, no clock, no thread safety (each end keeps its object on one thread or loop). Server side
`CreditLedger`, client side `CreditWindow`; together they keep

    spent + reserved <= granted <= spent + window            (server)
    consumed <= received <= granted = some consumed + window (client)

A session cannot deadlock when (1) no batch is larger than the window (refused at open), (2) the server reserves in the
order of the requests, and (3) the trainer consumes a session's batches in the order in which it requested them: then
all that came before the waiting request is consumed at last, and `CreditWindow.consume` opens the window in full.
"""

from __future__ import annotations

from target_wire.errors import Code, Reason, WireError

__all__ = ["CreditLedger", "CreditWindow"]


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


class CreditWindow:
    """The client's account of one session: what may arrive, and when to grant more.

    Grants are held back until a quarter of the window has been consumed (measured: returned in quarters they cost
    nothing), except when nothing received is left to consume: then the window is opened in full, since the server may
    be waiting for more than three quarters of it.

    For a client of one stream. The trainer has many, and moves requests between them: it grants each request's bytes
    with the request (`drafter_trainer.client.session`).
    """

    def __init__(self, window_bytes: int) -> None:
        if window_bytes < 1:
            raise ValueError(f"window_bytes {window_bytes}: give at least 1")
        self._window_bytes = window_bytes
        self._granted_bytes = 0
        self._received_bytes = 0
        self._consumed_bytes = 0

    @property
    def window_bytes(self) -> int:
        """The most bytes ever outstanding: granted and not yet consumed."""
        return self._window_bytes

    @property
    def granted_bytes(self) -> int:
        """The cumulative grant sent last."""
        return self._granted_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes received and not yet consumed: what the client's memory holds."""
        return self._received_bytes - self._consumed_bytes

    def open(self) -> int:
        """Returns the first cumulative grant, the whole window; send it after `open`."""
        return self._advance()

    def receive(self, payload_bytes: int) -> None:
        """Notes bytes that arrived.

        Raises:
            WireError: CREDIT_INVALID, when the server sent more than was granted. The account is unchanged.
        """
        _check_amount(payload_bytes)
        received = self._received_bytes + payload_bytes
        if received > self._granted_bytes:
            raise WireError(
                Code.FAILED_PRECONDITION,
                Reason.CREDIT_INVALID,
                f"the server sent {received} bytes where {self._granted_bytes} were granted",
            )
        self._received_bytes = received

    def consume(self, payload_bytes: int) -> int | None:
        """Notes bytes whose memory is free again.

        Returns:
            The next cumulative grant to send, or None while it is better held back.
        """
        _check_amount(payload_bytes)
        if payload_bytes > self.held_bytes:
            raise ValueError(f"payload_bytes {payload_bytes}: only {self.held_bytes} received bytes are held")
        self._consumed_bytes += payload_bytes
        owed = self._consumed_bytes + self._window_bytes - self._granted_bytes
        if owed * 4 >= self._window_bytes or (owed and not self.held_bytes):
            return self._advance()
        return None

    def snapshot(self) -> dict[str, int]:
        """Returns the account for metrics and logs."""
        return {
            "window_bytes": self._window_bytes,
            "granted_bytes": self._granted_bytes,
            "received_bytes": self._received_bytes,
            "consumed_bytes": self._consumed_bytes,
        }

    def check_integrity(self) -> None:
        """Asserts the invariant of the module; for tests and idle moments."""
        assert self._consumed_bytes <= self._received_bytes <= self._granted_bytes, self.snapshot()
        assert self._granted_bytes <= self._consumed_bytes + self._window_bytes, self.snapshot()

    def _advance(self) -> int:
        self._granted_bytes = self._consumed_bytes + self._window_bytes
        return self._granted_bytes


def _check_amount(payload_bytes: int) -> None:
    if payload_bytes < 0:
        raise ValueError(f"payload_bytes {payload_bytes}: give at least 0")
