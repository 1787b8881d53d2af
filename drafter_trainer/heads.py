"""The target's frozen ends by version, on the drafter's device, fetched when a batch of a new version comes."""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from drafter_trainer.client.head import fetch_head
from drafter_trainer.head import TargetHead
from drafter_trainer.types import Version

__all__ = ["HeadShelf"]

logger = logging.getLogger(__name__)

# Around a swap batches of two versions are on their way; an older one can't come any more once a third is there.
KEPT_VERSIONS = 2


class HeadShelf:
    """Heads of the versions in use. Used by the training thread; fetching blocks.

    Args:
        addresses: Fronts of the servers.
        cache_dir: Where heads are kept between runs.
        device: Where the drafter is.
        dtype: Compute type: products with the head are made in it.
        final_norm_offset: See `TargetHead`; only distillation reads it.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        cache_dir: Path,
        device: torch.device,
        dtype: torch.dtype,
        final_norm_offset: float = 0.0,
    ) -> None:
        self._addresses = addresses
        self._cache_dir = cache_dir
        self._device = device
        self._dtype = dtype
        self._final_norm_offset = final_norm_offset
        self._heads: collections.OrderedDict[str, TargetHead] = collections.OrderedDict()

    def head(self, version: Version) -> TargetHead:
        """The head of a version.

        Raises:
            TargetChangedError: Nobody serves this version any more.
            TargetUnavailableError: Nobody answered.
        """
        head = self._heads.get(version.digest)
        if head is None:
            logger.info("fetching the head of target version %d (%s)", version.number, version.digest)
            head = fetch_head(self._addresses, version, cache_dir=self._cache_dir)
            head = head.with_norm_offset(self._final_norm_offset).to(self._device, self._dtype)
            self._heads[version.digest] = head
            while len(self._heads) > KEPT_VERSIONS:
                self._heads.popitem(last=False)
        return head
