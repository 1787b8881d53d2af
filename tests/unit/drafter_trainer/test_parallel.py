"""What ranks exchange, and that several train what one would: real gloo processes, DDP and FSDP2."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_trainer.checkpoint import Checkpoint, CheckpointStore
from drafter_trainer.ema import WeightAverage
from drafter_trainer.feed import FedBatch
from drafter_trainer.optim import OptimSettings, build_optimizer
from drafter_trainer.parallel import Ranks, SharedDrafter
from drafter_trainer.sharded import cut_like, whole
from drafter_trainer.step import StepEngine
from drafter_trainer.step_records import BadBatch
from tests.support.drafters import random_drafter
from tests.support.rank_processes import on_ranks
from tests.support.step_engine import CONFIG, SETTINGS, Batches, OneHead, fed_batch, micro_batch

STEPS, PER_STEP = 20, 12  # micro-batches over all ranks: 3 x 4, or 2 x 6
STOP = (STEPS - 1) * PER_STEP + 2  # of the last step only the first two ranks have one
SAVED_STEP = 10
BAD_POSITION = 4 * PER_STEP + 1  # the second rank's, in step 5
WITHOUT_ANCHORS = range(7 * PER_STEP, 8 * PER_STEP, 3)  # all of the first of three ranks' in step 8


def test_a_single_rank_exchanges_nothing() -> None:
    ranks = Ranks()
    ranks.barrier()
    ranks.leave()
    assert (ranks.gather([1.0, 2.0]), ranks.sum(3.0), ranks.is_first) == ([[1.0, 2.0]], 3.0, True)
    drafter = random_drafter(CONFIG)
    assert SharedDrafter(drafter, ranks, shard=True).whole_drafter() is drafter


def exchange(ranks: Ranks) -> Any:
    copied = torch.full((2,), float(ranks.rank))
    ranks.copy_from_first([copied])
    ranks.barrier()
    texts = ranks.gather_texts(["é"] * ranks.rank)
    return ranks.rank, ranks.num_local_ranks, copied.tolist(), ranks.gather([ranks.rank, 0.1]), texts


def test_every_rank_sees_all_values_in_rank_order_and_the_firsts_weights() -> None:
    answers = on_ranks(2, exchange)
    assert answers == [(rank, 2, [0.0, 0.0], [[0.0, 0.1], [1.0, 0.1]], ["é"]) for rank in range(2)]


def batch_at(position: int) -> FedBatch:
    micro = micro_batch(position, (12, 3 + position % 9), supervised=0.0 if position in WITHOUT_ANCHORS else 0.8)
    return fed_batch(micro, scale=float("nan") if position == BAD_POSITION else 1.0)


def train(
    ranks: Ranks, *, shard: bool, directory: Path | None = None, algorithm: str = "adamw", stop: int = STOP
) -> dict[str, Any]:
    """Trains to position `stop`, from a checkpoint in `directory` where there is one; saves one on the way."""
    store = CheckpointStore(directory, keep=2) if directory is not None else None
    saved = store.load_latest() if store is not None else None
    drafter = random_drafter(CONFIG, seed=ranks.rank)  # the first rank's are everybody's
    if saved is not None:
        drafter.load_state_dict(saved.model)
    drafter.recompute_layers = shard  # also with layers gathered again in the backward pass
    shared = SharedDrafter(drafter, ranks, shard=shard)
    settings = OptimSettings(algorithm=algorithm, lr=1e-3, total_steps=STEPS, max_grad_norm=0.5)  # type: ignore[arg-type]
    optimizer = build_optimizer(drafter, settings)
    average = WeightAverage(drafter, decay=0.9)
    if saved is not None:
        optimizer.load_state_dict(saved.optimizer)
        assert saved.average is not None
        average.load_state_dict(saved.average)
    bad: list[BadBatch] = []
    outcomes = []
    for step in range(1 if saved is None else saved.step + 1, -(-stop // PER_STEP) + 1):
        positions = range((step - 1) * PER_STEP, min(step * PER_STEP, stop))[ranks.rank :: ranks.num_ranks]
        batches = [batch_at(position) for position in positions]
        engine = StepEngine(
            shared,
            optimizer=optimizer,
            feed=Batches(batches),  # type: ignore[arg-type]
            heads=OneHead(),
            settings=SETTINGS,
            average=average,
            on_bad=bad.append,
        )
        outcomes.append(engine.step(step, [fed.batch.micro for fed in batches], simulate=step % 7 == 1))
        if saved is None and store is not None and step == SAVED_STEP:
            state = state_of(engine, average, ranks)
            if ranks.is_first:
                store.save(Checkpoint(step=step, position=step * PER_STEP, identity={}, facts={}, counters={}, **state))
    return {
        **state_of(engine, average, ranks),
        "losses": [outcome.loss for outcome in outcomes],
        "norms": [outcome.grad_norm for outcome in outcomes],
        "simulated": [outcome.accept_len for outcome in outcomes],
        "bad": [[(c.rank, c.position, c.kind) for c in outcome.culprits] for outcome in outcomes],
        "reported": [item.culprit.position for item in bad],
        "held": sum(cut_like(p, p).to_local().numel() if shard else p.numel() for p in drafter.parameters()),
    }


def state_of(engine: StepEngine, average: WeightAverage, ranks: Ranks) -> dict[str, Any]:
    values = {
        "model": dict(engine.drafter.state_dict()),
        "optimizer": engine.optimizer.state_dict(),
        "average": average.state_dict(),
    }
    gathered: dict[str, Any] = whole(values, keep=ranks.is_first)
    return gathered


def train_ddp(ranks: Ranks) -> dict[str, Any]:
    return train(ranks, shard=False)


def train_fsdp(ranks: Ranks, directory: Path) -> dict[str, Any]:
    return train(ranks, shard=True, directory=directory)


def train_muon(ranks: Ranks) -> dict[str, Any]:
    return train(ranks, shard=True, algorithm="muon", stop=2 * PER_STEP)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process comes to, with all micro-batches of a step accumulated."""
    return train(Ranks(), shard=False)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two_shards(checkpoints: Path) -> list[dict[str, Any]]:
    """Two ranks with half of the drafter each, 20 steps; leaves a checkpoint of step 10 behind."""
    return on_ranks(2, train_fsdp, checkpoints)


def assert_same_training(ours: dict[str, Any], alone: dict[str, Any]) -> None:
    done = len(ours["losses"])
    close = {"rel": 1e-5, "nan_ok": True}
    assert ours["losses"] == pytest.approx(alone["losses"][-done:], **close)
    assert ours["norms"] == pytest.approx(alone["norms"][-done:], **close)
    assert ours["simulated"] == alone["simulated"][-done:]
    for name in ("model", "average"):
        assert ours[name].keys() == alone[name].keys()
        for key, tensor in alone[name].items():
            torch.testing.assert_close(ours[name][key], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
    assert ours["optimizer"]["step_count"] == alone["optimizer"]["step_count"] == STEPS - 1  # one was bad


def test_three_replicas_train_what_one_process_does(alone: dict[str, Any]) -> None:  # I6, cases 1, 2, 70, 71
    answers = on_ranks(3, train_ddp)
    assert_same_training(answers[0], alone)
    assert answers[0]["simulated"][0] is not None
    for other in answers[1:]:
        assert repr(other["losses"]) == repr(answers[0]["losses"])  # as text: that of the bad step is NaN
        assert other["simulated"] == [None] * STEPS
        for key, tensor in answers[0]["model"].items():
            assert torch.equal(other["model"][key], tensor)


def test_two_shards_train_what_one_process_does(two_shards: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert_same_training(two_shards[0], alone)
    assert repr(two_shards[1]["losses"]) == repr(two_shards[0]["losses"])
    whole_size = sum(tensor.numel() for tensor in alone["model"].values())
    assert sum(answer["held"] for answer in two_shards) == whole_size
    assert max(answer["held"] for answer in two_shards) < 0.6 * whole_size


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_two_shards_checkpoint_goes_on_with_another_number_of_ranks(
    num_ranks: int, two_shards: list[dict[str, Any]], checkpoints: Path, alone: dict[str, Any]
) -> None:  # I6, case 89
    if num_ranks == 1:
        answer = train(Ranks(), shard=False, directory=checkpoints)
    else:
        answer = on_ranks(num_ranks, train_fsdp, checkpoints)[0]
    assert len(answer["losses"]) == STEPS - SAVED_STEP
    assert_same_training(answer, alone)


def test_a_bad_batch_of_one_rank_leaves_out_the_step_of_all(
    two_shards: list[dict[str, Any]], alone: dict[str, Any]
) -> None:  # I4, cases 7, 8, 12
    for answer in [*two_shards, alone]:
        blamed = [culprits for culprits in answer["bad"] if culprits]
        assert blamed == [[(0 if answer is alone else 1, BAD_POSITION, "features")]]
    assert [answer["reported"] for answer in two_shards] == [[], [BAD_POSITION]]


def test_muon_updates_whole_matrices_of_which_each_rank_holds_a_part() -> None:
    alone = train(Ranks(), shard=False, algorithm="muon", stop=2 * PER_STEP)
    answer = on_ranks(2, train_muon)[0]
    assert answer["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    for key, tensor in alone["model"].items():
        torch.testing.assert_close(answer["model"][key], tensor, rtol=1e-3, atol=1e-4)  # it orthogonalises in bf16


def gradient_blame(ranks: Ranks) -> list[tuple[int, int, str]]:
    """One rank's gradient turns infinite in its last micro-batch, whose exchange is part of the backward pass."""
    drafter = random_drafter(CONFIG)
    shared = SharedDrafter(drafter, ranks)
    batches = [fed_batch(micro_batch(2 * number + ranks.rank, (12,))) for number in range(2)]
    engine = StepEngine(
        shared,
        optimizer=build_optimizer(drafter, OptimSettings(total_steps=3)),
        feed=Batches(batches),  # type: ignore[arg-type]
        heads=OneHead(),
        settings=SETTINGS,
    )
    passes = iter(range(2))
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    drafter.norm.register_full_backward_hook(
        lambda _module, inputs, _outputs: tuple(
            grad * float("inf") if next(passes) == 1 and ranks.rank == 1 else grad for grad in inputs
        )
    )
    outcome = engine.step(1, [fed.batch.micro for fed in batches], simulate=False)
    assert outcome.bad
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    return [(c.rank, c.position, c.kind) for c in outcome.culprits]


def test_a_bad_gradient_is_blamed_on_the_rank_that_made_it() -> None:  # I4, case 8
    assert on_ranks(2, gradient_blame) == [[(1, 3, "gradient")]] * 2


def test_whole_values_without_shards_are_passed_through() -> None:
    tensor = torch.ones(2)
    values = {"a": [tensor, (1, None)], "b": {3: "x"}}
    assert whole(values, keep=True) == values
    assert whole(values, keep=False)["a"][0] is tensor
    assert cut_like(tensor, torch.zeros(2)) is tensor
    assert dataclasses.is_dataclass(Ranks())
