"""What a replica counts: batches, bytes, and where a batch's time went.

A batch carries its own times; whoever owns it at a stage writes them. They are added up when it has been sent, on the
event loop. Seconds are of the monotonic clock. No torch, no exporter: the front turns these numbers into metrics.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from target_wire.v1 import target_pb2

__all__ = ["STAGES", "BatchTimes", "ReplicaMetrics"]

# In the order in which a batch passes them; packing lies within the forward.
STAGES = ("credit", "queue", "forward", "pack", "copy", "send")


@dataclass
class BatchTimes:
    """Where one batch's time went.

    Attributes:
        requested: when it was asked for.
        due: when it became its session's first, so that its credit is what it waits for.
        credited: when its credit was there.
        began: when the replica's thread took it.
        forward: seconds of the forward on the device.
        pack: seconds of packing within it.
        copy: seconds from there to the host slot.
        sending: when its header was handed to the transport.
    """

    requested: float = field(default_factory=time.monotonic)
    due: float = 0.0
    credited: float = 0.0
    began: float = 0.0
    forward: float = 0.0
    pack: float = 0.0
    copy: float = 0.0
    sending: float = 0.0


class ReplicaMetrics:
    """The sums of one replica process. Used on its event loop."""

    def __init__(self) -> None:
        self._stats = target_pb2.ReplicaStats()

    def sent(self, times: BatchTimes, *, token_count: int, payload_bytes: int, finite: bool) -> None:
        """Counts a batch whose last frame was taken by the transport just now."""
        stats = self._stats
        stats.batch_count += 1
        stats.token_count += token_count
        stats.sent_bytes += payload_bytes
        stats.nonfinite_count += not finite
        stats.credit_seconds += times.credited - times.due
        stats.queue_seconds += times.due - times.requested + times.began - times.credited
        stats.forward_seconds += times.forward
        stats.pack_seconds += times.pack
        stats.copy_seconds += times.copy
        stats.send_seconds += time.monotonic() - times.sending

    def swapped(self, pause_s: float) -> None:
        """Notes for how long no batch was made during a swap."""
        self._stats.swap_pause_seconds = pause_s

    def failed(self) -> None:
        """Counts a request that was answered by batch_failed and not withdrawn."""
        self._stats.failed_count += 1

    def snapshot(self, counts: Mapping[str, int]) -> target_pb2.ReplicaStats:
        """Returns the sums with what the scheduler counts now (`Scheduler.snapshot`)."""
        stats = target_pb2.ReplicaStats()
        stats.CopyFrom(self._stats)
        stats.session_count = counts["sessions"]
        stats.queued_count = counts["queued"]
        stats.running_count = counts["in_flight"]
        stats.free_slot_count = counts["slots_free"]
        stats.slot_count = sum(count for name, count in counts.items() if name.startswith("slots_"))
        stats.lagging_session_count = counts["lagging"]
        return stats
