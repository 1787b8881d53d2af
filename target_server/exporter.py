"""The front's Prometheus endpoint: what replicas last reported, one label per replica. No torch, no state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from target_wire.v1 import target_pb2

from target_server.errors import UserError
from target_server.metrics import STAGES
from target_server.supervisor import ReplicaStatus

__all__ = ["exporting"]

_PREFIX = "target_server_replica"
_JOIN_S = 5.0
# Metric name, field of ReplicaStats, what it is.
_COUNTERS = (
    ("batches", "batch_count", "Batches sent to their end."),
    ("tokens", "token_count", "Tokens sent."),
    ("sent_bytes", "sent_bytes", "Payload bytes sent."),
    ("failed_requests", "failed_count", "Requests answered by batch_failed, cancelled ones not counted."),
    ("nonfinite_batches", "nonfinite_count", "Batches that held a NaN or an infinity."),
)
_GAUGES = (
    ("sessions", "session_count", "Open sessions."),
    ("queued_requests", "queued_count", "Requests that wait for credit or their turn."),
    ("running_requests", "running_count", "Requests whose forward or copy runs."),
    ("free_slots", "free_slot_count", "Host slots that hold nothing."),
    ("slots", "slot_count", "Host slots."),
    ("shared_memory_sessions", "shared_memory_session_count", "Sessions whose bodies go through shared memory."),
    ("lagging_sessions", "lagging_session_count", "Sessions whose latest batch is of an earlier version."),
    ("swap_pause_seconds", "swap_pause_seconds", "Time of the last swap in which no batch was made."),
)


class _ReplicaCollector(Collector):
    """Builds the metrics at each scrape, on the scraping thread."""

    def __init__(self, replicas: Sequence[ReplicaStatus]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """Yields every metric of every replica."""
        up = GaugeMetricFamily(f"{_PREFIX}_up", "1 while the replica serves.", labels=["replica"])
        restarts = CounterMetricFamily(f"{_PREFIX}_restarts", "Restarts of the process.", labels=["replica"])
        version = GaugeMetricFamily(f"{_PREFIX}_version", "Version served; 0 while none is.", labels=["replica"])
        for replica in self._replicas:
            version.add_metric([str(replica.index)], replica.version_number)
            up.add_metric([str(replica.index)], replica.state == target_pb2.REPLICA_STATE_SERVING)
            restarts.add_metric([str(replica.index)], replica.restart_count)
        yield from (up, restarts, version)
        serving = [(str(replica.index), replica.stats) for replica in self._replicas if replica.stats is not None]
        for name, attribute, text in _COUNTERS:
            yield _filled(CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=["replica"]), serving, attribute)
        for name, attribute, text in _GAUGES:
            yield _filled(GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=["replica"]), serving, attribute)
        text = "Time of batches by stage; pack lies within forward."
        seconds = CounterMetricFamily(f"{_PREFIX}_stage_seconds", text, labels=["replica", "stage"])
        for index, stats in serving:
            for stage in STAGES:
                seconds.add_metric([index, stage], getattr(stats, f"{stage}_seconds"))
        yield seconds


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily,
    serving: Sequence[tuple[str, target_pb2.ReplicaStats]],
    attribute: str,
) -> Metric:
    for index, stats in serving:
        family.add_metric([index], getattr(stats, attribute))
    return family


@contextmanager
def exporting(listen: str, replicas: Sequence[ReplicaStatus]) -> Iterator[int]:
    """Serves the metrics over HTTP for the time of a block, on a thread of its own.

    Args:
        listen: HOST:PORT; empty for no endpoint.
        replicas: read at every scrape.

    Yields:
        The port; 0 without an endpoint.

    Raises:
        UserError: the address can't be bound.
    """
    if not listen:
        yield 0
        return
    host, _, port = listen.rpartition(":")
    registry = CollectorRegistry()
    registry.register(_ReplicaCollector(replicas))
    try:
        server, thread = start_http_server(int(port), addr=host, registry=registry)
    except OSError as error:
        raise UserError("metrics.listen", listen, f"{(error.strerror or str(error)).lower()}; give another") from error
    try:
        yield server.server_port
    finally:
        stop: Callable[[], None] = server.shutdown
        stop()
        server.server_close()
        thread.join(_JOIN_S)
