"""What trainer and receiver process agree on before the first request: sizes, limits and patience.

Plain frozen values that travel as JSON over the port between the two processes. No torch, no grpc.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from target_wire.spec import DType, row_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamTerms:
    """The shape of every batch of a run."""

    taps: tuple[int, ...]
    """Tapped layers, in the order in which they are concatenated."""
    hidden_size: int
    """Width D of the target's residual stream, in elements."""
    dtype: DType
    """Element type on the wire."""
    max_batch_tokens: int
    """The largest batch that will be asked for, in tokens."""
    slot_count: int
    """Batches that fit into the ring: the most that are asked for and not yet consumed."""
    client_name: str = ""
    """Who asks, for the server's logs."""
    shared_memory: bool = True
    """Whether bodies may come through shared memory from replicas on this host."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return row_bytes(tap_count=len(self.taps), hidden_size=self.hidden_size, dtype=self.dtype)

    @property
    def max_batch_bytes(self) -> int:
        """Bytes of the largest batch."""
        return self.max_batch_tokens * self.row_bytes

    @property
    def window_bytes(self) -> int:
        """The most credit ever outstanding, in bytes: every slot full."""
        return self.slot_count * self.max_batch_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for what, and how often to try again. Seconds throughout."""

    max_attempts: int = 8
    """Times one request is tried before the run stops."""
    backoff_initial_s: float = 0.05
    """Wait before the second attempt; doubled for each further one."""
    backoff_max_s: float = 5.0
    """Longest wait between attempts."""
    connect_timeout_s: float = 10.0
    """From dialling a replica to its ``opened``."""
    stall_timeout_s: float = 120.0
    """Longest silence of a replica that owes a batch; then it's given up and its requests go elsewhere."""
    absence_timeout_s: float = 600.0
    """Longest time without any replica; then the run stops."""
    rediscover_s: float = 5.0
    """Between two looks at the fronts for new or gone replicas. A lost replica is looked for at once."""
    call_timeout_s: float = 5.0
    """Deadline of one DescribeTarget call."""

    def backoff_s(self, attempts: int) -> float:
        """The wait before the next attempt when ``attempts`` have failed."""
        return min(self.backoff_initial_s * 2.0 ** max(attempts - 1, 0), self.backoff_max_s)


def terms_to_json(terms: StreamTerms) -> dict[str, Any]:
    """The terms as JSON values."""
    return dataclasses.asdict(terms)


def terms_from_json(values: Mapping[str, Any]) -> StreamTerms:
    """The inverse of ``terms_to_json``."""
    return StreamTerms(**{**values, "taps": tuple(values["taps"]), "dtype": DType(values["dtype"])})


def patience_from_json(values: Mapping[str, Any]) -> Patience:
    """The inverse of ``dataclasses.asdict`` for patience."""
    return Patience(**values)
