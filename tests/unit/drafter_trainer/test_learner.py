"""How a run is gone on with: by ranks that agree, over records that hold every step once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drafter_trainer.bottleneck import Bottleneck
from drafter_trainer.errors import UserError
from drafter_trainer.learner import check_ranks_agree
from drafter_trainer.recorder import Recorder, RecorderSettings
from drafter_trainer.run_dir import RunDir
from drafter_trainer.trainer import Progress


class OtherRank:
    """The first of two ranks, whose peer answers as told."""

    def __init__(self, **theirs: Any) -> None:
        self.theirs = theirs

    def gather(self, values: list[float]) -> list[list[float]]:
        mine = self.mine = dict(zip(("steps", "settings"), values, strict=True))
        return [list(mine.values()), list({**mine, **self.theirs}.values())]


def blueprint(ranks: OtherRank, *, parallel: str = "ddp") -> Any:
    config = SimpleNamespace(run=SimpleNamespace(dir=Path("runs/a"), parallel=parallel))
    identity = {"run.seed": 1, "taps": (0, 2), "target.digest": "d"}
    return SimpleNamespace(config=config, identity=identity, machine=SimpleNamespace(ranks=ranks))


def test_ranks_that_agree_go_on() -> None:
    check_ranks_agree(blueprint(OtherRank()), None)
    check_ranks_agree(blueprint(OtherRank()), SimpleNamespace(step=7))  # type: ignore[arg-type]


def test_ranks_that_share_no_run_directory_are_refused() -> None:
    """I1: only the first rank writes; another machine's rank would begin anew beside it."""
    with pytest.raises(UserError, match=r"run\.dir: runs/a: rank 1 finds 0 steps .* first rank 7; .*share"):
        check_ranks_agree(blueprint(OtherRank(steps=0.0)), SimpleNamespace(step=7))  # type: ignore[arg-type]


def test_ranks_with_other_settings_are_refused() -> None:
    with pytest.raises(UserError, match=r"rank 1: its settings or data: .*start all alike"):
        check_ranks_agree(blueprint(OtherRank(settings=1.0)), None)


def test_ranks_that_share_the_drafter_otherwise_are_refused() -> None:
    """They would wait for each other in different collectives."""
    replicated = OtherRank()
    check_ranks_agree(blueprint(replicated), None)
    sharded = OtherRank(settings=replicated.mine["settings"])
    with pytest.raises(UserError, match=r"rank 1: its settings or data: .*start all alike"):
        check_ranks_agree(blueprint(sharded, parallel="fsdp"), None)


def test_a_resumed_run_cuts_off_the_records_of_ranks_it_no_longer_has(tmp_path: Path) -> None:  # I1
    """Three ranks were killed at step 9, one goes on after step 5: steps 6 to 9 are trained again, by other ranks."""
    run_dir = RunDir(tmp_path)
    for rank in range(3):
        run_dir.consumed(rank).write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 10)))
    learner: Any = SimpleNamespace(progress=Progress(step=5))
    ranks: Any = SimpleNamespace(rank=0, num_ranks=1, is_first=True)
    settings = RecorderSettings(
        total_steps=9,
        log_every_steps=1,
        bottleneck_every_steps=100,
        bottleneck=Bottleneck(replicas=1, ranks=1, batches_ahead=1),
        tensorboard=False,
        identity={},
        facts={},
    )
    with Recorder(run_dir, store=None, learner=learner, ranks=ranks, settings=settings):  # type: ignore[arg-type]
        steps = [
            [json.loads(line)["step"] for line in run_dir.consumed(rank).read_text().splitlines()] for rank in range(3)
        ]
    assert steps == [[1, 2, 3, 4, 5]] * 3
