"""Labels, weights and the loss of a batch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_trainer.anchors import draw_anchors
from drafter_trainer.head import TargetHead
from drafter_trainer.loss import Distillation, block_hidden, build_block_targets, dpace_weights, drafter_loss
from drafter_trainer.types import MicroBatch
from drafter_trainer.vocabulary import VocabSampler
from tests.support.dense_reference import dense_hidden, dense_loss
from tests.support.drafters import (
    MASK_ID,
    blocks_of,
    random_batch,
    random_drafter,
    random_head,
    random_micro,
    tiny_config,
)


def test_slot_k_is_labelled_with_the_token_at_anchor_plus_k() -> None:  # case 38
    micro = MicroBatch(0, 0, (1, 2), (5, 4), torch.arange(20, 29), torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 1]).bool())
    anchors = draw_anchors(micro, num_anchors=9, seed=0)
    assert anchors.index_A.tolist() == [1, 6, 7]
    targets = build_block_targets(micro, anchors, block_size=4, gamma=None)
    # Slot 0 is the anchor; token 23 is not supervised; nothing lies beyond a document's end.
    assert targets.valid_AK.tolist() == [
        [False, True, False, True],
        [False, True, True, False],
        [False, True, False, False],
    ]
    assert targets.labels_AK[targets.valid_AK].tolist() == [22, 24, 27, 28, 28]
    assert targets.weight_sum == 5.0


@pytest.mark.parametrize(
    ("block_size", "gamma", "published"),
    [
        (16, 7.0, [1, 0.87, 0.75, 0.65, 0.57, 0.49, 0.42, 0.37, 0.32, 0.28, 0.24, 0.21, 0.18, 0.16, 0.14]),
        (8, 4.0, [1, 0.78, 0.61, 0.47, 0.37, 0.29, 0.22]),
    ],
)
def test_weights_decay_as_published(block_size: int, gamma: float, published: list[float]) -> None:
    micro = MicroBatch(0, 0, (1,), (400,), torch.zeros(400).long(), torch.ones(400, dtype=torch.bool))
    anchors = draw_anchors(micro, num_anchors=3, seed=5)
    targets = build_block_targets(micro, anchors, block_size=block_size, gamma=gamma)
    assert targets.weights_AK[0].tolist() == pytest.approx([0, *published], abs=0.006)


@settings(max_examples=15)
@given(
    st.lists(st.integers(1, 25), min_size=1, max_size=4),
    st.sampled_from([None, 3.0]),
    st.integers(2, 5),
    st.sampled_from([1, 5, 1000]),
)
def test_loss_and_gradients_equal_the_dense_reference(
    lengths: list[int], gamma: float | None, block_size: int, chunk_rows: int
) -> None:
    config = tiny_config(block_size=block_size)
    drafter, head = random_drafter(config), random_head()
    micro = random_micro(tuple(lengths))
    batch, anchors = random_batch(micro, config), draw_anchors(micro, num_anchors=5, seed=0)
    targets = build_block_targets(micro, anchors, block_size=block_size, gamma=gamma)
    output = drafter_loss(drafter, head, batch, anchors, targets, chunk_rows=chunk_rows)
    parameters = list(drafter.parameters())
    ours = torch.autograd.grad(output.loss_sum, parameters)
    if not len(anchors):
        assert output.loss_sum.item() == 0.0
        assert all(not g.any() for g in ours)
        return
    ids = torch.full((len(anchors), block_size), MASK_ID)
    ids[:, 0] = micro.input_ids_T[anchors.index_A]
    weights, blocks = dict(drafter.named_parameters()), blocks_of(anchors.document_A, anchors.position_A)
    embeds, lm_head = head.embed_tokens_VD[ids.flatten()], head.lm_head_weight_VD
    hidden = dense_hidden(config, weights, embeds, batch.features_TC, lengths=micro.lengths, blocks=blocks)
    expected = dense_loss(hidden, lm_head, targets.labels_AK, targets.weights_AK)
    torch.testing.assert_close(output.loss_sum, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(ours, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(b.abs().max())))
    argmax = (hidden @ lm_head.T).argmax(1).view_as(targets.labels_AK)
    assert torch.equal(output.correct_AK, (argmax == targets.labels_AK) & targets.valid_AK)


def test_splitting_a_batch_changes_neither_sum_nor_gradient() -> None:
    """Sums over micro-batches of a step add up, whatever is packed with what."""
    config = tiny_config()
    drafter, head = random_drafter(config), random_head()
    whole = random_micro((12, 20, 9))
    features = random_batch(whole, config)
    parts = []
    for d, start in enumerate((0, 12, 32)):
        rows = slice(start, start + whole.lengths[d])
        micro = MicroBatch(
            0,
            0,
            whole.sample_ids[d : d + 1],
            whole.lengths[d : d + 1],
            whole.input_ids_T[rows],
            whole.loss_mask_T[rows],
        )
        parts.append((micro, features.features_TC[rows]))

    def run(micro: MicroBatch, rows: torch.Tensor) -> tuple[float, float, list[torch.Tensor]]:
        anchors = draw_anchors(micro, num_anchors=4, seed=1)
        targets = build_block_targets(micro, anchors, block_size=4, gamma=4.0)
        batch = type(features)(micro, rows, features.target_version, 0)
        output = drafter_loss(drafter, head, batch, anchors, targets)
        return (
            output.loss_sum.item(),
            output.weight_sum,
            list(torch.autograd.grad(output.loss_sum, list(drafter.parameters()))),
        )

    loss, weight, gradients = run(whole, features.features_TC)
    split = [run(*part) for part in parts]
    assert sum(part[0] for part in split) == pytest.approx(loss, rel=1e-5)
    assert sum(part[1] for part in split) == pytest.approx(weight, rel=1e-9)
    for whole_grad, *part_grads in zip(gradients, *(part[2] for part in split), strict=True):
        torch.testing.assert_close(sum(part_grads), whole_grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dpace_alpha", [None, 0.5])
@pytest.mark.parametrize("autocast", [False, True])
def test_batch_without_anchor_is_zero_and_touches_every_parameter(
    dpace_alpha: float | None, autocast: bool
) -> None:  # cases 1, 2, 3, 71
    config = tiny_config()
    drafter, head = random_drafter(config), random_head()
    micro = random_micro((6, 3), supervised=0.0)
    anchors = draw_anchors(micro, num_anchors=4, seed=0)
    targets = build_block_targets(micro, anchors, block_size=4, gamma=4.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = drafter_loss(drafter, head, random_batch(micro, config), anchors, targets, dpace_alpha=dpace_alpha)
    assert (output.loss_sum.item(), output.weight_sum, len(anchors)) == (0.0, 0.0, 0)
    output.loss_sum.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def naive_dpace(loss: list[float], valid: list[bool], alpha: float) -> list[float]:
    slots, reached, running = len(loss), [], 1.0
    for j in range(slots):
        running *= (1 - alpha) * math.exp(-loss[j]) + alpha if valid[j] else 1.0
        reached.append(running)
    return [sum(reached[m] for m in range(j, slots) if valid[m]) * valid[j] for j in range(slots)]


def test_dpace_weights_follow_their_definition() -> None:
    loss, valid = torch.rand(6, 5) * 3, torch.rand(6, 5) < 0.7
    for alpha in (0.0, 0.5, 1.0):
        ours = dpace_weights(loss, valid, alpha=alpha)
        for row in range(6):
            expected = naive_dpace(loss[row].tolist(), valid[row].tolist(), alpha)
            assert ours[row].tolist() == pytest.approx(expected, rel=1e-5)


def test_dpace_is_a_detached_weight_over_the_plain_denominator() -> None:
    config = tiny_config()
    drafter, head = random_drafter(config), random_head()
    micro = random_micro((30,), supervised=1.0)
    anchors = draw_anchors(micro, num_anchors=4, seed=0)
    targets = build_block_targets(micro, anchors, block_size=4, gamma=None)
    batch = random_batch(micro, config)
    plain = drafter_loss(drafter, head, batch, anchors, targets)
    dpace = drafter_loss(drafter, head, batch, anchors, targets, dpace_alpha=0.5)
    weight = dpace_weights(plain.cross_entropy_AK, plain.valid_AK, alpha=0.5)
    assert dpace.loss_sum.item() == pytest.approx((weight * plain.cross_entropy_AK).sum().item(), rel=1e-5)
    assert dpace.weight_sum == plain.weight_sum == float(plain.valid_AK.sum())


def test_sampled_vocabulary_is_close_to_exact_and_keeps_the_graph() -> None:
    config = tiny_config(vocab_size=3000)
    drafter, head = random_drafter(config), random_head(vocab=3000)
    with torch.no_grad():
        drafter.norm.weight *= 0.1
    micro = random_micro((60,), supervised=1.0)
    anchors = draw_anchors(micro, num_anchors=20, seed=0)
    targets = build_block_targets(micro, anchors, block_size=4, gamma=None)
    batch = random_batch(micro, config)
    exact = drafter_loss(drafter, head, batch, anchors, targets)
    sampled = drafter_loss(drafter, head, batch, anchors, targets, sampler=VocabSampler(rows=1000, seed=0))
    assert sampled.loss_sum.item() == pytest.approx(exact.loss_sum.item(), rel=0.01)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(sampled.loss_sum, list(drafter.parameters())))


def test_head_facts_reach_the_loss() -> None:
    """Scale and cap of the target change the loss as they change its logits."""
    config = tiny_config()
    drafter = random_drafter(config)
    micro = random_micro((30,), supervised=1.0)
    anchors = draw_anchors(micro, num_anchors=4, seed=0)
    targets = build_block_targets(micro, anchors, block_size=4, gamma=None)
    batch = random_batch(micro, config)
    for facts in ({}, {"embedding_scale": 4.0}, {"logit_softcap": 2.0}, {"logit_scale": 0.1}):
        head: TargetHead = random_head(**facts)
        output = drafter_loss(drafter, head, batch, anchors, targets)
        ids = torch.full((4, 4), MASK_ID)
        ids[:, 0] = micro.input_ids_T[anchors.index_A]
        blocks = blocks_of(anchors.document_A, anchors.position_A)
        embeds = head.embed_tokens_VD[ids.flatten()] * facts.get("embedding_scale", 1.0)
        hidden = dense_hidden(
            config, dict(drafter.named_parameters()), embeds, batch.features_TC, lengths=micro.lengths, blocks=blocks
        )
        logits = head.logits(hidden)
        losses = torch.nn.functional.cross_entropy(logits, targets.labels_AK.flatten(), reduction="none")
        expected = (losses * targets.weights_AK.flatten()).sum().item()
        assert output.loss_sum.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_distillation_compares_each_slot_with_the_targets_row_before_it(weight: float) -> None:  # cases 37, 38
    """KL over the whole vocabulary by definition, mixed with cross-entropy; weights and rows are the plain loss's."""
    config = tiny_config()
    drafter, micro = random_drafter(config), random_micro((13, 9))
    head = TargetHead(
        {"embed_tokens": random_head().embed_tokens_VD, "final_norm": torch.rand(config.hidden_size) + 0.5}, tied=True
    )
    batch = dataclasses.replace(random_batch(micro, config), last_TD=torch.randn(22, config.hidden_size) * 3)
    anchors = draw_anchors(micro, num_anchors=4, seed=0)
    targets = build_block_targets(micro, anchors, block_size=config.block_size, gamma=4.0)
    output = drafter_loss(drafter, head, batch, anchors, targets, distillation=Distillation("kl", weight))
    plain = drafter_loss(drafter, head, batch, anchors, targets)
    hidden_AKE = block_hidden(drafter, head, batch, anchors).unflatten(0, (-1, config.block_size))
    assert batch.last_TD is not None
    total = torch.zeros(())
    for a, k in targets.valid_AK.nonzero().tolist():
        teacher = head.logits(head.normed(batch.last_TD[anchors.index_A[a] + k - 1])).log_softmax(-1)
        student = head.logits(hidden_AKE[a, k]).log_softmax(-1)
        total = total + targets.weights_AK[a, k] * (teacher.exp() * (teacher - student)).sum()
    expected = weight * total + (1 - weight) * plain.loss_sum
    torch.testing.assert_close(output.loss_sum, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(output.cross_entropy_AK, plain.cross_entropy_AK)
    parameters = list(drafter.parameters())
    ours, theirs = torch.autograd.grad(output.loss_sum, parameters), torch.autograd.grad(expected, parameters)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)
