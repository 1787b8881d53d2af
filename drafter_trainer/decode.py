"""Greedy decoding of a target in this process: plain, and with blocks from a drafter.

Owns the loop that drafts, verifies, accepts and takes back. Block decoding must emit exactly what plain greedy
decoding emits: a drafter changes how fast, never what. In bfloat16 the target's own kernels round one row and a block
of rows differently, so two logits closer than that rounding may swap; `divergence.py` tells such ties from errors.

One round at anchor position s, the last emitted token, whose features do not exist yet:

```
 position     ...  s-1 | s        s+1   s+2   s+3
 context       features | -
 block                  | anchor  MASK  MASK  MASK     one drafter forward; slot k drafts position s+k
 verified               | anchor  d1    d2    d3       one target forward
 target says            | t1      t2    t3    t4       row k is the target's token at s+k+1
```
d1..da equal t1..ta and d(a+1) differs: the round emits t1..t(a+1), keeps the first a+1 rows in the target's cache and
their features as new context, and t(a+1) is the next anchor.

Shapes: R rows, K block, C taps * D, E drafter hidden, V vocab.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter_trainer.acceptance import Round
from drafter_trainer.head import TargetHead
from drafter_trainer.model import ContextCache, Drafter
from drafter_trainer.skinny import LinearForms
from drafter_trainer.target_runner import TargetRunner

__all__ = ["BlockDrafter", "Decoded", "decode_blocks", "decode_plain"]


@dataclass(frozen=True)
class Decoded:
    """One answer.

    Attributes:
        token_ids: What was emitted, an ending eos included.
        rounds: Verification rounds in order; empty for plain decoding.
        prefill_s: Seconds until the first token.
        decode_s: Seconds for all others; the drafter's reading of the prompt is in here.
    """

    token_ids: tuple[int, ...]
    rounds: tuple[Round, ...]
    prefill_s: float
    decode_s: float

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed after the first token; 0.0 where there was nothing after it."""
        return (len(self.token_ids) - 1) / self.decode_s if len(self.token_ids) > 1 else 0.0


class BlockDrafter:
    """A drafter with the target's head, for one sequence at a time.

    Args:
        drafter: In eval mode, with final weights.
        head: Head of the target version that is decoded.
        block_size: Block length, anchor included; the trained one by default. Shorter works, longer was never trained.
        forms: Where given, the head's product takes the form measured there for `block_size` - 1 rows.

    Raises:
        ValueError: `block_size` is below 2 or above the trained one.
    """

    def __init__(
        self, drafter: Drafter, head: TargetHead, *, block_size: int | None = None, forms: LinearForms | None = None
    ) -> None:
        trained = drafter.config.block_size
        self.block_size = trained if block_size is None else block_size
        if not 2 <= self.block_size <= trained:
            raise ValueError(f"block_size {self.block_size} is not from 2 to {trained}, the trained block size")
        self.drafter, self.head, self._forms = drafter, head, forms
        self._mask_ids = torch.full((self.block_size,), drafter.config.mask_token_id, device=head.device)
        self._cache = ContextCache()

    def restart(self) -> None:
        """Forget the sequence."""
        self._cache = ContextCache()

    def read(self, features_RC: Tensor) -> None:
        """Take the features of the next positions that are final."""
        start = self._cache.length
        positions = torch.arange(start, start + features_RC.shape[0], device=features_RC.device)
        self.drafter.context_kv(features_RC, positions, cache=self._cache)

    def hidden(self, anchor_id: int) -> Tensor:
        """Final hidden rows of the draft slots 1 to K-1, [K-1, E], of the block that starts with `anchor_id`."""
        block_ids = self._mask_ids.clone()
        block_ids[0] = anchor_id
        return self.drafter.draft(self.head.embed(block_ids), self._cache.length, self._cache)[1:]

    def logits(self, anchor_id: int) -> Tensor:
        """Logits of the draft slots, [K-1, V], as the head gives them."""
        return self.head.logits(self.hidden(anchor_id))

    def draft(self, anchor_id: int) -> Tensor:
        """Draft the K-1 tokens after `anchor_id`, int64 [K-1]."""
        hidden = self.hidden(anchor_id)
        weight_VE, bias_V = self.head.lm_head_weight_VD, self.head.lm_head_bias_V
        hidden = hidden.to(weight_VE.dtype)
        # Scale and cap are monotone: the largest of the raw products is the largest logit.
        raw = (
            F.linear(hidden, weight_VE, bias_V)
            if self._forms is None
            else self._forms.linear(hidden, weight_VE, bias_V)
        )
        return _argmax(raw)


@torch.inference_mode()
def decode_plain(
    runner: TargetRunner, prompt_ids: Sequence[int], *, max_new_tokens: int, eos_ids: Collection[int] = ()
) -> Decoded:
    """Decode greedily, one token a forward.

    Args:
        runner: The target; its taps, if any, cost time for nothing here.
        prompt_ids: At least one token.
        max_new_tokens: At least 1; never exceeded.
        eos_ids: Tokens that end the answer; the one that did is part of it.
    """
    _check(prompt_ids, max_new_tokens)
    started = time.perf_counter()
    emitted = [int(_argmax(runner.prefill(_ids(prompt_ids, runner)).logits_RV))]
    first = time.perf_counter()
    while len(emitted) < max_new_tokens and emitted[-1] not in eos_ids:
        rows = runner.extend(_ids(emitted[-1:], runner))
        runner.keep(1)
        emitted.append(int(_argmax(rows.logits_RV)))
    return Decoded(tuple(emitted), (), first - started, time.perf_counter() - first)


@torch.inference_mode()
def decode_blocks(
    runner: TargetRunner,
    drafter: BlockDrafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
) -> Decoded:
    """Decode greedily with drafted blocks; emits what `decode_plain` emits.

    Args:
        runner: The target, tapped at the drafter's `target_layer_ids`.
        drafter: The drafter and head; restarted here.
        prompt_ids: As for `decode_plain`.
        max_new_tokens: As for `decode_plain`.
        eos_ids: As for `decode_plain`.
    """
    _check(prompt_ids, max_new_tokens)
    if runner.target_layer_ids != drafter.drafter.config.target_layer_ids:
        raise ValueError(f"taps {runner.target_layer_ids} are not the drafter's")
    started = time.perf_counter()
    rows = runner.prefill(_ids(prompt_ids, runner))
    emitted = [int(_argmax(rows.logits_RV))]
    first = time.perf_counter()
    drafter.restart()
    context, rounds = rows.features_RC, []
    while (left := max_new_tokens - len(emitted)) > 0 and emitted[-1] not in eos_ids:
        # With one token left a draft could not be used: the target's own next token fills the answer.
        drafts = drafter.block_size - 1 if left > 1 else 0
        block_ids = _ids(emitted[-1:], runner)
        if drafts:
            assert context is not None, "the runner has no taps"
            drafter.read(context)
            block_ids = torch.cat([block_ids, drafter.draft(emitted[-1])])
        rows = runner.extend(block_ids)
        new, kept = _accept(block_ids.tolist()[1:], _argmax(rows.logits_RV).tolist(), left=left, eos_ids=eos_ids)
        runner.keep(kept)
        context = None if rows.features_RC is None else rows.features_RC[:kept]
        ended = len(new) == left or new[-1] in eos_ids
        emitted += new
        rounds.append(Round(drafted=len(new) - 1 if ended else drafts, accepted=len(new) - 1))
    return Decoded(tuple(emitted), tuple(rounds), first - started, time.perf_counter() - first)


def _accept(drafts: list[int], said: list[int], *, left: int, eos_ids: Collection[int]) -> tuple[list[int], int]:
    """Tokens a round emits, and the rows that stay in the cache.

    Args:
        drafts: The K-1 drafts.
        said: The target's K tokens, one after each row of the block.
        left: Tokens that may still be emitted.
        eos_ids: Tokens that end the answer, also inside the block.
    """
    accepted = next((i for i, (d, t) in enumerate(zip(drafts, said, strict=False)) if d != t), len(drafts))
    new = said[: accepted + 1][:left]
    end = next((i for i, token in enumerate(new) if token in eos_ids), len(new) - 1)
    return new[: end + 1], accepted + 1


def _argmax(logits_RV: Tensor) -> Tensor:
    """Greedy tokens int64 [R]; lowest id of equals. In float32: bfloat16 `argmax` takes thrice as long on a CPU."""
    return logits_RV.float().argmax(dim=-1)


def _ids(token_ids: Sequence[int], runner: TargetRunner) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=runner.device)


def _check(prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    if not len(prompt_ids):
        raise ValueError("the prompt is empty: greedy decoding needs at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: ask for at least 1")
