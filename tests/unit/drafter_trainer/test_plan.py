from __future__ import annotations

import pickle
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_trainer.plan import Plan, PlanEntry, PlanSettings, cut_by_tokens, hashed_order, permute


class Source:
    """Samples of given lengths, all tokens supervised."""

    def __init__(self, lengths, fingerprint="data"):
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self.fingerprint = fingerprint

    def __len__(self):
        return len(self._lengths)

    def lengths(self, sample_ids):
        return self._lengths[sample_ids]

    def sample(self, sample_id):
        length = int(self._lengths[sample_id])
        return np.full(length, sample_id, dtype=np.int32), np.ones(length, dtype=np.bool_)


def plan_of(lengths, *, seed=0, max_tokens=100, max_sequences=8, window=16, fingerprint="data"):
    settings = PlanSettings(seed, max_tokens, max_sequences, window)
    return Plan(Source(lengths, fingerprint), settings)


def epoch_entries(plan: Plan, epoch: int) -> list[PlanEntry]:
    start, stop = plan.micro_batches_in(epoch), plan.micro_batches_in(epoch + 1)
    return [plan.entry(position) for position in range(start, stop)]


PINNED_ORDER = [(4,), (2,), (1, 3), (6,), (7, 0, 5), (4,), (7, 5, 6), (2,)]
PINNED_HASHED_ORDER = [4, 0, 2, 3, 1]

lengths_lists = st.lists(st.integers(1, 60), min_size=1, max_size=80)
plans = st.builds(
    plan_of,
    lengths_lists,
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.integers(60, 200),
    max_sequences=st.integers(1, 10),
    window=st.integers(1, 100),
)


@given(plans, st.integers(0, 3))
def test_epoch_trains_every_sample_exactly_once(plan, epoch):  # I1, case 86
    entries = epoch_entries(plan, epoch)
    assert sorted(i for entry in entries for i in entry.sample_ids) == list(range(len(plan.source)))
    assert {entry.epoch for entry in entries} == {epoch}


@given(plans)
def test_micro_batch_respects_its_budgets(plan):
    for entry in epoch_entries(plan, 0):
        assert 1 <= len(entry.sample_ids) <= plan.settings.max_sequences
        assert entry.tokens <= plan.settings.max_tokens
        assert entry.lengths == tuple(plan.source.lengths(np.array(entry.sample_ids)))


@given(plans, st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_random_access_equals_sequence(plan, positions):
    fresh = Plan(plan.source, plan.settings)
    in_order = list(islice(fresh.entries(), max(positions) + 1))
    assert [plan.entry(position) for position in positions] == [in_order[position] for position in positions]


@given(plans, st.integers(1, 5))
def test_ranks_together_take_what_one_rank_takes(plan, world_size):
    count = 5
    alone = list(islice(plan.entries(), count * world_size))
    per_rank = [
        list(islice(Plan(plan.source, plan.settings).entries(r, step=world_size), count)) for r in range(world_size)
    ]
    together = [entry for step in zip(*per_rank, strict=True) for entry in step]
    assert together == alone


@given(plans)
def test_plan_survives_pickling(plan):
    plan.entry(5)
    assert pickle.loads(pickle.dumps(plan)).entry(7) == plan.entry(7)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permutation_is_one_to_one_and_computed_in_any_stretch(count, key):
    whole = permute(np.arange(count, dtype=np.int64), count=count, key=key)
    assert sorted(whole.tolist()) == list(range(count))
    middle = np.arange(count // 3, 2 * count // 3 + 1, dtype=np.int64) % count
    assert (permute(middle, count=count, key=key) == whole[middle]).all()


@given(lengths_lists, st.integers(60, 200), st.integers(1, 10))
def test_cuts_are_as_few_as_the_order_allows(lengths, max_tokens, max_sequences):
    cuts = cut_by_tokens(np.array(lengths, dtype=np.int64), max_tokens=max_tokens, max_sequences=max_sequences)
    assert cuts[0] == 0
    assert cuts[-1] == len(lengths)
    for start, stop in pairwise(cuts):
        one_more = lengths[start : stop + 1]
        assert stop == len(lengths) or sum(one_more) > max_tokens or len(one_more) > max_sequences


def test_permutation_leaves_no_visible_order():
    count = 20_000
    order = permute(np.arange(count, dtype=np.int64), count=count, key=12345)
    # In a random permutation neighbours differ by a third of the length on average; its correlation is 1 / sqrt(count).
    assert abs(np.abs(np.diff(order)).mean() / (count / 3) - 1) < 0.02
    assert abs(np.corrcoef(np.arange(count), order)[0, 1]) < 0.03
    other = permute(np.arange(count, dtype=np.int64), count=count, key=12346)
    assert abs(np.corrcoef(order, other)[0, 1]) < 0.03


def test_epochs_seeds_and_datasets_give_other_orders():
    base = plan_of(range(1, 60))
    first = epoch_entries(base, 0)
    for other in (
        epoch_entries(plan_of(range(1, 60), seed=1), 0),
        epoch_entries(plan_of(range(1, 60), fingerprint="x"), 0),
    ):
        assert [entry.sample_ids for entry in other] != [entry.sample_ids for entry in first]
    assert [entry.sample_ids for entry in epoch_entries(base, 1)] != [entry.sample_ids for entry in first]


def test_order_is_the_same_for_ever():
    """A resumed run relies on it: change this list only with a note that older runs can't be resumed."""
    plan = plan_of([5, 9, 30, 12, 44, 7, 21, 3], seed=7, max_tokens=50, max_sequences=3, window=4)
    assert [entry.sample_ids for entry in islice(plan.entries(), 8)] == PINNED_ORDER
    assert hashed_order(5, key=99) == PINNED_HASHED_ORDER


def test_dataset_smaller_than_a_step_goes_on_into_the_next_epoch():
    plan = plan_of([4, 5], max_sequences=1)
    assert [entry.epoch for entry in islice(plan.entries(), 6)] == [0, 0, 1, 1, 2, 2]
    assert plan.steps_in(1, micro_batches_per_step=8) == 1
    assert plan.steps_in(3, micro_batches_per_step=4) == 2
    assert plan.steps_per_epoch(micro_batches_per_step=2) == 1


def test_one_sample_is_a_plan():
    assert [entry.sample_ids for entry in islice(plan_of([9]).entries(), 3)] == [(0,), (0,), (0,)]


def test_lengths_lie_together_within_a_window():
    lengths = np.random.default_rng(0).integers(10, 1000, 2048)
    bucketed = plan_of(lengths, max_tokens=4000, max_sequences=64, window=1024)
    mixed = plan_of(lengths, max_tokens=4000, max_sequences=64, window=8)

    def padding(plan: Plan) -> float:
        entries = epoch_entries(plan, 0)
        padded = sum(max(entry.lengths) * len(entry.lengths) for entry in entries)
        return padded / sum(entry.tokens for entry in entries) - 1

    assert padding(bucketed) < 0.05 < padding(mixed)


def test_micro_batch_packs_tokens_and_masks_in_order():
    plan = plan_of([3, 2, 4], max_tokens=9, window=3)
    micro = plan.micro_batch(0)
    assert micro.lengths == (2, 3, 4)
    assert micro.sample_ids == (1, 0, 2)
    assert micro.input_ids_T.tolist() == [1, 1, 0, 0, 0, 2, 2, 2, 2]
    assert micro.loss_mask_T.all()
    assert (micro.position, micro.epoch) == (0, 0)


def test_too_long_sample_and_empty_source_are_refused():
    with pytest.raises(ValueError, match="101 tokens exceeds max_tokens = 100"):
        plan_of([5, 101]).entry(0)
    with pytest.raises(ValueError, match="at least one sample"):
        plan_of([])
    with pytest.raises(ValueError, match="negative"):
        plan_of([5]).entry(-1)


def test_million_samples_take_a_window_of_memory():  # case 78, I2
    plan = plan_of(np.full(1_000_000, 50), max_tokens=400, window=4096)
    plan.entry(0)
    plan.entry(plan.micro_batches_in(1) - 1)
    held = sum(len(window.sample_ids) for window in plan._windows.values())
    assert held <= 4 * 4096
    assert len(plan._counted[0]) <= 1_000_000 // 4096 + 2
