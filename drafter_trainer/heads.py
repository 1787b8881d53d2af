"""The target's frozen ends by version, on the drafter's device: fetched in the background, kept while in use.

A version's head is fetched by a thread from the first word of that version on, so that it's there when its first batch
is trained. It is kept as long as batches of it may be outstanding: each use, and each word of a coming batch, renews
it; a head that wasn't used for as many uses as batches can be outstanding is let go. In memory heads are told apart by
the digest of the weights, so a swap to the same weights fetches nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from types import TracebackType

import torch

from drafter_trainer.client.head import fetch_head
from drafter_trainer.errors import TargetUnavailableError
from drafter_trainer.head import TargetHead
from drafter_trainer.types import Version

__all__ = ["HeadShelf"]

logger = logging.getLogger(__name__)

_RETRY_EVERY_S = 0.5
_SAY_EVERY_S = 10.0


class HeadShelf:
    """Heads of the versions in use. A context manager. Used by the training thread.

    Leaving it ends the fetching; what is just being downloaded is waited for, as long as one download may take.

    Args:
        addresses: Fronts of the servers.
        cache_dir: Where heads are kept between runs.
        device: Where the drafter is.
        dtype: Compute type: products with the head are made in it.
        final_norm_offset: See `TargetHead`; only distillation reads it.
        window: Batches that this rank may have outstanding: how long an unused head is kept, in uses of others.
        absence_timeout_s: How long to go on asking while nobody answers.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        cache_dir: Path,
        device: torch.device,
        dtype: torch.dtype,
        final_norm_offset: float = 0.0,
        window: int = 1,
        absence_timeout_s: float = 600.0,
    ) -> None:
        self._addresses = addresses
        self._cache_dir = cache_dir
        self._device = device
        self._dtype = dtype
        self._final_norm_offset = final_norm_offset
        self._window = window
        self._absence_timeout_s = absence_timeout_s
        self._heads: dict[str, Future[TargetHead]] = {}
        self._used_at: dict[str, int] = {}
        self._uses = 0
        self._closing = threading.Event()
        # One at a time: versions come one after the other, and a head is as large as the network is slow.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="head")

    def __enter__(self) -> HeadShelf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def digests(self) -> frozenset[str]:
        """Versions whose heads are held or on their way."""
        return frozenset(self._heads)

    def expect(self, version: Version) -> None:
        """Has a version's head fetched, unless it's there or on its way. Doesn't wait."""
        self._used_at[version.digest] = self._uses
        if version.digest not in self._heads:
            self._heads[version.digest] = self._pool.submit(self._fetch, version)

    def wait(self, version: Version, *, timeout_s: float) -> bool:
        """Whether a version's head is at hand; waits for it for at most ``timeout_s`` seconds.

        Raises:
            TargetChangedError: Nobody has it any more. It's forgotten: expected again, it's asked for again.
            TargetUnavailableError: Nobody answers any more.
        """
        self.expect(version)
        future = self._heads[version.digest]
        try:
            future.result(timeout_s)
        except FutureTimeoutError:
            return False
        except Exception:
            del self._heads[version.digest], self._used_at[version.digest]
            raise
        return True

    def head(self, version: Version) -> TargetHead:
        """The head of a version; waits where it isn't at hand. Lets go of those that nothing needs any more.

        Raises:
            TargetChangedError: Nobody has it any more.
            TargetUnavailableError: Nobody answers any more.
        """
        while not self.wait(version, timeout_s=1.0):
            pass
        self._uses += 1
        self._used_at[version.digest] = self._uses
        head = self._heads[version.digest].result()
        for digest in [d for d, used_at in self._used_at.items() if self._uses - used_at > self._window]:
            if self._heads[digest].done():
                del self._heads[digest], self._used_at[digest]
        return head

    def _fetch(self, version: Version) -> TargetHead:
        """In the fetching thread: tries until somebody answers."""
        started_s = time.monotonic()
        said_s = started_s
        logger.info("fetching the head of target version %d (%s)", version.number, version.digest)
        while True:
            try:
                head = fetch_head(self._addresses, version, cache_dir=self._cache_dir)
                return head.with_norm_offset(self._final_norm_offset).to(self._device, self._dtype)
            except TargetUnavailableError as error:
                now_s = time.monotonic()
                if now_s - started_s > self._absence_timeout_s or self._closing.wait(_RETRY_EVERY_S):
                    raise
                if now_s - said_s >= _SAY_EVERY_S:
                    said_s = now_s
                    logger.warning("%s; trying for %.0f s of at most %.0f s", error, now_s - started_s,
                                   self._absence_timeout_s)  # fmt: skip
