"""The sampled partition sum."""

from __future__ import annotations

import torch

from drafter_trainer.linear_cross_entropy import linear_cross_entropy
from drafter_trainer.vocabulary import VocabSampler, all_rows
from tests.support.drafters import random_head


def test_labels_and_named_rows_are_always_in_and_count_once() -> None:
    head = random_head(vocab=500)
    label = torch.tensor([7, 499, 7, 0])
    rows, index = VocabSampler(rows=60, seed=1, always=torch.tensor([3, 250])).draw(head, label, position=4)
    assert torch.equal(rows.weight_VE[index], head.lm_head_weight_VD[label])
    assert rows.log_importance_V is not None
    assert rows.log_importance_V[index].tolist() == [0.0] * 4
    assert rows.weight_VE.shape[0] == 60
    assert int((rows.log_importance_V == 0).sum()) == 5  # 0, 3, 7, 250, 499
    torch.testing.assert_close(rows.log_importance_V.exp().sum(), torch.tensor(500.0))


def test_partition_estimate_is_unbiased() -> None:
    head = random_head(vocab=200)
    hidden, label = torch.randn(3, head.hidden_size) * 0.3, torch.tensor([1, 2, 3])
    exact = (hidden @ head.lm_head_weight_VD.T).exp().sum(1)
    sampler = VocabSampler(rows=40, seed=0)
    estimates = []
    for position in range(300):
        rows, _ = sampler.draw(head, label, position=position)
        z = hidden @ rows.weight_VE.T + rows.log_importance_V
        estimates.append(z.exp().sum(1))
    sample = torch.stack(estimates)
    error = (sample.mean(0) - exact) / (sample.std(0) / 300**0.5)
    assert (error.abs() < 4).all()
    assert (sample.std(0) > 0).all()


def test_all_rows_sampled_is_exact() -> None:
    head = random_head(vocab=50)
    hidden, label = torch.randn(9, head.hidden_size), torch.randint(0, 50, (9,))
    rows, index = VocabSampler(rows=50, seed=0).draw(head, label, position=0)
    sampled, _ = linear_cross_entropy(hidden, rows, index)
    exact, _ = linear_cross_entropy(hidden, all_rows(head), label)
    torch.testing.assert_close(sampled, exact)


def test_draw_depends_on_seed_and_position_alone() -> None:
    head, label = random_head(vocab=300), torch.tensor([5])
    draws = [
        VocabSampler(rows=30, seed=seed).draw(head, label, position=position)[0].weight_VE
        for seed, position in ((1, 1), (1, 1), (1, 2), (2, 1))
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[3])


def test_a_quarter_is_random_even_where_labels_fill_the_budget() -> None:
    head = random_head(vocab=300)
    rows, _ = VocabSampler(rows=40, seed=0, always=torch.arange(100)).draw(head, torch.tensor([5]), position=0)
    assert rows.weight_VE.shape[0] == 110
