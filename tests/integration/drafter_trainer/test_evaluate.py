"""An evaluation measures what it says: equality, acceptance real and simulated, speeds side by side."""

from __future__ import annotations

import json

import pytest
import torch

from drafter_trainer.acceptance import Round, summarise
from drafter_trainer.decode import BlockDrafter, decode_blocks, decode_plain
from drafter_trainer.divergence import Divergence
from drafter_trainer.evaluate import EvaluationSettings, Prompt, evaluate_acceptance
from drafter_trainer.head import TargetHead
from drafter_trainer.references import batched_answers, eos_ids_of
from drafter_trainer.report import Comparison, Speed, build_report
from drafter_trainer.round_cost import candidate_lengths
from drafter_trainer.target_runner import TargetRunner
from tests.support.decoding import own_answers, pack_answers, train_drafter
from tests.support.tiny_targets import ARCHITECTURES, some_prompt, tiny_drafter, tiny_target

NEW_TOKENS = 20


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(tuple(some_prompt(5 + 3 * i, seed=i)), source="even" if i % 2 == 0 else "odd") for i in range(count)]


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(3)
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target, taps=(0, 3), block_size=6)
    pairs = own_answers(target, [p.token_ids for p in _prompts(3)], max_new_tokens=NEW_TOKENS)
    train_drafter(drafter, target, pack_answers(target, drafter, pairs), steps=40)
    return target, drafter


def test_report_holds_what_decoding_each_prompt_gives(trained) -> None:
    target, drafter = trained
    prompts = _prompts(5)
    seen = []
    settings = EvaluationSettings(max_new_tokens=NEW_TOKENS, speed_prompts=2, progress=lambda *step: seen.append(step))
    report = evaluate_acceptance(target, drafter, prompts, settings)

    runner = TargetRunner(target, target_layer_ids=drafter.config.target_layer_ids)
    blocks = BlockDrafter(drafter, TargetHead.from_model(target))
    rounds = [decode_blocks(runner, blocks, p.token_ids, max_new_tokens=NEW_TOKENS).rounds for p in prompts]
    expected = summarise(rounds, block_size=6)
    assert report.accept_len == expected.micro > 1.0
    assert report.accept_len_macro == expected.macro
    assert report.acc_at == expected.by_slot
    # The walk along the target's own answers takes the same rounds as decoding.
    assert report.accept_len_simulated == expected.micro
    assert (report.prompts, report.identical, report.ties, report.mismatches) == (5, 5, 0, 0)
    assert (report.block_size, report.dtype) == (6, "float32")
    assert {what for what, _, _ in seen} == {"references", "acceptance", "speed"}

    even = summarise(rounds[::2], block_size=6).micro
    assert [(r.source, r.prompts) for r in report.by_source] == [("even", 3), ("odd", 2)]
    assert report.by_source[0].accept_len == even
    assert report.tok_s_plain > 0
    assert report.tok_s_speculative > 0
    assert report.speed_block_size in candidate_lengths(6)
    assert json.loads(json.dumps(report.to_json()))["speedup"] == report.speedup


def test_linear_modules_are_as_before(trained) -> None:
    target, drafter = trained
    evaluate_acceptance(target, drafter, _prompts(1), EvaluationSettings(max_new_tokens=3))
    for model in (target, drafter):
        assert not any("forward" in vars(module) for module in model.modules())


def test_speed_is_left_out_when_not_asked_for(trained) -> None:
    report = evaluate_acceptance(*trained, _prompts(2), EvaluationSettings(max_new_tokens=4, speed_prompts=0))
    assert report.tok_s_plain is report.tok_s_speculative is report.speedup is report.speed_block_size is None


def test_bfloat16_answers_are_identical_or_ties() -> None:
    target = tiny_target("qwen3", dtype=torch.bfloat16)
    drafter = tiny_drafter(target, dtype=torch.bfloat16)
    report = evaluate_acceptance(
        target, drafter, _prompts(6), EvaluationSettings(max_new_tokens=NEW_TOKENS, speed_prompts=3, speed_block_size=3)
    )
    assert report.identical + report.ties == 6
    assert report.mismatches == 0
    assert report.speed_block_size == 3


def test_wrong_block_decoding_is_counted_as_a_mismatch(trained, monkeypatch) -> None:
    target, drafter = trained
    keep = TargetRunner.keep
    # A cache that keeps a rejected row: what every rollback bug amounts to.
    monkeypatch.setattr(TargetRunner, "keep", lambda self, n: keep(self, min(n + 1, self._rollback._rows.numel())))
    settings = EvaluationSettings(max_new_tokens=NEW_TOKENS, speed_prompts=0)
    report = evaluate_acceptance(target, drafter, _prompts(4), settings)
    assert report.mismatches > 0
    assert report.identical < 4


def test_no_prompt_is_refused(trained) -> None:
    with pytest.raises(ValueError, match="no prompt"):
        evaluate_acceptance(*trained, [], EvaluationSettings())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_batched_answers_equal_single_ones_in_the_prompts_order(architecture: str) -> None:
    target = tiny_target(architecture)
    prompts = [p.token_ids for p in _prompts(5)]
    single = [decode_plain(TargetRunner(target), p, max_new_tokens=8).token_ids for p in prompts]
    eos = single[0][3]
    ended = [a[: a.index(eos) + 1] if eos in a else a for a in single]
    batched = batched_answers(
        target, prompts, max_new_tokens=8, eos_ids=(eos, 318), batch_size=3, target_layer_ids=(0, 2)
    )
    assert [reference.token_ids for reference in batched] == ended
    for prompt, reference in zip(prompts, batched, strict=True):
        fed = torch.tensor([*prompt, *reference.token_ids[:-1]])
        with torch.inference_mode():
            own = TargetRunner(target, target_layer_ids=(0, 2)).prefill(fed).features_RC
        torch.testing.assert_close(reference.features_RC, own, rtol=1e-4, atol=1e-4)


def test_every_eos_of_a_model_is_found() -> None:
    target = tiny_target("qwen3")
    assert eos_ids_of(target) == ()
    before = target.generation_config.eos_token_id
    try:
        target.generation_config.eos_token_id = [3, 7]
        assert eos_ids_of(target) == (3, 7)
    finally:
        target.generation_config.eos_token_id = before


def test_report_tells_ties_from_mismatches_and_sources_apart() -> None:
    tie, wrong = Divergence(2, (1, 2), gap=0.25, ulp=0.125), Divergence(2, (1, 2), gap=9.0, ulp=0.125)
    comparisons = [
        Comparison((Round(3, 3),), True),
        Comparison((Round(3, 0), Round(3, 1)), False, tie),
        Comparison((Round(3, 1),), False, wrong),
        Comparison((Round(3, 0),), False, None),
    ]
    speed = Speed(4, {0: 10.0, 1: 30.0, 2: 20.0}, {0: 12.0, 1: 60.0, 2: 24.0}, (comparisons[0],))
    found = build_report(
        comparisons,
        ["a", "b", "a", "b"],
        simulated=summarise([], block_size=4),
        speed=speed,
        block_size=4,
        dtype="bfloat16",
    )
    assert (found.identical, found.ties, found.mismatches) == (1, 1, 2)
    assert found.largest_tie_ulps == 2.0
    assert (found.tok_s_plain, found.tok_s_speculative, found.speedup) == (20.0, 24.0, 1.2)
    a, b = found.by_source
    assert (a.prompts, a.accept_len, a.identical, a.ties) == (2, 3.0, 1, 0)
    assert (b.prompts, b.ties, b.tok_s_plain, b.tok_s_speculative) == (2, 1, 30.0, 60.0)
    assert found.speed_accept_len == 4.0
