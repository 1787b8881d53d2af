"""The simulation walks as decoding does: same blocks, same rounds."""

from __future__ import annotations

import pytest
import torch

from drafter_trainer.acceptance import summarise
from drafter_trainer.decode import BlockDrafter, decode_blocks
from drafter_trainer.head import TargetHead
from drafter_trainer.target_runner import TargetRunner
from drafter_trainer.types import MicroBatch, TrainBatch
from drafter_trainer.walk import answer_spans, simulate_acceptance, walk
from tests.support.decoding import own_answers, pack_answers, train_drafter
from tests.support.tiny_targets import some_prompt, tiny_drafter, tiny_target

LENGTHS = (7, 19, 12, 30)


@pytest.fixture(scope="module")
def trained():
    """A drafter that is right sometimes, prompts it has seen, and one it has not."""
    torch.manual_seed(3)
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target, taps=(0, 3), block_size=5)
    pairs = own_answers(target, [some_prompt(n, seed=n) for n in LENGTHS], max_new_tokens=24)
    train_drafter(drafter, target, pack_answers(target, drafter, pairs[:3]), steps=40)
    return target, drafter, pairs


@pytest.mark.parametrize("block_size", [5, 3])
def test_simulated_rounds_equal_those_of_decoding(trained, block_size: int) -> None:
    target, drafter, pairs = trained
    head = TargetHead.from_model(target)
    runner = TargetRunner(target, target_layer_ids=drafter.config.target_layer_ids)
    blocks = BlockDrafter(drafter, head, block_size=block_size)
    real = [list(decode_blocks(runner, blocks, prompt, max_new_tokens=24).rounds) for prompt, _ in pairs]
    simulated = walk(drafter, head, pack_answers(target, drafter, pairs), block_size=block_size)
    assert simulated == real
    assert {r.accepted for rounds in real for r in rounds} > {0, 1}, "nothing was accepted: nothing was shown"


def test_simulated_rounds_equal_those_of_decoding_that_ends_at_an_eos(trained) -> None:
    target, drafter, pairs = trained
    head = TargetHead.from_model(target)
    runner = TargetRunner(target, target_layer_ids=drafter.config.target_layer_ids)
    prompt, answer = pairs[0]
    for end in range(1, 12):
        stop = answer.index(answer[end]) + 1
        real = decode_blocks(runner, BlockDrafter(drafter, head), prompt, max_new_tokens=24, eos_ids={answer[end]})
        simulated = walk(drafter, head, pack_answers(target, drafter, [(prompt, answer[:stop])]))
        assert simulated == [list(real.rounds)]


def test_walking_several_turns_of_one_document_equals_walking_them_alone(trained) -> None:
    target, drafter, pairs = trained
    head = TargetHead.from_model(target)
    batch = pack_answers(target, drafter, pairs[:1])
    length, start = batch.micro.lengths[0], len(pairs[0][0])
    cut = start + 11
    mask = batch.micro.loss_mask_T.clone()
    mask[cut : cut + 2] = False  # two turns now: [start, cut) and [cut + 2, length)
    both = walk(drafter, head, _with_mask(batch, mask))
    alone = []
    for first, last in ((start, cut), (cut + 2, length)):
        only = torch.zeros_like(mask)
        only[first:last] = True
        alone += walk(drafter, head, _with_mask(batch, only))
    assert both == alone
    assert len(both) == 2


def test_answers_of_neighbouring_documents_stay_apart() -> None:
    # Document 0 is supervised to its end and document 1 from its start: packed, the mask has one run.
    target = tiny_target("qwen3")
    drafter, head = tiny_drafter(target), TargetHead.from_model(target)
    batch = pack_answers(target, drafter, [([5], [6, 7, 8]), ([9], [10, 11])])
    rounds = walk(drafter, head, _with_mask(batch, torch.ones(7, dtype=torch.bool)))
    # Nothing predicts a first token: each answer starts with its document's second.
    assert rounds == walk(drafter, head, batch)
    assert [sum(r.emitted for r in answer) for answer in rounds] == [2, 1]


def test_mean_over_walked_rounds_is_the_reported_acceptance(trained) -> None:
    target, drafter, pairs = trained
    head, batch = TargetHead.from_model(target), pack_answers(target, drafter, pairs)
    found = simulate_acceptance(drafter, head, batch)
    assert found == summarise(walk(drafter, head, batch), block_size=5)
    assert found.emitted == sum(len(a) - 1 for _, a in pairs)


def test_batch_without_answers_has_no_rounds() -> None:
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target)
    batch = pack_answers(target, drafter, [([5, 6], [7])])
    assert walk(drafter, TargetHead.from_model(target), batch) == [[]]
    none = _with_mask(batch, torch.zeros(3, dtype=torch.bool))
    assert simulate_acceptance(drafter, TargetHead.from_model(target), none).rounds == 0


def test_spans_are_runs_of_supervised_tokens() -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1], dtype=torch.bool)
    assert answer_spans(mask) == [(1, 3), (5, 6), (7, 8)]
    assert answer_spans(torch.zeros(3, dtype=torch.bool)) == []


def test_block_longer_than_trained_is_refused(trained) -> None:
    target, drafter, pairs = trained
    with pytest.raises(ValueError, match="block_size 6"):
        walk(drafter, TargetHead.from_model(target), pack_answers(target, drafter, pairs), block_size=6)


def _with_mask(batch: TrainBatch, mask: torch.Tensor) -> TrainBatch:
    micro = MicroBatch(**{**vars(batch.micro), "loss_mask_T": mask})
    return TrainBatch(micro, batch.features_TC, batch.target_version, batch.replica_index)
