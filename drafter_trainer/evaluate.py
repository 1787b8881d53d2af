"""Measures a drafter against its target: acceptance length, equality with plain decoding, tokens a second.

Owns the procedure and the report. The target is loaded in this process; nothing is simulated except where it says so.
Everything that is compared is measured side by side: plain and block decoding run the same prompts, interleaved, one
at a time, through the same linear kernels, and speeds are medians over prompts, so that a busy neighbour hits both.

    1. references   the target's greedy answers, in batches
    2. simulation   walk them at the trained block length: acceptance by slot, no verification needed
    3. acceptance   decode every prompt with blocks of the trained length; compare with 1; on a difference decode
                    plainly, and if it stays measure whether it is a tie
    4. speed        some prompts, plain and with blocks of the length that 2 and measured costs favour
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter_trainer.acceptance import Acceptance, Round, summarise
from drafter_trainer.decode import BlockDrafter, Decoded, decode_blocks, decode_plain
from drafter_trainer.divergence import Divergence, explain_divergence, first_difference
from drafter_trainer.head import TargetHead
from drafter_trainer.model import Drafter
from drafter_trainer.references import Reference, batched_answers, eos_ids_of
from drafter_trainer.report import AcceptanceReport, Comparison, Speed, build_report
from drafter_trainer.round_cost import candidate_lengths, pick_drafter
from drafter_trainer.skinny import MANY_ROWS, LinearForms, SkinnyLinear
from drafter_trainer.target_runner import TargetRunner
from drafter_trainer.types import MicroBatch, TrainBatch, Version
from drafter_trainer.walk import walk

__all__ = ["EvaluationSettings", "Prompt", "evaluate_acceptance", "walk_references"]

logger = logging.getLogger(__name__)

_MAX_ROWS_PER_WALK = 2048
"""Context rows walked at once; bounds the memory of their keys and values."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised as it would be served, and where it comes from."""

    token_ids: tuple[int, ...]
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """How much to measure.

    Attributes:
        max_new_tokens: Longest answer.
        block_size: Block length for acceptance; None for the trained one.
        speed_prompts: Prompts timed both ways, spread over all; 0 measures no speed, None takes all.
        speed_block_size: Block length for speed; None picks it by measured cost and acceptance by slot.
        batch_size: Prompts of a reference batch.
        progress: Called with (what, done, total) as prompts finish.
    """

    max_new_tokens: int = 128
    block_size: int | None = None
    speed_prompts: int | None = None
    speed_block_size: int | None = None
    batch_size: int = 16
    progress: Callable[[str, int, int], None] = field(default=lambda _what, _done, _total: None)


def evaluate_acceptance(
    model: Any, drafter: Drafter, prompts: Sequence[Prompt], settings: EvaluationSettings
) -> AcceptanceReport:
    """Measure `drafter` against `model` on `prompts`.

    Args:
        model: The target, a transformers causal LM in eval mode, in the dtype that is to be measured. Its linear
            modules are replaced while this runs and restored.
        drafter: In eval mode, in the dtype it is to run in.
        prompts: At least one.
        settings: How much to measure.

    Raises:
        ValueError: No prompt, or a block length above the trained one.
    """
    if not prompts:
        raise ValueError("there is no prompt to evaluate on")
    return _Evaluation(model, drafter, prompts, settings).run()


def walk_references(
    drafter: Drafter,
    head: TargetHead,
    prompts: Sequence[Sequence[int]],
    references: Sequence[Reference],
    *,
    block_size: int | None = None,
) -> list[list[Round]]:
    """Walk the target's own answers, which is what real decoding would do: the rounds of each, in order.

    Args:
        drafter: In eval mode.
        head: The head of the target that answered.
        prompts: Token ids.
        references: Its answers to them (`batched_answers` with the drafter's taps).
        block_size: Block length; None for the trained one.
    """
    rounds: list[list[Round]] = []
    waiting: list[tuple[Tensor, Tensor, int]] = []
    for number, (prompt, reference) in enumerate(zip(prompts, references, strict=True)):
        ids = torch.tensor([*prompt, *reference.token_ids])
        # The last token has no state, and none is needed: blocks see what is before their anchor.
        features = F.pad(reference.features_RC, (0, 0, 0, 1))
        waiting.append((ids, features, len(prompt)))
        if sum(len(i) for i, _, _ in waiting) > _MAX_ROWS_PER_WALK or number + 1 == len(references):
            rounds += walk(drafter, head, _pack(waiting), block_size=block_size)
            waiting = []
    return rounds


class _Evaluation:
    """One evaluation; its steps are those of the module's docstring."""

    def __init__(self, model: Any, drafter: Drafter, prompts: Sequence[Prompt], settings: EvaluationSettings) -> None:
        self._model, self._drafter, self._prompts, self._settings = model, drafter, prompts, settings
        self._eos_ids = eos_ids_of(model)
        self._forms = LinearForms()
        self._head = TargetHead.from_model(model)
        self._plain = TargetRunner(model)
        self._tapped = TargetRunner(model, target_layer_ids=drafter.config.target_layer_ids)
        self._blocks = self._block_drafter(settings.block_size)

    def run(self) -> AcceptanceReport:
        lengths = self._speed_lengths()
        sizes = {self._blocks.block_size, *lengths}
        rows = {1, self._settings.batch_size, MANY_ROWS, *(n for size in sizes for n in (size - 1, size))}
        with SkinnyLinear(self._model, self._forms, rows=rows), SkinnyLinear(self._drafter, self._forms, rows=rows):
            references = self._references()
            prompts = [prompt.token_ids for prompt in self._prompts]
            size = self._blocks.block_size
            rounds = walk_references(self._drafter, self._head, prompts, references, block_size=size)
            simulated = summarise(rounds, block_size=size)
            comparisons = [self._compare(i, r.token_ids) for i, r in enumerate(references)]
            speed = self._speed(lengths, simulated)
        return build_report(
            comparisons,
            [prompt.source for prompt in self._prompts],
            simulated=simulated,
            speed=speed,
            block_size=self._blocks.block_size,
            dtype=str(self._head.dtype).removeprefix("torch."),
        )

    def _block_drafter(self, block_size: int | None) -> BlockDrafter:
        return BlockDrafter(self._drafter, self._head, block_size=block_size, forms=self._forms)

    def _speed_lengths(self) -> tuple[int, ...]:
        if self._settings.speed_prompts == 0:
            return ()
        chosen = self._settings.speed_block_size
        return candidate_lengths(self._drafter.config.block_size) if chosen is None else (chosen,)

    def _references(self) -> list[Reference]:
        self._settings.progress("references", 0, len(self._prompts))
        return batched_answers(
            self._model,
            [prompt.token_ids for prompt in self._prompts],
            max_new_tokens=self._settings.max_new_tokens,
            eos_ids=self._eos_ids,
            batch_size=self._settings.batch_size,
            target_layer_ids=self._tapped.target_layer_ids,
        )

    def _decode(self, index: int, drafter: BlockDrafter | None) -> Decoded:
        prompt, limit = self._prompts[index].token_ids, self._settings.max_new_tokens
        if drafter is None:
            return decode_plain(self._plain, prompt, max_new_tokens=limit, eos_ids=self._eos_ids)
        return decode_blocks(self._tapped, drafter, prompt, max_new_tokens=limit, eos_ids=self._eos_ids)

    def _compare(self, index: int, reference: tuple[int, ...]) -> Comparison:
        self._settings.progress("acceptance", index, len(self._prompts))
        blocks = self._decode(index, self._blocks)
        if first_difference(reference, blocks.token_ids) is not None:
            reference = self._decode(index, None).token_ids
        return Comparison(blocks.rounds, *self._explain(index, reference, blocks.token_ids))

    def _explain(self, index: int, plain: tuple[int, ...], blocks: tuple[int, ...]) -> tuple[bool, Divergence | None]:
        """Whether the answers are equal, and if not, the measured difference; None where one just ends earlier."""
        position = first_difference(plain, blocks)
        if position is None:
            return True, None
        if position == min(len(plain), len(blocks)):
            logger.warning(
                "prompt %d: answers of %d and %d tokens, one the other's start", index, len(plain), len(blocks)
            )
            return False, None
        found = explain_divergence(self._plain, self._prompts[index].token_ids, plain, blocks)
        log = logger.info if found.is_tie else logger.warning
        log(
            "prompt %d: tokens %s differ at %d, logits %.3g apart, %.1f ulps",
            index, found.token_ids, position, found.gap, found.gap / found.ulp,
        )  # fmt: skip
        return False, found

    def _speed(self, lengths: Sequence[int], simulated: Acceptance) -> Speed | None:
        if not lengths:
            return None
        drafters = [self._block_drafter(length) for length in lengths]
        longest = max(self._prompts, key=lambda prompt: len(prompt.token_ids))
        drafter = drafters[0]
        if len(drafters) > 1:
            drafter = pick_drafter(self._tapped, drafters, longest.token_ids, simulated.by_slot)
        chosen = self._timed_prompts()
        plain: dict[int, Decoded] = {}
        blocks: dict[int, Decoded] = {}
        for number, index in enumerate(chosen):
            self._settings.progress("speed", number, len(chosen))
            # Each goes first as often, so that neither always meets the caches the other left.
            for which in (plain, blocks) if number % 2 else (blocks, plain):
                which[index] = self._decode(index, None if which is plain else drafter)
        return Speed(
            block_size=drafter.block_size,
            plain={i: d.tokens_per_second for i, d in plain.items()},
            blocks={i: d.tokens_per_second for i, d in blocks.items()},
            comparisons=tuple(
                Comparison(blocks[i].rounds, *self._explain(i, plain[i].token_ids, blocks[i].token_ids)) for i in chosen
            ),
        )

    def _timed_prompts(self) -> list[int]:
        total = len(self._prompts)
        count = total if self._settings.speed_prompts is None else min(self._settings.speed_prompts, total)
        return [i * total // count for i in range(count)]


def _pack(documents: Sequence[tuple[Tensor, Tensor, int]]) -> TrainBatch:
    """(ids, features, prompt length) of several sequences as one packed batch."""
    micro = MicroBatch(
        position=0,
        epoch=0,
        sample_ids=tuple(range(len(documents))),
        lengths=tuple(len(ids) for ids, _, _ in documents),
        input_ids_T=torch.cat([ids for ids, _, _ in documents]),
        loss_mask_T=torch.cat([torch.arange(len(ids)) >= prompt for ids, _, prompt in documents]),
    )
    return TrainBatch(micro, torch.cat([features for _, features, _ in documents]), Version(0, "in-process"), 0)
