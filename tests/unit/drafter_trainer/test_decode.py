"""Block decoding changes how fast the target's greedy answer comes, never what it is."""

from __future__ import annotations

import pytest
import torch

from drafter_trainer.acceptance import Round
from drafter_trainer.decode import BlockDrafter, decode_blocks, decode_plain
from drafter_trainer.divergence import TIE_ULPS, explain_divergence, first_difference
from drafter_trainer.head import TargetHead
from drafter_trainer.target_runner import TargetRunner
from tests.support.decoding import ScriptedDrafter
from tests.support.tiny_targets import ARCHITECTURES, some_prompt, tiny_drafter, tiny_target

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers.*", "ignore::FutureWarning:transformers.*")

PROMPT_LENGTH = 23
NEW_TOKENS = 30


def _scripted(architecture: str, right: list[int]):
    target = tiny_target(architecture)
    drafter = tiny_drafter(target)
    prompt = some_prompt(PROMPT_LENGTH)
    plain = decode_plain(TargetRunner(target), prompt, max_new_tokens=NEW_TOKENS)
    runner = TargetRunner(target, target_layer_ids=drafter.config.target_layer_ids)
    scripted = ScriptedDrafter(drafter, TargetHead.from_model(target), plain.token_ids, right)
    return runner, scripted, prompt, plain


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plain_decoding_equals_transformers_generate(architecture: str) -> None:
    target, prompt = tiny_target(architecture), some_prompt(PROMPT_LENGTH)
    ids, seen = torch.tensor([prompt]), torch.ones(1, PROMPT_LENGTH)
    expected = target.generate(ids, attention_mask=seen, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    plain = decode_plain(TargetRunner(target), prompt, max_new_tokens=NEW_TOKENS)
    assert list(plain.token_ids) == expected[0, PROMPT_LENGTH:].tolist()
    assert len(set(plain.token_ids)) > 5, "an answer this dull shows nothing"


@pytest.mark.parametrize("right", [[0], [1], [3], [0, 3, 1, 2]], ids=["none", "one", "all", "mixed"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_block_decoding_equals_plain_decoding_whatever_is_accepted(architecture: str, right: list[int]) -> None:
    runner, drafter, prompt, plain = _scripted(architecture, right)
    blocks = decode_blocks(runner, drafter, prompt, max_new_tokens=NEW_TOKENS)
    assert blocks.token_ids == plain.token_ids
    assert [r.accepted for r in blocks.rounds[:-1]] == [right[i % len(right)] for i in range(len(blocks.rounds) - 1)]
    assert 1 + sum(r.emitted for r in blocks.rounds) == NEW_TOKENS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cache_after_rejections_gives_the_logits_of_a_fresh_forward(architecture: str) -> None:
    # Equal argmax can hide a stale cache; logits can't.
    target, prompt = tiny_target(architecture), some_prompt(PROMPT_LENGTH)
    runner = TargetRunner(target, target_layer_ids=(0, 2))
    tokens = list(prompt)
    with torch.inference_mode():
        runner.prefill(torch.tensor(tokens))
        for round_, kept in enumerate([1, 4, 2, 1, 3, 4, 1]):
            block = some_prompt(4, seed=100 + round_)
            rows = runner.extend(torch.tensor(block))
            runner.keep(kept)
            fresh = TargetRunner(target, target_layer_ids=(0, 2)).prefill(torch.tensor(tokens + block))
            torch.testing.assert_close(rows.logits_RV[-1:], fresh.logits_RV, atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(rows.features_RC, fresh.features_RC[-4:], atol=2e-4, rtol=2e-4)
            tokens += block[:kept]


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_bfloat16_divergences_are_ties(architecture: str) -> None:
    target = tiny_target(architecture, dtype=torch.bfloat16)
    drafter = tiny_drafter(target, dtype=torch.bfloat16)
    blocks_runner = TargetRunner(target, target_layer_ids=drafter.config.target_layer_ids)
    block_drafter = BlockDrafter(drafter, TargetHead.from_model(target))
    for seed in range(4):
        prompt = some_prompt(PROMPT_LENGTH, seed=seed)
        plain = decode_plain(TargetRunner(target), prompt, max_new_tokens=NEW_TOKENS)
        blocks = decode_blocks(blocks_runner, block_drafter, prompt, max_new_tokens=NEW_TOKENS)
        if first_difference(plain.token_ids, blocks.token_ids) is not None:
            assert explain_divergence(TargetRunner(target), prompt, plain.token_ids, blocks.token_ids).is_tie


def test_divergence_is_no_tie_when_one_token_is_simply_wrong() -> None:
    target, prompt = tiny_target("qwen3"), some_prompt(PROMPT_LENGTH)
    plain = list(decode_plain(TargetRunner(target), prompt, max_new_tokens=6).token_ids)
    wrong = [*plain[:3], (plain[3] + 1) % 300, *plain[4:]]
    found = explain_divergence(TargetRunner(target), prompt, plain, wrong)
    assert found.position == 3
    assert found.token_ids == (plain[3], wrong[3])
    assert found.gap > TIE_ULPS * found.ulp
    assert not found.is_tie


def test_divergence_refuses_answers_that_only_end_earlier() -> None:
    with pytest.raises(ValueError, match="no differing token"):
        explain_divergence(TargetRunner(tiny_target("qwen3")), [1, 2], [5, 6], [5, 6, 7])


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 5, 9])
def test_block_decoding_never_emits_more_than_asked(max_new_tokens: int) -> None:
    runner, drafter, prompt, plain = _scripted("qwen3", [3])
    blocks = decode_blocks(runner, drafter, prompt, max_new_tokens=max_new_tokens)
    assert blocks.token_ids == plain.token_ids[:max_new_tokens]
    assert sum(r.emitted for r in blocks.rounds) == max_new_tokens - 1


@pytest.mark.parametrize("right", [[3], [0], [1, 2]], ids=["all", "none", "mixed"])
@pytest.mark.parametrize("end", [0, 1, 2, 3, 4, 5, 6, 7])
def test_block_decoding_stops_at_an_eos_anywhere_in_a_block(end: int, right: list[int]) -> None:
    runner, drafter, prompt, plain = _scripted("qwen3", right)
    eos = plain.token_ids[end]
    stop = plain.token_ids.index(eos) + 1
    several = {eos, 10_000}  # any of several ends the answer
    expected = decode_plain(runner, prompt, max_new_tokens=NEW_TOKENS, eos_ids=several)
    assert expected.token_ids == plain.token_ids[:stop]
    blocks = decode_blocks(runner, drafter, prompt, max_new_tokens=NEW_TOKENS, eos_ids=several)
    assert blocks.token_ids == expected.token_ids
    assert 1 + sum(r.emitted for r in blocks.rounds) == stop


def test_rounds_report_what_was_accepted() -> None:
    runner, drafter, prompt, _ = _scripted("qwen3", [2, 0, 3])
    blocks = decode_blocks(runner, drafter, prompt, max_new_tokens=8)
    # 1 from the prefill, then 3 and 1; three are left, so of the last round's 3 right drafts 2 count.
    assert blocks.rounds == (Round(3, 2), Round(3, 0), Round(2, 2))


@pytest.mark.parametrize("block_size", [2, 3, 4])
def test_block_may_be_shorter_than_trained(block_size: int) -> None:
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target, block_size=4)
    runner = TargetRunner(target, target_layer_ids=drafter.config.target_layer_ids)
    shorter = BlockDrafter(drafter, TargetHead.from_model(target), block_size=block_size)
    prompt = some_prompt(PROMPT_LENGTH)
    blocks = decode_blocks(runner, shorter, prompt, max_new_tokens=12)
    assert blocks.token_ids == decode_plain(runner, prompt, max_new_tokens=12).token_ids
    assert {r.drafted for r in blocks.rounds[:-1]} == {block_size - 1}


@pytest.mark.parametrize("block_size", [1, 5])
def test_block_longer_than_trained_or_without_a_draft_is_refused(block_size: int) -> None:
    target = tiny_target("qwen3")
    with pytest.raises(ValueError, match=f"block_size {block_size} is not from 2 to 4"):
        BlockDrafter(tiny_drafter(target, block_size=4), TargetHead.from_model(target), block_size=block_size)


def test_runner_with_other_taps_than_the_drafters_is_refused() -> None:
    target = tiny_target("qwen3")
    drafter = BlockDrafter(tiny_drafter(target, taps=(0, 2)), TargetHead.from_model(target))
    with pytest.raises(ValueError, match="not the drafter's"):
        decode_blocks(TargetRunner(target, target_layer_ids=(2, 0)), drafter, [1, 2], max_new_tokens=2)


def test_empty_prompt_and_no_tokens_are_refused() -> None:
    runner = TargetRunner(tiny_target("qwen3"))
    with pytest.raises(ValueError, match="prompt is empty"):
        decode_plain(runner, [], max_new_tokens=2)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        decode_plain(runner, [1], max_new_tokens=0)


def test_tap_outside_the_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[4\] are not in a target of 4 layers"):
        TargetRunner(tiny_target("qwen3"), target_layer_ids=(1, 4))


def test_features_are_the_block_outputs_of_transformers() -> None:
    # case 35: tap i is hidden_states[i + 1]
    target, prompt = tiny_target("qwen3"), torch.tensor([some_prompt(9)])
    states = target(prompt, output_hidden_states=True).hidden_states
    features = TargetRunner(target, target_layer_ids=(2, 0)).prefill(prompt[0]).features_RC
    assert torch.equal(features, torch.cat([states[3], states[1]], dim=-1)[0])


def test_no_hook_stays_behind() -> None:
    target = tiny_target("qwen3")
    hooks = target.get_decoder().layers[0]._forward_hooks  # transformers keeps some of its own there
    before = list(hooks)
    TargetRunner(target, target_layer_ids=(0,)).prefill(torch.tensor([1, 2]))
    assert list(hooks) == before
