"""Walks the demo from nothing to a measured drafter: prepare, serve and train, export, evaluate.

Owns the order, the clock and the command lines. It must never do a program's work itself: everything below runs
`target-server` and `drafter-trainer` as anyone would type them, and the commands are shown.

Server and trainer start together; the trainer waits for the server by itself. Both end before the evaluation starts, so
that decoding has the whole machine.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.errors import DemoError
from demo.machine import Machine, measure_machine, steps_that_fit
from demo.programs import Program, start_program, wait_for_file
from demo.progress import say, watch_training
from demo.recipe import CHECKOUT, Evaluation, Prepared, Recipe
from demo.report import Outcome, build_outcome

__all__ = ["Options", "run_demo"]

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 60.0  # the trainer finishes its step and writes a checkpoint
_EXPORT_TIMEOUT_S = 120.0
_EVALUATE_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Options:
    """What the user chose."""

    minutes: float
    """Time for everything, in minutes."""
    steps: int | None
    """Training steps; None: as many as fit."""
    cache: Path
    """Keeps downloads and models between runs."""
    run_dir: Path
    """New directory for this run."""


class _Demo:
    """One run's facts, so that each part below needs only itself."""

    def __init__(self, recipe: Recipe, options: Options, machine: Machine, files: Prepared) -> None:
        self.recipe, self.options, self.machine, self.files = recipe, options, machine, files
        self.threads = str(recipe.threads or machine.cores)
        self.train_dir, self.drafter_dir = options.run_dir / "train", options.run_dir / "drafter"
        # Offline for good: nothing may be looked up by name. The thread counts are given as settings too, but OpenMP
        # and MKL size their pools from the environment when they are loaded, before any setting is read.
        self.environment = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": self.threads,
            "PYTHONUNBUFFERED": "1",
        }

    def log(self, name: str) -> Path:
        return self.options.run_dir / f"{name}.log"

    def command(self, module: str, verb: str, *flags: str) -> list[str]:
        """A program's command line; prints it in the short form that one would type."""
        say(f"$ {module.replace('_', '-')} {verb} {shlex.join(flags)}")
        return [sys.executable, "-m", module, verb, *flags]


def run_demo(recipe: Recipe, options: Options) -> Outcome:
    """Runs the whole demo.

    Raises:
        DemoError: a part failed; the message says which and shows the end of its log.
    """
    started = time.monotonic()
    _make_run_dir(options.run_dir)
    machine = measure_machine()
    say(
        f"this machine: {machine.cores} cores, fp32 {machine.fp32_gflop_s:.0f} and bf16 {machine.bf16_gflop_s:.0f} "
        f"GFLOP/s a core, so training runs in {machine.dtype}"
    )
    files = recipe.prepare(options.cache, say)
    demo = _Demo(recipe, options, machine, files)
    steps = options.steps
    deadline = float("inf")
    if steps is None:
        seconds = options.minutes * 60 - _since(started) - _evaluation_seconds(recipe, machine)
        steps, deadline = _choose_steps(recipe, machine, seconds=seconds), time.monotonic() + seconds
    training_started = time.monotonic()
    metrics = _serve_and_train(demo, steps, deadline=deadline)
    train_minutes = _since(training_started) / 60
    _export(demo)
    evaluations = _evaluate(demo)
    minutes = _since(started) / 60
    return build_outcome(evaluations, metrics, train_dtype=machine.dtype, minutes=minutes, train_minutes=train_minutes)


def _make_run_dir(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True)
    except FileExistsError as error:
        raise DemoError(f"{run_dir} exists already; give a new --run-dir") from error
    except OSError as error:
        raise DemoError(f"{run_dir} can't be made ({error.strerror}); give another --run-dir") from error


def _since(moment: float) -> float:
    return time.monotonic() - moment


def _evaluation_seconds(recipe: Recipe, machine: Machine) -> float:
    return recipe.evaluation_gflop / (machine.gflop_s * machine.cores) + recipe.reserved_s


def _choose_steps(recipe: Recipe, machine: Machine, *, seconds: float) -> int:
    if seconds <= 0:
        raise DemoError("no time is left for training; give more --minutes, or --steps")
    steps = steps_that_fit(
        seconds, step_gflop=recipe.step_gflop, step_overhead_s=recipe.step_overhead_s, machine=machine
    )
    say(f"{steps} steps fit the time that is left")
    return steps


def _serve_and_train(demo: _Demo, steps: int, *, deadline: float) -> Sequence[Mapping[str, Any]]:
    port_file = demo.options.run_dir / "server.port"
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[demo.machine.dtype]
    serve = demo.command(
        "target_server",
        "serve",
        f"--config={_short(demo.recipe.server_config)}",
        f"--model.path={_short(demo.files.target)}",
        f"--model.dtype={dtype}",
        f"--replica.num_threads={demo.threads}",
        "--listen=127.0.0.1:0",
        f"--port-file={_short(port_file)}",
    )
    with start_program("target-server", serve, log=demo.log("server"), environment=demo.environment) as server:
        port = wait_for_file(port_file, program=server, timeout_s=_START_TIMEOUT_S)
        train = demo.command(
            "drafter_trainer",
            "train",
            f"--config={_short(demo.recipe.trainer_config)}",
            f"--target.addresses=127.0.0.1:{port}",
            f"--data.path={_short(_training_data(demo, steps))}",
            f"--data.tokenizer={_short(demo.files.target)}",
            f"--drafter.init_target_layers={_short(demo.files.target)}",
            f"--data.prepared_dir={_short(demo.options.run_dir / 'prepared')}",
            f"--run.dir={_short(demo.train_dir)}",
            f"--run.steps={steps}",
            f"--run.dtype={demo.machine.dtype}",
            f"--run.num_threads={demo.threads}",
        )
        with start_program(
            "drafter-trainer",
            train,
            log=demo.log("trainer"),
            environment=demo.environment,
            grace_s=_STOP_TIMEOUT_S,
        ) as trainer:
            metrics = watch_training(trainer, server, demo.train_dir / "metrics.jsonl", steps=steps, deadline=deadline)
            _end_training(trainer, metrics)
    return metrics


def _training_data(demo: _Demo, steps: int) -> Path:
    """The conversations to train on: all, or the first so many. Sources are interleaved, so any start is balanced."""
    if demo.recipe.conversations_per_step is None:
        return demo.files.training
    lines = demo.files.training.read_bytes().splitlines(keepends=True)
    count = max(1, round(demo.recipe.conversations_per_step * steps))
    if count >= len(lines):
        return demo.files.training
    say(f"training on the first {count} of {len(lines)} conversations, several times over")
    part = demo.options.run_dir / "training.jsonl"
    part.write_bytes(b"".join(lines[:count]))
    return part


def _end_training(trainer: Program, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Lets the trainer finish, or stops it where the time is up; it writes a checkpoint either way."""
    code = trainer.exit_code()
    if code is None:
        say("the time for training is up: stopping it; what it has learned is evaluated")
        trainer.stop(grace_s=_STOP_TIMEOUT_S)
    elif code != 0:
        raise trainer.failure(code)
    if not metrics:
        raise DemoError(f"the time was up before the first step; give more --minutes, or --steps; log: {trainer.log}")


def _export(demo: _Demo) -> None:
    command = demo.command(
        "drafter_trainer", "export", f"--run.dir={_short(demo.train_dir)}", f"--output={_short(demo.drafter_dir)}"
    )
    with start_program(
        "drafter-trainer export", command, log=demo.log("export"), environment=demo.environment
    ) as export:
        export.wait_for_success(_EXPORT_TIMEOUT_S)


def _evaluate(demo: _Demo) -> dict[str, Mapping[str, Any]]:
    """Decodes the held-out prompts in both element types: at the same time if each needs one core, else in turn."""
    amounts = demo.recipe.evaluations
    at_once = demo.recipe.threads == 1 and demo.machine.cores > 1
    with ExitStack() as running:
        programs = []
        for dtype, amount in amounts.items():
            programs.append(running.enter_context(_start_evaluation(demo, dtype, amount)))
            if not at_once:
                programs[-1].wait_for_success(_EVALUATE_TIMEOUT_S)
        for program in programs:
            program.wait_for_success(_EVALUATE_TIMEOUT_S)
    return {dtype: json.loads(_evaluation_file(demo, dtype).read_text(encoding="utf-8")) for dtype in amounts}


def _start_evaluation(demo: _Demo, dtype: str, amount: Evaluation) -> AbstractContextManager[Program]:
    command = demo.command(
        "drafter_trainer",
        "evaluate",
        f"--evaluate.checkpoint={_short(demo.drafter_dir)}",
        f"--evaluate.target_model={_short(demo.files.target)}",
        f"--evaluate.prompts={_short(demo.files.held_out)}",
        f"--evaluate.num_prompts={amount.num_prompts}",
        f"--evaluate.max_new_tokens={amount.max_new_tokens}",
        f"--evaluate.speed_prompts={amount.speed_prompts}",
        f"--evaluate.dtype={dtype}",
        f"--run.num_threads={demo.threads}",
        "--json",
    )
    return start_program(
        f"drafter-trainer evaluate in {dtype}",
        command,
        log=demo.log(f"evaluate-{dtype}"),
        output=_evaluation_file(demo, dtype),
        environment=demo.environment,
    )


def _evaluation_file(demo: _Demo, dtype: str) -> Path:
    return demo.options.run_dir / f"evaluation-{dtype}.json"


def _short(path: Path) -> str:
    """The path as one would type it in the checkout, where the programs run."""
    return str(path.relative_to(CHECKOUT)) if path.is_relative_to(CHECKOUT) else str(path)
