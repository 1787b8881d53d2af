"""Acceptance without a target: walks known answers as block decoding would walk them.

Owns the simulation. Given an answer that is (near) what the target would say and the target's features for it, a
round at an anchor drafts a block and counts how far it agrees with the answer; the next anchor is the token after the
accepted prefix, as in decoding. Averaging over all positions instead counts easy stretches, which decoding jumps
over, as often as hard ones: it gave 2.11 where decoding gave 1.64.

All sequences walk at once: each step runs the blocks of every sequence that is not done in one forward, over context
keys and values computed once.

Shapes: T packed context tokens, C taps * D, S sequences still walking, K block, E hidden, V vocab.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_trainer.acceptance import Acceptance, Round, summarise
from drafter_trainer.attention import BlockLayout
from drafter_trainer.head import TargetHead
from drafter_trainer.model import Drafter
from drafter_trainer.types import TrainBatch

__all__ = ["answer_spans", "simulate_acceptance", "simulated_part", "walk"]

# In training, the simulation walks this much of a step's first batch: enough to follow a curve, too little to slow
# training. An untrained drafter advances one token a round.
SIMULATED_DOCUMENTS = 4
SIMULATED_TOKENS = 48
# Logits held at once: few enough for a vocabulary of 250,000 in 128 MB, and many enough not to read the head for each
# sequence anew.
LOGIT_ROWS = 128


@dataclass
class _Walker:
    """One answer being walked: tokens [start, end) of document `document`; `anchor` is the last emitted one."""

    document: int
    anchor: int
    end: int
    rounds: list[Round]

    @property
    def left(self) -> int:
        return self.end - 1 - self.anchor


def answer_spans(loss_mask_T: Tensor) -> list[tuple[int, int]]:
    """Runs of supervised tokens as (start, end); each is one answer, its first token what the prefill gave."""
    padded = torch.zeros(loss_mask_T.numel() + 2, dtype=torch.int8)
    padded[1:-1] = loss_mask_T.to("cpu", torch.int8)
    edges = padded.diff()
    starts, ends = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def simulate_acceptance(
    drafter: Drafter,
    head: TargetHead,
    batch: TrainBatch,
    *,
    block_size: int | None = None,
) -> Acceptance:
    """Walk every answer of a packed batch and summarise, each answer counting as one sequence. See `walk`."""
    rounds = walk(drafter, head, batch, block_size=block_size)
    return summarise(rounds, block_size=block_size or drafter.config.block_size)


def simulated_part(batch: TrainBatch) -> TrainBatch:
    """The first documents of a batch, each with only its first supervised tokens left."""
    micro = batch.micro
    lengths = micro.lengths[:SIMULATED_DOCUMENTS]
    tokens = sum(lengths)
    masks = torch.split(micro.loss_mask_T[:tokens], list(lengths))
    limited = dataclasses.replace(
        micro,
        sample_ids=micro.sample_ids[: len(lengths)],
        lengths=lengths,
        input_ids_T=micro.input_ids_T[:tokens],
        loss_mask_T=torch.cat([mask_T & (mask_T.cumsum(0) <= SIMULATED_TOKENS) for mask_T in masks]),
    )
    return dataclasses.replace(batch, micro=limited, features_TC=batch.features_TC[:tokens], last_TD=None)


@torch.inference_mode()
def walk(
    drafter: Drafter,
    head: TargetHead,
    batch: TrainBatch,
    *,
    block_size: int | None = None,
) -> list[list[Round]]:
    """Walk every answer of a packed batch.

    Args:
        drafter: In the dtype that it will decode in.
        head: The target's head.
        batch: Packed documents and the target's features for them.
        block_size: Block length, anchor included; the trained one by default, never more.

    Returns:
        The rounds of each answer, documents in order. They equal those of real block decoding whenever the answer is
        the target's own greedy one. An answer of one token has none.
    """
    lengths = batch.micro.lengths
    size = block_size or drafter.config.block_size
    if not 2 <= size <= drafter.config.block_size:
        raise ValueError(f"block_size {size} is not from 2 to {drafter.config.block_size}, the trained block size")
    documents = batch.micro.input_ids_T.cpu().split(list(lengths))  # type: ignore[no-untyped-call]
    walkers = list(_walkers(lengths, batch.micro.loss_mask_T))
    context = _context(drafter, batch.features_TC.to(head.device), lengths)
    while walking := [w for w in walkers if w.left > 0]:
        anchor_ids = torch.stack([documents[w.document][w.anchor] for w in walking])
        layout = BlockLayout(
            lengths,
            torch.tensor([w.document for w in walking]),
            torch.tensor([w.anchor for w in walking]),
            size,
        )
        drafts_SK = _draft(drafter, head, anchor_ids, context, layout)
        for walker, drafts in zip(walking, drafts_SK, strict=True):
            answer = documents[walker.document][walker.anchor + 1 : walker.end]
            walker.rounds.append(_advance(walker, drafts.tolist(), answer.tolist()))
    return [w.rounds for w in walkers]


def _walkers(lengths: Sequence[int], loss_mask_T: Tensor) -> Iterator[_Walker]:
    # Spans are sought document by document: packed neighbours may both be supervised where they touch.
    for document, mask in enumerate(loss_mask_T.split(list(lengths))):  # type: ignore[no-untyped-call]
        for start, end in answer_spans(mask):
            # Nothing predicts a document's first token: an answer that starts there is walked from its second.
            yield _Walker(document, max(start, 1), end, [])


def _advance(walker: _Walker, drafts: list[int], answer: list[int]) -> Round:
    """Move `walker` behind what a round of `drafts` emits of the rest of its `answer`."""
    drafted = min(len(drafts), walker.left - 1)
    accepted = next((i for i in range(drafted) if drafts[i] != answer[i]), drafted)
    walker.anchor += accepted + 1
    ended = walker.left == 0
    return Round(drafted=accepted if ended else len(drafts), accepted=accepted)


def _context(drafter: Drafter, features_TC: Tensor, lengths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of all context tokens, by layer."""
    rotary = drafter.rotary(torch.cat([torch.arange(n) for n in lengths]).to(features_TC.device))
    fused_TE = drafter.fuse(features_TC)
    return [layer.self_attn.key_value(fused_TE, rotary) for layer in drafter.layers]  # type: ignore[union-attr, operator]


def _draft(
    drafter: Drafter,
    head: TargetHead,
    anchor_ids: Tensor,
    context: list[tuple[Tensor, Tensor]],
    layout: BlockLayout,
) -> Tensor:
    """Draft a block at every anchor: int64 [S, K-1] on the CPU."""
    block_ids_SK = torch.full((len(anchor_ids), layout.block_size), drafter.config.mask_token_id)
    block_ids_SK[:, 0] = anchor_ids
    x_QE = head.embed(block_ids_SK.flatten().to(head.device)).to(drafter.fc.weight.dtype)
    rotary = drafter.rotary(layout.position_Q.to(x_QE.device))
    for layer, context_kv in zip(drafter.draft_layers(), context, strict=True):
        x_QE = layer.over_keys(x_QE, context_kv, layout=layout, rotary_Q=rotary)
    hidden_RE = drafter.norm(x_QE).unflatten(0, (len(anchor_ids), -1))[:, 1:].flatten(0, 1)
    tokens_R = torch.cat([head.logits(rows).float().argmax(-1) for rows in hidden_RE.split(LOGIT_ROWS)])
    return tokens_R.view(len(anchor_ids), -1).cpu()
