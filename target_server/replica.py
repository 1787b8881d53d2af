"""One model copy's thread: forward, packing and the order of copies; and what a replica's buffers weigh.

The thread takes jobs from a queue that the scheduler keeps short, issues each one's forward and copy, and leaves the
waiting to the copier's thread. A slot is this module's from `submit` until one of the callbacks. It must never touch
the event loop's objects: results cross by callbacks that the process wires to the loop.

Behind a batch's payload, in the same slot and the same copy, lie 16 bytes of status computed on the device (STATUS):

    0  int64  1 when every element is finite, else 0 (I4)
    8  int64  checksum of everything before the status (audit.py), when the batch is audited
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from target_wire.codec import dtype_to_torch, tensor_to_buffer
from target_wire.errors import Code, Reason, WireError

from target_server.audit import AuditPolicy, checksum
from target_server.buffers import HostSlot
from target_server.capture import capture_batch, is_finite
from target_server.config import ServerConfig
from target_server.copier import Copier, CopyPipeline, Issued
from target_server.errors import CopyAuditError, ReplicaFatalError
from target_server.loading import LoadedTarget
from target_server.packing import plan_parts
from target_server.scheduler import CaptureJob
from target_server.streams import Streams
from target_server.versions import Version

__all__ = ["Replica", "allocate_slots", "slot_payload_bytes"]

_log = logging.getLogger(__name__)
_STATUS_BYTES = 16


def slot_payload_bytes(target: LoadedTarget, config: ServerConfig) -> int:
    """Returns the size of the largest batch that any session may ask for."""
    limits = config.limits
    taps = min(limits.max_tap_count, target.description.layer_count)
    return limits.max_batch_token_count * taps * target.description.hidden_size * target.dtype.itemsize


def allocate_slots(streams: Streams, *, count: int, payload_bytes: int) -> list[HostSlot]:
    """Returns the host slots of a replica; called once."""
    slots = []
    for index in range(count):
        memory = streams.allocate_host(_status_offset(payload_bytes) + _STATUS_BYTES)
        slots.append(HostSlot(index, memory, tensor_to_buffer(memory.view(torch.bfloat16))[:payload_bytes]))
    return slots


@dataclass(eq=False)
class _Run:
    """A job that the replica's thread has taken.

    Attributes:
        job: the job.
        audited: whether its copy will be checked.
        issued: its events, once all of it is issued.
    """

    job: CaptureJob
    audited: bool
    issued: Issued | None = None


@dataclass(frozen=True, eq=False)
class _Call:
    """Something else that the replica's thread is to do between two batches."""

    action: Callable[[], object]
    future: Future[None] = field(default_factory=Future)

    def run(self) -> None:
        # From here on nobody can cancel it.
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.action()
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(None)


class Replica:
    """The replica's thread and its copier."""

    def __init__(
        self,
        target: LoadedTarget,
        streams: Streams,
        config: ServerConfig,
        version: Version,
        *,
        on_captured: Callable[[CaptureJob, bool], None],
        on_failed: Callable[[CaptureJob, WireError], None],
        on_fatal: Callable[[Exception], None],
    ) -> None:
        """Allocates the device buffers.

        Args:
            target: the model.
            streams: its device's.
            config: buffers, limits and deadlines.
            version: the one that the model holds.
            on_captured: a job's slot holds its rows; with whether they are finite. Called on the copier's thread.
            on_failed: a job failed and its slot is not written any more. Called on the replica's thread.
            on_fatal: the replica can't go on; nothing more will be called. Called on either thread.
        """
        self._target = target
        self._version = version
        self._dtype = dtype_to_torch(target.dtype)
        self._max_padded = config.limits.max_padded_token_count or 2 * config.limits.max_batch_token_count
        self._overlap = config.buffers.copy_overlap
        self._forward_timeout_s = config.deadlines.forward_timeout_s
        self._on_captured = on_captured
        self._on_failed = on_failed
        self._on_fatal = on_fatal
        self._pipeline = CopyPipeline(
            streams,
            buffer_bytes=_status_offset(slot_payload_bytes(target, config)) + _STATUS_BYTES,
            buffer_count=config.buffers.device_buffer_count,
            overlap=self._overlap,
        )
        self._audit = AuditPolicy(config.buffers.copy_audit)
        self._copier: Copier[_Run] = Copier(self._copied, on_fatal, timeout_s=self._forward_timeout_s)
        self._jobs: queue.SimpleQueue[CaptureJob | _Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)

    def start(self) -> None:
        """Starts both threads."""
        self._copier.start()
        self._thread.start()

    def submit(self, job: CaptureJob) -> None:
        """Queues a job; any thread, never blocks."""
        self._jobs.put(job)

    def call(self, action: Callable[[], object]) -> Future[None]:
        """Runs an action on the replica's thread, after the batches submitted so far; any thread, never blocks.

        What the action raises is the future's: it does not end the replica.
        """
        call = _Call(action)
        self._jobs.put(call)
        return call.future

    def set_version(self, version: Version) -> None:
        """Says which version the model holds from now on; on the replica's thread (`call`)."""
        self._version = version

    def stop(self, timeout_s: float) -> bool:
        """Ends both threads after the jobs submitted so far; returns whether they ended in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._copier.stop(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, _Call):
                job.run()
                continue
            try:
                self._capture(job)
            except (ReplicaFatalError, torch.AcceleratorError) as error:
                _log.exception("the replica can't go on")
                self._on_fatal(error)
                return
            except torch.OutOfMemoryError:
                _log.exception("out of memory in a batch of %d tokens", job.batch.token_count)
                detail = f"a batch of {job.batch.token_count} tokens does not fit the device; ask for smaller ones"
                self._on_failed(job, WireError(Code.RESOURCE_EXHAUSTED, Reason.CAPTURE_FAILED, detail))
            except Exception:
                _log.exception("the forward of a batch failed")
                detail = "the forward failed; the server's log has the traceback"
                self._on_failed(job, WireError(Code.INTERNAL, Reason.CAPTURE_FAILED, detail))

    def _capture(self, job: CaptureJob) -> None:
        job.batch.times.began = time.monotonic()
        job.batch.version = self._version
        run = _Run(job, self._audit.takes_next())
        region = job.slot.memory[: _status_offset(job.batch.payload_bytes) + _STATUS_BYTES]
        run.issued = self._pipeline.run(lambda packed: self._fill(run, packed), region)
        if not self._overlap:
            run.issued.copied.wait(self._forward_timeout_s)
        self._copier.put(run, run.issued.copied)

    def _fill(self, run: _Run, packed: torch.Tensor) -> None:
        """Issues a forward that writes the batch's rows and its status into flat uint8 memory."""
        batch = run.job.batch
        terms = batch.session.terms
        rows = packed[: batch.payload_bytes].view(self._dtype)
        batch.times.pack = capture_batch(
            self._target,
            batch.token_ids,
            plan_parts(batch.lengths, self._max_padded),
            taps=terms.taps,
            packed_TLD=rows.view(batch.token_count, len(terms.taps), -1),
        )
        end = _status_offset(batch.payload_bytes)
        packed[batch.payload_bytes : end].zero_()
        status = _status(packed, batch.payload_bytes)
        status[0] = is_finite(rows)
        if run.audited:
            status[1] = checksum(packed[:end])

    def _copied(self, run: _Run) -> None:
        job = run.job
        assert run.issued is not None
        job.batch.times.forward = run.issued.filled.seconds_since(run.issued.begun)
        job.batch.times.copy = run.issued.copied.seconds_since(run.issued.filled)
        status = _status(job.slot.memory, job.batch.payload_bytes)
        if run.audited:
            self._check_copy(job, int(status[1].item()))
        self._on_captured(job, bool(status[0].item()))

    def _check_copy(self, job: CaptureJob, packed_checksum: int) -> None:
        end = _status_offset(job.batch.payload_bytes)
        copied_checksum = int(checksum(job.slot.memory[:end]).item())
        if copied_checksum != packed_checksum:
            raise CopyAuditError(
                f"copy audit: request {job.batch.request_id} of session {job.batch.session.key} "
                f"({job.batch.session.terms.client_name or 'unnamed'}), {job.batch.payload_bytes} bytes in host slot "
                f"{job.slot.index}: the host holds {copied_checksum:#x}, the device packed {packed_checksum:#x}"
            )


def _status_offset(payload_bytes: int) -> int:
    """Returns where the status lies: the next multiple of 16 bytes."""
    return -(-payload_bytes // 16) * 16


def _status(memory: Any, payload_bytes: int) -> torch.Tensor:
    start = _status_offset(payload_bytes)
    status: torch.Tensor = memory[start : start + _STATUS_BYTES].view(torch.int64)
    return status
