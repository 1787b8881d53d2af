"""Puts a batch together in its slot and accepts nothing that is not exactly what was asked for.

Two kinds of fault, told apart because their cure differs:
  * the replica does not keep the protocol (foreign request, wrong shape, frames out of order, short or long): nothing
    that follows on that stream can be trusted, ``ProtocolBrokenError`` ends the session;
  * the bytes of one batch are damaged (checksum): its other frames are read and dropped, ``damage`` says so, and the
    batch alone is asked for again.

No torch here; the receiver imports this.
"""

from __future__ import annotations

import dataclasses
import re

import crc32c
from target_wire.spec import HIDDEN_STATES
from target_wire.v1 import target_pb2 as pb

from drafter_trainer.client.book import Request
from drafter_trainer.client.terms import StreamTerms

_DIGEST = re.compile(r"[0-9a-f]{32}")


class ProtocolBrokenError(Exception):
    """The replica sent what the contract forbids."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReceivedBatch:
    """A batch that has arrived whole."""

    request: Request
    version_number: int
    version_digest: str
    replica_index: int
    finite: bool
    damage: str
    """Empty when the bytes are sound; otherwise what is wrong with them."""


class BatchAssembly:
    """One batch between its header and its last frame.

    Args:
        header: The replica's announcement; checked against the request here.
        request: What was asked for.
        terms: The run's terms.
        body: The slot's memory for this batch, writable, exactly ``request.payload_bytes`` long.

    Raises:
        ProtocolBrokenError: The header does not describe what was asked for.
    """

    def __init__(self, header: pb.BatchHeader, request: Request, *, terms: StreamTerms, body: memoryview) -> None:
        check_header(header, request, terms)
        self._header = header
        self._request = request
        self._row_bytes = terms.row_bytes
        self._body = body
        self._filled_bytes = 0
        self._frames = 0
        self._damage = ""

    def add(self, *, request_id: int, offset_bytes: int, checksum: int, body: memoryview) -> ReceivedBatch | None:
        """Takes one frame in; returns the batch when this was its last.

        Raises:
            ProtocolBrokenError: The frame is not the one that has to come next.
        """
        self._check_frame(request_id, offset_bytes, len(body))
        if not self._damage:
            own = self._body[offset_bytes : offset_bytes + len(body)]
            own[:] = body
            # Of the copy: a body in shared memory might, were there a fault, be another one a moment later.
            if crc32c.crc32c(own) != checksum:
                self._damage = f"checksum of the frame at byte {offset_bytes} is wrong"
        self._filled_bytes += len(body)
        self._frames += 1
        return self._finish() if self._frames == self._header.frame_count else None

    def _check_frame(self, request_id: int, offset_bytes: int, size_bytes: int) -> None:
        if request_id != self._header.request_id:
            raise ProtocolBrokenError(f"a frame of request {request_id} within request {self._header.request_id}")
        if offset_bytes != self._filled_bytes:
            raise ProtocolBrokenError(f"frame offset {offset_bytes}, expected {self._filled_bytes}")
        if size_bytes == 0 or size_bytes % self._row_bytes:
            raise ProtocolBrokenError(f"a frame of {size_bytes} bytes is not whole rows of {self._row_bytes}")
        if self._filled_bytes + size_bytes > self._header.payload_bytes:
            raise ProtocolBrokenError(f"frames exceed the announced {self._header.payload_bytes} bytes")

    def _finish(self) -> ReceivedBatch:
        if self._filled_bytes != self._header.payload_bytes:
            raise ProtocolBrokenError(f"{self._filled_bytes} bytes instead of {self._header.payload_bytes}")
        return ReceivedBatch(
            request=self._request,
            version_number=self._header.version.number,
            version_digest=self._header.version.digest,
            replica_index=self._header.replica_index,
            finite=self._header.finite,
            damage=self._damage,
        )


def check_header(header: pb.BatchHeader, request: Request, terms: StreamTerms) -> None:
    """Refuses a header that does not describe exactly the batch asked for.

    Raises:
        ProtocolBrokenError: Names the field, what was announced and what was expected.
    """
    expected = {
        "request_id": (header.request_id, request.sequence),
        "tensor.name": (header.tensor.name, HIDDEN_STATES),
        "tensor.dtype": (int(header.tensor.dtype), terms.dtype.number),
        "tensor.shape": (list(header.tensor.shape), [request.tokens, len(terms.taps), terms.hidden_size]),
        "payload_bytes": (header.payload_bytes, request.payload_bytes),
    }
    for field, (announced, wanted) in expected.items():
        if announced != wanted:
            raise ProtocolBrokenError(f"batch header {field} is {announced!r}, expected {wanted!r}")
    if header.frame_count < 1:
        raise ProtocolBrokenError(f"batch header frame_count is {header.frame_count}")
    if header.version.number < 1 or not _DIGEST.fullmatch(header.version.digest):
        raise ProtocolBrokenError(
            f"batch header names no target version: {header.version.number}/{header.version.digest[:40]!r}"
        )
