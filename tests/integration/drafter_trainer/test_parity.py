"""Training and decoding are the same computation: the test that catches shifts, leaks and wrong masks.

A drafter that is good in training and poor in decoding has, so far, always had one of these faults (cases 38, 39, 40,
55).
"""

from __future__ import annotations

import pytest
import torch

from drafter_trainer.anchors import Anchors
from drafter_trainer.attention import BlockLayout
from drafter_trainer.decode import BlockDrafter, decode_blocks
from drafter_trainer.head import TargetHead
from drafter_trainer.target_runner import TargetRunner
from tests.support.decoding import own_answers, pack_answers, train_drafter
from tests.support.tiny_targets import MASK_ID, some_prompt, tiny_drafter, tiny_target

BLOCK = 6


def _training_logits(drafter, head, batch, document: int, position: int) -> torch.Tensor:
    """Teacher-forced logits [K-1, V] of one block among many others, by the path that training takes."""
    lengths = batch.micro.lengths
    offsets = [sum(lengths[:i]) for i in range(len(lengths))]
    anchors = [(d, p) for d, n in enumerate(lengths) for p in range(0, n, 3)] + [(document, position)]
    anchors = sorted(set(anchors))
    chosen = anchors.index((document, position))
    document_A, position_A = torch.tensor(anchors).T
    index_A = torch.tensor([offsets[d] for d, _ in anchors]) + position_A
    layout = BlockLayout.from_anchors(lengths, Anchors(index_A, document_A, position_A), block_size=BLOCK)
    ids_AK = torch.full((len(anchors), BLOCK), MASK_ID)
    ids_AK[:, 0] = batch.micro.input_ids_T[index_A]
    hidden = drafter(head.embed(ids_AK.flatten()), batch.features_TC, layout=layout)
    return head.logits(hidden.view(len(anchors), BLOCK, -1)[chosen, 1:])


def _first_round_logits(target, drafter, head, prefix: list[int], anchor: int) -> torch.Tensor:
    """Logits [K-1, V] of the first block that decoding drafts after `prefix`, whose next token is `anchor`."""
    runner = TargetRunner(target, target_layer_ids=drafter.config.target_layer_ids)
    blocks = BlockDrafter(drafter, head)
    blocks.read(runner.prefill(torch.tensor(prefix)).features_RC)
    return blocks.logits(anchor)


def _drafter(target, *, layers: int, trained: bool, **config):
    taps = {1: (2,), 2: (0, 3), 5: (0, 1, 2, 3, 3)}[layers]
    drafter = tiny_drafter(target, layers=layers, taps=taps, block_size=BLOCK, **config)
    if trained:
        train_drafter(drafter, target, pack_answers(target, drafter, _pairs(target)), steps=6)
    return drafter


def _pairs(target):
    return own_answers(target, [some_prompt(n, seed=n) for n in (9, 17)], max_new_tokens=16)


VARIANTS = {
    "full": {},
    "sliding": {"layer_types": "sliding_attention", "sliding_window": 7},
    "sliding bidirectional": {"layer_types": "sliding_attention", "sliding_window": 7, "is_causal": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_training_logits_equal_first_round_logits(layers: int, trained: bool, variant: str) -> None:
    # cases 38, 39, 40, 55. 13 blocks of 6 are no multiple of 128 (case 41).
    target = tiny_target("qwen3")
    config = dict(VARIANTS[variant])
    if "layer_types" in config:
        config["layer_types"] = (config["layer_types"],) * layers
    drafter = _drafter(target, layers=layers, trained=trained, **config)
    head = TargetHead.from_model(target)
    pairs = _pairs(target)
    batch = pack_answers(target, drafter, pairs)
    with torch.inference_mode():
        for document, (prompt, answer) in enumerate(pairs):
            tokens = [*prompt, *answer]
            for position in (1, len(prompt), len(prompt) + 7, len(tokens) - 1):
                taught = _training_logits(drafter, head, batch, document, position)
                drafted = _first_round_logits(target, drafter, head, tokens[:position], tokens[position])
                torch.testing.assert_close(taught, drafted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("architecture", ["gemma3", "qwen3_5"])
def test_parity_holds_for_scaled_embeddings_and_hybrid_targets(architecture: str) -> None:
    target = tiny_target(architecture)
    drafter = _drafter(target, layers=2, trained=False)
    head, pairs = TargetHead.from_model(target), _pairs(target)
    batch = pack_answers(target, drafter, pairs)
    prompt, answer = pairs[1]
    with torch.inference_mode():
        taught = _training_logits(drafter, head, batch, 1, len(prompt) + 3)
        drafted = _first_round_logits(target, drafter, head, [*prompt, *answer[:3]], answer[3])
    torch.testing.assert_close(taught, drafted, atol=5e-4, rtol=5e-4)


def test_later_rounds_draft_what_a_fresh_prefill_would() -> None:
    # The context that grew over rounds, rejected rows dropped, equals the context read at once.
    target = tiny_target("qwen3")
    drafter = _drafter(target, layers=2, trained=False)
    head = TargetHead.from_model(target)
    runner = TargetRunner(target, target_layer_ids=drafter.config.target_layer_ids)
    seen = []

    class Recording(BlockDrafter):
        def draft(self, anchor_id: int) -> torch.Tensor:
            seen.append((self._cache.length, anchor_id, self.logits(anchor_id)))
            return super().draft(anchor_id)

    prompt = some_prompt(9)
    answer = decode_blocks(runner, Recording(drafter, head), prompt, max_new_tokens=12).token_ids
    tokens = [*prompt, *answer]
    with torch.inference_mode():
        for length, anchor, logits in seen:
            assert tokens[length] == anchor
            fresh = _first_round_logits(target, drafter, head, tokens[:length], anchor)
            torch.testing.assert_close(logits, fresh, atol=2e-4, rtol=2e-4)
    assert len(seen) > 3


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5"])
def test_overfitted_drafter_accepts_nearly_whole_blocks(architecture: str) -> None:
    # case 38: with any misalignment of labels, positions or features the loss falls and the acceptance stays at 1.
    target = tiny_target(architecture)
    drafter = tiny_drafter(target, layers=2, taps=(0, 2), block_size=BLOCK)
    [(prompt, answer)] = own_answers(target, [some_prompt(12, seed=4)], max_new_tokens=31)
    loss = train_drafter(drafter, target, pack_answers(target, drafter, [(prompt, answer)]), steps=120)
    assert loss < 0.1
    runner = TargetRunner(target, target_layer_ids=drafter.config.target_layer_ids)
    blocks = decode_blocks(runner, BlockDrafter(drafter, TargetHead.from_model(target)), prompt, max_new_tokens=31)
    assert blocks.token_ids == tuple(answer)
    assert sum(r.emitted for r in blocks.rounds) / len(blocks.rounds) >= BLOCK - 1
