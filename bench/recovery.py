"""`python -m bench.recovery`: a target is swapped for a fine-tuned one under a run; acceptance against it comes back.

Real processes: `target-server` and `drafter-trainer` as users start them. No figure of `make bench`: a curve for the
documentation, and what it says as one line of JSON. Two runs with the same seed on the same text: in one the target is
swapped half way, in the other never. Each checkpoint of both is then walked along the greedy answers of *either* target
to prompts that are not in the text: what decoding with that target would accept (`evaluate` calls it simulated). Exit
codes: 0 measured, 1 it could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before anything imports transformers: nothing may be looked up by name on the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import torch

from bench.line_chart import Chart, Line
from bench.options import CHECKOUT, BenchError, say
from bench.recovery_targets import Family, load_model, make_family
from bench.swap_client import swap_to
from demo.errors import DemoError
from demo.programs import Program, start_program, wait_for_file
from demo.progress import MetricsTail
from drafter_trainer.acceptance import summarise
from drafter_trainer.checkpoint import CheckpointStore, read_checkpoint
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.evaluate import walk_references
from drafter_trainer.head import TargetHead
from drafter_trainer.model import Drafter
from drafter_trainer.references import batched_answers, eos_ids_of

__all__ = ["main"]

_STEPS = 360  # of each run
_SWAP_STEP = 180  # after which the swap is asked for
_EVERY = 10  # steps between checkpoints
_TUNE_STEPS = 60  # of fine-tuning the second target
_TIMEOUT_S = 300.0
_POLL_S = 0.02
_MAX_NEW_TOKENS = 24
_TAPS = (1, 2)  # as configs/trainer/demo-tiny.yaml
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

Curve = list[tuple[int, float]]
"""(step, acceptance length of the checkpoint of that step)."""


@dataclass(frozen=True)
class Recovery:
    """What was measured.

    Attributes:
        first_step: the first one with a batch of the second target.
        base: of the swapped run, against the first target.
        tuned: of the swapped run, against the second one.
        control: of the run without a swap, against the second one.
        same_answers: share of the held-out prompts to which both targets answer the same.
    """

    first_step: int
    base: Curve
    tuned: Curve
    control: Curve
    same_answers: float

    def as_json(self) -> dict[str, Any]:
        """The numbers of the curve that say whether acceptance dropped and came back."""
        before = [length for step, length in self.base if step < self.first_step][-1]
        at_swap = [length for step, length in self.tuned if step < self.first_step][-1]
        after = self.tuned[-1][1]
        goal = at_swap + 0.9 * (before - at_swap)
        back = next((step for step, length in self.tuned if step >= self.first_step and length >= goal), None)
        return {
            "before": round(before, 3),
            "at_swap": round(at_swap, 3),
            "after": round(after, 3),
            "after_without_swap": round(self.control[-1][1], 3),
            "swap_step": self.first_step,
            "steps_to_nine_tenths": None if back is None else back - self.first_step,
            "steps": self.tuned[-1][0],
            "same_answers": round(self.same_answers, 3),
        }

    def to_svg(self) -> str:
        """The chart."""
        before = [point for point in self.base if point[0] < self.first_step]
        served = [*before, *(point for point in self.tuned if point[0] >= before[-1][0])]
        lines = [
            Line("against the target that is served", served, "#0072b2"),
            Line("against the first target", self.base, "#e69f00", "7 4"),
            Line("against the second, fine-tuned one", self.tuned, "#009e73", "7 4"),
            Line("run without a swap, against the second", self.control, "#888888", "2 3"),
        ]
        return Chart(
            title="A swap to a fine-tuned target in mid-run",
            x_label="training step",
            y_label="simulated acceptance length, held-out prompts",
            lines=lines,
            marks=[(self.first_step, f"swap: first batches of the second target in step {self.first_step}")],
            y_from=1.0,
        ).to_svg()


def measure(work: Path) -> Recovery:
    """Makes the targets, runs the programs, walks the checkpoints.

    Raises:
        DemoError, BenchError: a program failed, or the swap did.
    """
    family = make_family(work, tune_steps=_TUNE_STEPS)
    say(f"recovery: both targets answer {family.same_answers:.0%} of the held-out prompts alike")
    with _server(family.base, work) as front:
        _train(front, family, work / "control", swap=False)
        records = _train(front, family, work / "swapped", swap=True)
    first_step = next(record["step"] for record in records if max(record["target_versions"]) > 1)
    say(f"recovery: the first batches of the second target were trained in step {first_step}")
    return Recovery(
        first_step,
        base=_curve(work / "swapped", family, family.base),
        tuned=_curve(work / "swapped", family, family.tuned),
        control=_curve(work / "control", family, family.tuned),
        same_answers=family.same_answers,
    )


@contextmanager
def _server(target: Path, work: Path) -> Iterator[str]:
    """Serves a target for the time of a block; gives the front's address."""
    port_file = work / "port"
    command = [
        *(sys.executable, "-m", "target_server", "serve", "--config", "configs/server/demo-tiny.yaml"),
        *("--model.path", str(target), "--listen", "127.0.0.1:0", "--port-file", str(port_file)),
    ]
    with start_program("target-server", command, log=work / "server.log", environment=_ENVIRONMENT) as server:
        yield f"127.0.0.1:{wait_for_file(port_file, program=server, timeout_s=_TIMEOUT_S)}"


def _train(front: str, family: Family, run_dir: Path, *, swap: bool) -> list[dict[str, Any]]:
    """Runs the trainer to its end, with a swap in mid-run if so wanted; returns the record of each step."""
    settings = {
        "target.addresses": front,
        "data.path": family.data,
        "data.tokenizer": family.base,
        "data.prepared_dir": family.data.with_name("prepared"),
        "run.dir": run_dir,
        "run.steps": _STEPS,
        # A rate that falls to 0 would end every run's learning at the same step, whatever came before.
        "optim.schedule": "constant",
        "run.checkpoint_every_steps": _EVERY,
        "run.keep_checkpoints": _STEPS,
        "run.tensorboard": "false",
    }
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "drafter_trainer", "train", "--config", "configs/trainer/demo-tiny.yaml", *flags]
    tail, records = MetricsTail(run_dir / "metrics.jsonl"), []
    log = run_dir.with_suffix(".log")
    with start_program("drafter-trainer", command, log=log, environment=_ENVIRONMENT) as trainer:
        if swap:
            records += _wait_for_step(tail, trainer, _SWAP_STEP)
            swap_to(front, family.tuned)
        trainer.wait_for_success(_TIMEOUT_S)
    return [*records, *map(dict, tail.new())]


def _wait_for_step(tail: MetricsTail, trainer: Program, step: int) -> list[dict[str, Any]]:
    """Returns the records up to a step, or a little further."""
    records: list[dict[str, Any]] = []
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not records or records[-1]["step"] < step:
        trainer.check_running()
        if time.monotonic() > deadline_s:
            raise BenchError(f"step {step} was not reached in {_TIMEOUT_S:.0f} s; log: {trainer.log}")
        time.sleep(_POLL_S)
        records += map(dict, tail.new())
    return records


def _curve(run_dir: Path, family: Family, target: Path) -> Curve:
    """Walks every checkpoint of a run along a target's own answers to the held-out prompts."""
    model = load_model(target)
    head, eos = TargetHead.from_model(model), eos_ids_of(model)
    references = batched_answers(
        model, family.prompts, max_new_tokens=_MAX_NEW_TOKENS, eos_ids=eos, target_layer_ids=_TAPS
    )
    curve = []
    for path in CheckpointStore(run_dir / "checkpoints", keep=1).paths():
        checkpoint = read_checkpoint(path)
        config = DrafterConfig.from_json(checkpoint.facts["drafter_config"])
        assert config.target_layer_ids == _TAPS
        drafter = Drafter(config)
        drafter.load_state_dict(checkpoint.final_weights)
        rounds = walk_references(drafter.eval(), head, family.prompts, references)
        curve.append((checkpoint.step, summarise(rounds, block_size=config.block_size).micro))
    return sorted(curve)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes the chart and prints the numbers."""
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--output", type=Path, default=CHECKOUT / "docs" / "swap-recovery.svg", help="where the chart goes")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="recovery-") as work:
            recovery = measure(Path(work))
    except (BenchError, DemoError) as error:
        print(f"bench.recovery: {error}", file=sys.stderr)
        return 1
    given.output.write_text(recovery.to_svg(), encoding="utf-8")
    print(json.dumps(recovery.as_json()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
