"""`python -m bench.pipeline`: a replica's thread, buffers and copier over one model, driven without a wire.

Two replicas share the model: one copies while the next forward runs, the other waits for each copy. A command says
which one runs all batches, and what a copy costs besides its memcpy; the answer is how long it took. Batches are kept
as the scheduler keeps them: one runs and one follows. Copies are audited in samples, as by default.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import torch
from target_wire.channel import tune_malloc
from target_wire.checks import ServedTarget, SessionTerms
from target_wire.spec import row_bytes

from bench.child import commands, reply
from bench.thread_streams import ThreadStreams
from bench.workload import Workload
from target_server.buffers import HostSlot, SlotPool
from target_server.config import ModelConfig, ServerConfig
from target_server.loading import LoadedTarget, load_target
from target_server.replica import Replica, allocate_slots, slot_payload_bytes
from target_server.scheduler import CaptureJob
from target_server.session import Batch, Session
from target_server.streams import CudaStreams, Streams
from target_server.versions import Version

__all__ = ["DrivenReplica", "build_session"]

_VERSION = Version(1, "0" * 32)
_TIMEOUT_S = 600.0
_DEPTH = 2


class DrivenReplica:
    """A replica whose batches come from here and whose rows nobody reads.

    Attributes:
        slots: where they are until the slot is filled again.
    """

    def __init__(self, target: LoadedTarget, streams: Streams, config: ServerConfig, session: Session) -> None:
        self._session = session
        self._ended: queue.SimpleQueue[tuple[CaptureJob, object]] = queue.SimpleQueue()
        self._replica = Replica(
            target,
            streams,
            config,
            _VERSION,
            on_captured=lambda job, _finite: self._ended.put((job, None)),
            on_failed=lambda job, error: self._ended.put((job, error)),
            on_fatal=lambda error: self._ended.put((None, error)),  # type: ignore[arg-type]
        )
        self.slots = allocate_slots(streams, count=_DEPTH + 1, payload_bytes=slot_payload_bytes(target, config))
        self._pool = SlotPool(self.slots, max_owner_count=1)
        self._replica.start()

    def run(self, works: list[list[list[int]]]) -> float:
        """Captures every batch once; returns the seconds from the first one's start to the last one's end."""
        began_s = time.perf_counter()
        for number, sequences in enumerate(works):
            if number >= _DEPTH:
                self._take()
            self._replica.submit(CaptureJob(self._batch(number, sequences), self._slot(), time.monotonic()))
        for _ in range(min(_DEPTH, len(works))):
            self._take()
        return time.perf_counter() - began_s

    def _slot(self) -> HostSlot:
        return self._pool.acquire(self._session.key)

    def _batch(self, number: int, sequences: list[list[int]]) -> Batch:
        token_ids = array("i", [token for ids in sequences for token in ids])
        lengths = tuple(len(ids) for ids in sequences)
        payload_bytes = len(token_ids) * self._session.terms.bytes_per_token
        return Batch(self._session, number, lengths, token_ids, payload_bytes)

    def _take(self) -> None:
        job, error = self._ended.get(timeout=_TIMEOUT_S)
        if error is not None:
            raise RuntimeError(f"a batch failed: {error}")
        self._pool.release(job.slot)


def build_session(target: LoadedTarget, taps: list[int], batch_tokens: int) -> Session:
    """Returns an open session of a client that exists only here."""
    facts = target.description
    served = ServedTarget(
        layer_count=facts.layer_count,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        dtype=target.dtype,
        version_number=_VERSION.number,
        version_digest=_VERSION.digest,
        max_batch_token_count=batch_tokens,
        max_sequence_token_count=batch_tokens,
    )
    size = row_bytes(tap_count=len(taps), hidden_size=facts.hidden_size, dtype=target.dtype)
    terms = SessionTerms(tuple(taps), target.dtype, size, batch_tokens, batch_tokens * size, "bench")
    return Session(1, terms, served, max_outstanding_request_count=64, on_change=lambda: None)


def _main(*, model: str, device: str, dtype: str, threads: int, taps: list[int], workload: dict[str, int]) -> None:
    tune_malloc()
    torch.set_num_threads(threads)
    target = load_target(ModelConfig(path=Path(model), dtype=dtype), [device])  # type: ignore[arg-type]
    works = Workload(**workload)
    batches = works.sequences()
    session = build_session(target, taps, works.batch_tokens)
    streams: ThreadStreams | CudaStreams = ThreadStreams() if device == "cpu" else CudaStreams(torch.device(device))
    limits: Any = {"max_batch_token_count": works.batch_tokens, "max_tap_count": len(taps)}
    replicas = {}
    for overlap in (True, False):
        buffers: Any = {"copy_overlap": overlap}
        replicas[overlap] = DrivenReplica(target, streams, ServerConfig(limits=limits, buffers=buffers), session)
        replicas[overlap].run(batches[-1:])
    reply({"batches": len(batches)})
    for command in commands():
        if isinstance(streams, ThreadStreams):
            streams.copy_s = command["copy_s"]
        reply({"seconds": replicas[command["overlap"]].run(batches)})


if __name__ == "__main__":
    _main(**json.loads(sys.argv[1]))
