"""Room in a session's shared buffer, as arithmetic: where the next body goes, and when its bytes may be written again.

The buffer is a ring of S bytes. Both ends count positions in bytes since the session opened and never wrap them; a
body lies at its position modulo S, whole: one that would go past the end of the buffer starts at the next multiple of
S instead, and the gap counts as written. Bodies are written, copied out and released in the same order, so two numbers
on each end say who owns every byte:

    released <= written <= released + S        from released to written the client's, all else the server's

Pure state machines: no I/O, no memory, no thread safety. Server side `BufferSpace`, client side `BufferReader`. The two
can't wait for each other for ever: the client releases at the latest when it holds back S / 4, a body is at most S / 4,
and the gap before it is shorter than the body; so once the client has read everything, the next body fits.
"""

from __future__ import annotations

from target_wire.errors import Code, Reason, WireError

__all__ = ["BufferReader", "BufferSpace", "invalid", "largest_body"]


def largest_body(size_bytes: int) -> int:
    """Returns the most bytes of one body in a buffer of this size."""
    return size_bytes // 4


def _place_after(end: int, body_bytes: int, size_bytes: int) -> int:
    """Returns the position of a body that follows one which ended at `end`."""
    rest = size_bytes - end % size_bytes
    return end if body_bytes <= rest else end + rest


class BufferSpace:
    """The server's account."""

    def __init__(self, size_bytes: int) -> None:
        if largest_body(size_bytes) < 1:
            raise ValueError(f"size_bytes {size_bytes}: give at least 4")
        self._size_bytes = size_bytes
        self._written = 0
        self._released = 0

    def place(self, body_bytes: int) -> int | None:
        """Returns the position of the next body, which is the client's from now on; None while there is no room."""
        if not 0 < body_bytes <= largest_body(self._size_bytes):
            raise ValueError(f"body_bytes {body_bytes}: give 1 to {largest_body(self._size_bytes)}")
        position = _place_after(self._written, body_bytes, self._size_bytes)
        if position + body_bytes > self._released + self._size_bytes:
            return None
        self._written = position + body_bytes
        return position

    def release(self, released_bytes: int) -> None:
        """Takes back all bytes before a position; a repeat does nothing.

        Raises:
            WireError: SHARED_BUFFER_INVALID, when it is less than before or more than was written. The account is
                unchanged.
        """
        if not self._released <= released_bytes <= self._written:
            raise invalid(
                f"released_bytes {released_bytes} must be in [{self._released}, {self._written}]: not less than "
                "before, not more than was written"
            )
        self._released = released_bytes

    def snapshot(self) -> dict[str, int]:
        """Returns the account for tests and logs."""
        return {"size_bytes": self._size_bytes, "written_bytes": self._written, "released_bytes": self._released}


class BufferReader:
    """The client's account."""

    def __init__(self, size_bytes: int) -> None:
        if largest_body(size_bytes) < 1:
            raise ValueError(f"size_bytes {size_bytes}: give at least 4")
        self._size_bytes = size_bytes
        self._end = 0
        self._released = 0

    def find(self, position_bytes: int, body_bytes: int) -> int:
        """Returns where in the memory a body starts that the server says is at this position.

        Raises:
            WireError: SHARED_BUFFER_INVALID, when it isn't where the next body must be, or is longer than bodies may
                be. The account is unchanged.
        """
        if not 0 < body_bytes <= largest_body(self._size_bytes):
            raise invalid(f"size_bytes {body_bytes} must be in [1, {largest_body(self._size_bytes)}]")
        due = _place_after(self._end, body_bytes, self._size_bytes)
        if position_bytes != due:
            raise invalid(f"position_bytes {position_bytes}, expected {due}")
        return due % self._size_bytes

    def copied(self, position_bytes: int, body_bytes: int) -> int | None:
        """Notes that a body found before was copied out; returns the release to send now, None when it can wait."""
        self._end = position_bytes + body_bytes
        if self._end - self._released < largest_body(self._size_bytes):
            return None
        self._released = self._end
        return self._released


def invalid(detail: str) -> WireError:
    """Returns the error for a shared buffer used against its rules."""
    return WireError(Code.FAILED_PRECONDITION, Reason.SHARED_BUFFER_INVALID, detail)
