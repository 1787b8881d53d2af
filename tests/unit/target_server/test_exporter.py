"""Metrics of replicas: what is added up, and how it is exported."""

from __future__ import annotations

import urllib.request

import pytest
from target_wire.v1 import target_pb2 as pb

from target_server.errors import UserError
from target_server.exporter import exporting
from target_server.metrics import BatchTimes, ReplicaMetrics
from target_server.status import _rows, _table
from target_server.supervisor import ReplicaStatus

COUNTS = {"sessions": 2, "queued": 3, "in_flight": 1, "slots_free": 4, "slots_filling": 1, "slots_sending": 1}
COUNTS["lagging"] = 1


def metrics() -> ReplicaMetrics:
    counted = ReplicaMetrics()
    times = BatchTimes(requested=10.0, due=11.0, credited=14.0, began=14.5, forward=2.0, pack=0.25, copy=0.5)
    counted.sent(times, token_count=7, payload_bytes=70, finite=False)
    counted.failed()
    counted.swapped(0.25)
    return counted


def test_a_batch_s_time_is_divided_among_its_stages() -> None:
    stats = metrics().snapshot(COUNTS)
    assert (stats.credit_seconds, stats.queue_seconds) == (3.0, 1.5)
    assert (stats.forward_seconds, stats.pack_seconds, stats.copy_seconds) == (2.0, 0.25, 0.5)
    assert (stats.batch_count, stats.token_count, stats.sent_bytes) == (1, 7, 70)
    assert (stats.failed_count, stats.nonfinite_count) == (1, 1)
    assert (stats.session_count, stats.queued_count, stats.running_count) == (2, 3, 1)
    assert (stats.free_slot_count, stats.slot_count) == (4, 6)
    assert (stats.lagging_session_count, stats.swap_pause_seconds) == (1, 0.25)


def test_scrape_has_every_replica_and_stage() -> None:
    serving = ReplicaStatus(0, ["cpu"], pb.REPLICA_STATE_SERVING, version_number=4, stats=metrics().snapshot(COUNTS))
    dead = ReplicaStatus(1, ["cpu"], pb.REPLICA_STATE_RESTARTING, restart_count=3)
    with exporting("127.0.0.1:0", [serving, dead]) as port:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    for line in (
        'target_server_replica_up{replica="0"} 1.0',
        'target_server_replica_up{replica="1"} 0.0',
        'target_server_replica_version{replica="0"} 4.0',
        'target_server_replica_lagging_sessions{replica="0"} 1.0',
        'target_server_replica_swap_pause_seconds{replica="0"} 0.25',
        'target_server_replica_restarts_total{replica="1"} 3.0',
        'target_server_replica_tokens_total{replica="0"} 7.0',
        'target_server_replica_free_slots{replica="0"} 4.0',
        'target_server_replica_stage_seconds_total{replica="0",stage="credit"} 3.0',
    ):
        assert line in text.splitlines()
    assert 'tokens_total{replica="1"}' not in text


def test_no_address_means_no_endpoint_and_a_bad_one_is_refused() -> None:
    with exporting("", []) as port:
        assert port == 0
    with exporting("127.0.0.1:0", []) as port, pytest.raises(UserError, match="in use"):
        exporting(f"127.0.0.1:{port}", []).__enter__()


def test_watch_table_shows_rates() -> None:
    before = pb.DescribeTargetResponse(replicas=[pb.Replica(stats=pb.ReplicaStats(token_count=100))])
    now = pb.DescribeTargetResponse(replicas=[pb.Replica(stats=pb.ReplicaStats(token_count=350, forward_seconds=1.8))])
    table = _table(_rows(before, now, 2.0), now)
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["tok/s"] == ["125"]
    assert cells["forward s/s"] == ["0.90"]
