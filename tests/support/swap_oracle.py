"""What a run must have learned, given which version of the target made each of its batches.

The same run without a server: transformers models in this process, one a version, never swapped, make each batch's
features, and their own ends are its head. Everything else is the product's. So a batch with features or a head of
another version, a lost or a repeated one, shows in the weights.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch

from drafter_trainer import launch
from drafter_trainer.config.resolve import resolve_config
from drafter_trainer.head import TargetHead
from drafter_trainer.types import Version
from tests.support.training_world import TAPS, read_records

Digests = Mapping[int, str]
"""Plan position to the digest of the weights that made its batch."""


def digests_by_position(run_dir: Path, *, num_ranks: int = 1) -> dict[int, str]:
    """From a run's own records; asserts that no position is there twice (I1)."""
    digests: dict[int, str] = {}
    for rank in range(num_ranks):
        for record in read_records(run_dir / f"consumed-rank-{rank}.jsonl"):
            for batch in record["batches"]:
                assert batch["position"] not in digests, f"position {batch['position']} was trained twice"
                digests[batch["position"]] = batch["target"]
    assert sorted(digests) == list(range(len(digests))), "a position is missing"
    return digests


def load_models(checkpoints: Mapping[str, Path]) -> dict[str, Any]:
    """A frozen transformers model a digest."""
    import transformers  # noqa: PLC0415 - takes seconds

    return {
        digest: transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True).eval()
        for digest, path in checkpoints.items()
    }


@dataclasses.dataclass
class _Slot:
    position: int
    payload: memoryview
    version_number: int
    version_digest: str
    replica_index: int = 0
    finite: bool = True


class _Delivery:
    """Stands in for `client.delivery.Delivery`."""

    ring_view = memoryview(b"")

    def __init__(self, models: Mapping[str, Any], digests: Digests) -> None:
        self._models, self._digests = models, digests
        self._asked: collections.deque[_Slot] = collections.deque()

    def __enter__(self) -> _Delivery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    @property
    def free_slots(self) -> int:
        return 1 - len(self._asked)

    def submit(self, *, position: int, lengths: Sequence[int], token_ids: bytes) -> None:
        digest = self._digests[position]
        ids_T = torch.frombuffer(bytearray(token_ids), dtype=torch.int32).long()
        rows = hidden_rows(self._models[digest], torch.split(ids_T, list(lengths)))
        self._asked.append(_Slot(position, memoryview(bytearray(rows.numpy().tobytes())), 1, digest))

    def take(self) -> _Slot:
        return self._asked[0]

    def release(self, slot: _Slot) -> None:
        assert self._asked.popleft() is slot

    def take_asked_again(self) -> int:
        return 0


class _Heads:
    """Stands in for `heads.HeadShelf`."""

    def __init__(self, models: Mapping[str, Any], first: str) -> None:
        self._models = models
        self._first: str | None = first

    def __enter__(self) -> _Heads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def head(self, version: Version) -> TargetHead:
        # The first call is for the initial weights, which suit what was served when the run began.
        digest, self._first = self._first or version.digest, None
        return TargetHead.from_model(self._models[digest], version=version)


@torch.no_grad()
def hidden_rows(model: Any, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows [T, taps * D] of sequences, by a plain forward of the padded batch."""
    ids_BS = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    mask_BS = torch.nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in sequences], batch_first=True)
    hidden = model(ids_BS, attention_mask=mask_BS, output_hidden_states=True).hidden_states
    taps = [torch.cat([hidden[tap + 1][row, : len(ids)] for row, ids in enumerate(sequences)]) for tap in TAPS]
    return torch.cat(taps, dim=1).contiguous()


def replay(flags: Sequence[str], models: Mapping[str, Any], digests: Digests, *, first: str) -> None:
    """Trains a run as these flags say, on what the models make of it.

    Args:
        flags: Of the run, with a run.dir of its own. Its server is only asked to describe the target.
        models: By digest.
        digests: Which model makes the batch at each position.
        first: Digest that was served when the run began.
    """
    with _standing_in(models, digests, first):
        assert launch.run_training(resolve_config(flags=list(flags)).config)


@contextmanager
def _standing_in(models: Mapping[str, Any], digests: Digests, first: str) -> Iterator[None]:
    with (
        patch.object(launch, "open_delivery", lambda *_: _Delivery(models, digests)),
        patch.object(launch, "build_heads", lambda _: _Heads(models, first)),
    ):
        yield
