"""A batch that was not finite is kept, and done again gives the number that was seen."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafter_trainer.__main__ import main
from drafter_trainer.dump import DumpWriter, read_dump
from drafter_trainer.feed import FedBatch
from drafter_trainer.loss import Distillation
from drafter_trainer.optim import OptimSettings, build_optimizer
from drafter_trainer.parallel import Ranks, SharedDrafter
from drafter_trainer.replay import replay_dump
from drafter_trainer.step import StepEngine
from drafter_trainer.step_records import StepSettings
from drafter_trainer.vocabulary import VocabSampler
from tests.support.drafters import HIDDEN, random_drafter, random_head
from tests.support.rank_processes import on_ranks
from tests.support.step_engine import CONFIG, SETTINGS, Batches, OneHead, fed_batch, micro_batch, run_step

CPU = torch.device("cpu")


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    """A run's heads, with the one the engine uses."""
    directory = tmp_path / "heads"
    directory.mkdir()
    facts = {"tied": True, "embedding_scale": 1.0, "logit_softcap": 0.0, "logit_scale": 1.0, "final_norm_epsilon": 1e-6}
    head = random_head()
    tensors = {"embed_tokens": head.embed_tokens_VD, "final_norm": torch.ones(HIDDEN)}
    save_file(tensors, directory / "head-d.safetensors", metadata={"facts": json.dumps(facts)})
    return directory


def dumped(
    bad: FedBatch, heads: Path, *, settings: StepSettings = SETTINGS, most: int = 3, steps: int = 1
) -> tuple[Path, list[Path]]:
    """Trains a sound batch, then bad steps; returns where dumps go, and the dumps."""
    directory = heads.parent / "bad"
    _, engine = run_step([fed_batch(micro_batch(0, (12, 8)))])
    writer = DumpWriter(directory, drafter=engine.drafter, settings=settings, heads_dir=heads, most=most)
    for step in range(2, 2 + steps):
        sound = fed_batch(micro_batch(7, (9,)))
        if settings.distillation is not None:
            sound = with_last(sound)
        run_step([sound, bad], engine=engine, step=step, settings=settings, on_bad=writer)
    return directory, sorted(directory.glob("*")) if directory.exists() else []


def with_last(fed: FedBatch) -> FedBatch:
    rows = torch.randn(fed.batch.features_TC.shape[0], HIDDEN, generator=torch.Generator().manual_seed(4))
    return dataclasses.replace(fed, batch=dataclasses.replace(fed.batch, last_TD=rows))


def poisoned(value: float = float("nan")) -> FedBatch:
    fed = fed_batch(micro_batch(1, (10, 15)))
    fed.batch.features_TC[13, HIDDEN + 5] = value
    return fed


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_replay_says_which_feature_was_not_finite(value: float, heads: Path, capsys: Any) -> None:  # I4, case 12
    _, dumps = dumped(poisoned(value), heads)
    assert [path.name for path in dumps] == ["step-2-position-1"]
    replay = replay_dump(read_dump(dumps[0]), device=CPU)
    assert replay.reproduced
    assert replay.exact
    assert replay.bad_features == 1
    assert replay.first_bad_feature == "layer 5 of the target, token 3 of sample 11, element 5"
    assert replay.first_bad_module == "fc"
    assert "fc.weight" in replay.bad_gradients
    assert main(["replay", str(dumps[0])]) == 0
    text = capsys.readouterr().out
    assert "step 2, plan position 1 (samples 10, 11; rank 0, replica 0, target version 1)" in text
    assert "reproduced" in text
    assert main(["replay", str(dumps[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reproduced"] is True


SETTINGS_OF = {
    "plain": SETTINGS,
    "dpace": dataclasses.replace(SETTINGS, gamma=None, dpace_alpha=0.5),
    "sampled": dataclasses.replace(SETTINGS, sampler=VocabSampler(rows=40, seed=1, always=torch.arange(5))),
    "distilled": dataclasses.replace(SETTINGS, distillation=Distillation("lk", 0.5)),
}


@pytest.mark.parametrize("settings", SETTINGS_OF.values(), ids=SETTINGS_OF.keys())
def test_a_finite_loss_is_reproduced_bit_for_bit(settings: StepSettings, heads: Path) -> None:
    """The target marked the batch and sent zeros: its loss is an ordinary number, and must be the same again."""
    _, dumps = dumped(with_last(fed_batch(micro_batch(1, (12,)), finite=False)), heads, settings=settings)
    dump = read_dump(dumps[0])
    replay = replay_dump(dump, device=CPU)
    assert math.isfinite(replay.recorded_loss)
    assert replay.exact
    assert replay.bad_gradients == []
    # Nothing was wrong with the numbers, so what was seen (a mark) is not reproduced.
    assert not replay.reproduced


def dump_on_shards(ranks: Ranks, heads: Path, *, steps: int) -> None:
    """Trains a sound step, then bad ones of the second rank: a NaN, then a mark on features that are sound."""
    shared = SharedDrafter(random_drafter(CONFIG), ranks, shard=True)
    optimizer = build_optimizer(shared.drafter, OptimSettings(lr=1e-2, total_steps=10))
    writer = DumpWriter(heads.parent / "bad", drafter=shared.drafter, settings=SETTINGS, heads_dir=heads, most=9)
    bad = [poisoned(), fed_batch(micro_batch(1, (10, 15)), finite=False)]
    for step in range(1, 1 + steps):
        fed = fed_batch(micro_batch(10 * step + ranks.rank, (12, 8)))
        if step > 1 and ranks.rank == 1:
            fed = bad[step - 2]
        engine = StepEngine(
            shared,
            optimizer=optimizer,
            feed=Batches([fed]),  # type: ignore[arg-type]
            heads=OneHead(),
            settings=SETTINGS,
            on_bad=writer,
            on_bad_weights=writer.add_weights,
        )
        outcome = engine.step(step, [fed.batch.micro], simulate=False)
        assert bool(outcome.bad) == (step > 1)


def test_a_dump_of_a_rank_with_a_part_of_the_weights_is_reproduced(heads: Path, capsys: Any) -> None:  # I4
    """FSDP2 on two ranks, weights that have been trained; the whole weights are put together at the step's end."""
    on_ranks(2, functools.partial(dump_on_shards, steps=3), heads)
    nan, marked = sorted((heads.parent / "bad").iterdir())
    assert (nan.name, marked.name) == ("step-2-position-1", "step-3-position-1")
    assert main(["replay", str(nan)]) == 0
    assert "rank 1" in capsys.readouterr().out
    replay = replay_dump(read_dump(marked), device=CPU)
    assert math.isfinite(replay.recorded_loss)
    assert replay.loss == pytest.approx(replay.recorded_loss, rel=1e-6)
    fresh = {name: value.clone() for name, value in random_drafter(CONFIG).state_dict().items()}
    other = replay_dump(read_dump(marked), weights=fresh, device=CPU)
    assert other.loss != pytest.approx(replay.recorded_loss, rel=1e-6), "untrained weights give the same"
    (nan / "model.safetensors").unlink()  # as if the run had been killed within the step
    assert main(["replay", str(nan)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"drafter-trainer: DUMP: {nan}: holds no weights")
    assert error.count("\n") == 1


def test_other_weights_are_another_number(heads: Path, tmp_path: Path) -> None:
    _, dumps = dumped(fed_batch(micro_batch(1, (12,)), finite=False), heads)
    dump = read_dump(dumps[0])
    assert dump.weights is not None
    changed = {name: weight * 1.01 for name, weight in dump.weights.items()}
    assert not replay_dump(dump, weights=changed, device=CPU).exact


def test_only_the_first_few_are_kept(heads: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, dumps = dumped(poisoned(), heads, most=2, steps=4)
    assert [path.name for path in dumps] == ["step-2-position-1", "step-3-position-1"]
    assert caplog.text.count("kept: drafter-trainer replay") == 2


def test_a_full_disk_costs_the_dump_and_not_the_run(
    heads: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("drafter_trainer.dump.save_file", refuse)
    with caplog.at_level(logging.WARNING):
        _, dumps = dumped(poisoned(), heads)
    assert dumps == []
    assert "the batch at plan position 1 can't be kept" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "/nonexistent"], "DUMP: /nonexistent: is no dump; give a directory under run.dir/bad"),
        (["replay", "{dump}", "--device", "cuda:99"], "--device: cuda:99: "),
        (["replay", "{dump}", "--checkpoint", "/nonexistent"], "--checkpoint: /nonexistent: is no checkpoint"),
        (["replay", "{dump}", "--optim.lr", "1"], "command line: --optim.lr: not understood"),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2(arguments: list[str], message: str, heads: Path, capsys: Any) -> None:
    _, dumps = dumped(poisoned(), heads)
    capsys.readouterr()
    assert main([argument.format(dump=dumps[0]) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"drafter-trainer: {message}")
    assert error.count("\n") == 1
