"""`python -m bench.recovery`: the target is replaced by a fine-tuned one in mid-run; does the drafter come back?

A tiny target that counts, and a fine-tune of it that counts the other way, so that hidden states, ends and answers all
change. Both programs run for real: `target-server swap` replaces the weights while the drafter is trained. Afterwards
every checkpoint is measured against both targets: the simulated acceptance length on prompts that were held out, along
each target's own greedy answers, with its own states and head. The data holds both targets' answers from the start.

Prints a table, draws the curves (`recovery_plot`) and prints one line of JSON, last.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from bench.options import CHECKOUT, BenchError, say
from bench.recovery_plot import Curve, draw
from demo.errors import DemoError
from demo.programs import Program, start_program, wait_for_file
from demo.tiny import ensure_tiny_target
from drafter_trainer.acceptance import summarise
from drafter_trainer.checkpoint import read_checkpoint
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.head import TargetHead
from drafter_trainer.model import Drafter
from drafter_trainer.references import Reference, batched_answers, eos_ids_of
from drafter_trainer.types import MicroBatch, TrainBatch, Version
from drafter_trainer.walk import walk

__all__ = ["main"]

TAPS = (1, 2)
ANSWER_TOKENS = 24
CHECKPOINT_EVERY = 10
WAIT_S = 600.0
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
Conversation = list[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Simulated acceptance lengths against one target, by step."""

    name: str
    by_step: dict[int, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--swap-at", type=int, default=150, help="step after which the target is swapped")
    parser.add_argument("--output", type=Path, help="SVG file of the curves")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="recovery-") as scratch:
        work = Path(scratch)
        try:
            targets = make_targets(work)
            switched = train(work, targets, steps=given.steps, swap_at=given.swap_at)
        except (BenchError, DemoError) as error:
            print(f"bench.recovery: {error}", file=sys.stderr)
            return 1
        curves = [measure(name, path, work) for name, path in targets.items()]
    report(curves, switched, given.output)
    return 0


def make_targets(work: Path) -> dict[str, Path]:
    """The first target and its fine-tune, and a data file with the answers of both."""
    made = ensure_tiny_target(work / "one", say=say)
    first, tuned = made / "target", made / "fine-tuned"
    say("fine-tuning it to count the other way ...")
    tokenizer = AutoTokenizer.from_pretrained(first)
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    rows = [json.loads(line)["messages"] for line in (made / "train.jsonl").read_text().splitlines()]
    fine_tune(model, tokenizer, [other_way(row) for row in rows])
    shutil.copytree(first, tuned)  # the tokenizer's very files, which a server compares
    model.save_pretrained(tuned)
    prompts = [tokenizer.apply_chat_template(r[:1], add_generation_prompt=True, return_dict=False) for r in rows]
    answers = [tokenizer.decode(a.token_ids, skip_special_tokens=True) for a in answers_of(model, prompts)]
    rows += [[row[0], {"role": "assistant", "content": text}] for row, text in zip(rows[:], answers, strict=True)]
    random.Random(0).shuffle(rows)
    (work / "data.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return {"first target": first, "fine-tuned target": tuned}


def other_way(row: Conversation) -> Conversation:
    """The same prompt, answered in the other direction from its second number on."""
    numbers = row[1]["content"].split()
    start, second = int(numbers[0]), int(numbers[1])
    answer = [str((start - i * (second - start)) % 24) for i in range(len(numbers) - 1)]
    return [row[0], {"role": "assistant", "content": " ".join([*answer, "done"])}]


def fine_tune(model: Any, tokenizer: Any, rows: Sequence[Conversation], *, steps: int = 80) -> None:
    """Teaches the new answers; every conversation has the same length."""
    ids_BS = torch.tensor([tokenizer.apply_chat_template(row, return_dict=False) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        batch_BS = ids_BS[torch.randint(len(ids_BS), (16,), generator=generator)]
        optimizer.zero_grad()
        model(input_ids=batch_BS, labels=batch_BS).loss.backward()
        optimizer.step()
    model.eval()


def answers_of(model: Any, prompts: Sequence[Sequence[int]]) -> list[Reference]:
    """Greedy answers with the states of the taps."""
    return batched_answers(
        model, prompts, max_new_tokens=ANSWER_TOKENS, eos_ids=eos_ids_of(model), batch_size=64, target_layer_ids=TAPS
    )


def train(work: Path, targets: dict[str, Path], *, steps: int, swap_at: int) -> int:
    """Runs both programs and swaps; returns the first step on the new target.

    Raises:
        BenchError: A program failed, or the run was over before the swap.
    """
    first, tuned = targets.values()
    python = [sys.executable, "-m"]
    serve = [*python, "target_server", "serve", "--config", str(CHECKOUT / "configs/server/demo-tiny.yaml")]
    serve += ["--model.path", str(first), "--listen", "127.0.0.1:0", "--port-file", str(work / "port")]
    log = work / "programs.log"
    with start_program("target-server", serve, log=log, environment=QUIET) as server:
        address = f"127.0.0.1:{wait_for_file(work / 'port', program=server, timeout_s=WAIT_S)}"
        command = [*python, "drafter_trainer", "train", "--config", str(CHECKOUT / "configs/trainer/demo-tiny.yaml")]
        command += ["--target.addresses", address, "--data.path", str(work / "data.jsonl")]
        command += ["--data.tokenizer", str(first), "--run.dir", str(work / "run"), "--run.steps", str(steps)]
        command += ["--run.checkpoint_every_steps", str(CHECKPOINT_EVERY), "--run.keep_checkpoints", str(steps)]
        command += ["--run.tensorboard", "false", "--optim.schedule", "constant"]
        with start_program("drafter-trainer", command, log=log, environment=QUIET) as trainer:
            say(f"training {steps} steps; swapping after {swap_at} ...")
            wait_for_step(work / "run", swap_at, trainer)
            swap = [*python, "target_server", "swap", "--address", address, "--checkpoint", str(tuned)]
            if subprocess.run(swap, check=False, timeout=WAIT_S, cwd=CHECKOUT, stdout=sys.stderr).returncode:
                raise BenchError("the target could not be swapped; see above")
            trainer.wait_for_success(WAIT_S)
    switched = [record["step"] for record in records(work / "run") if max(record["target_versions"]) > 1]
    if not switched:
        raise BenchError("the run ended before the swap; give more --steps")
    return int(switched[0])


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The run's records so far."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_step(run_dir: Path, step: int, trainer: Program) -> None:
    """Waits until a step is done."""
    deadline_s = time.monotonic() + WAIT_S
    while not any(record["step"] >= step for record in records(run_dir)):
        trainer.check_running()
        if time.monotonic() > deadline_s:
            raise BenchError(f"step {step} was not reached within {WAIT_S:.0f} s")
        time.sleep(0.02)


def measure(name: str, target: Path, work: Path) -> Measured:
    """Every checkpoint against one target."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    held_out = [json.loads(line)["messages"] for line in (work / "one" / "held-out.jsonl").read_text().splitlines()]
    prompts = [tokenizer.apply_chat_template(r, add_generation_prompt=True, return_dict=False) for r in held_out]
    batch = pack(prompts, answers_of(model, prompts))
    head = TargetHead.from_model(model)
    by_step = {}
    for path in sorted((work / "run" / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:])):
        checkpoint = read_checkpoint(path)
        drafter = Drafter(DrafterConfig.from_json(checkpoint.facts["drafter_config"]))
        drafter.load_state_dict(checkpoint.final_weights)
        rounds = walk(drafter.eval(), head, batch)
        by_step[checkpoint.step] = summarise(rounds, block_size=drafter.config.block_size).micro
    return Measured(name, by_step)


def pack(prompts: Sequence[Sequence[int]], answers: Sequence[Reference]) -> TrainBatch:
    """Prompts and answers as one batch; the last token's state is unknown and never looked at."""
    ids = [torch.tensor([*prompt, *answer.token_ids]) for prompt, answer in zip(prompts, answers, strict=True)]
    masks = [torch.arange(len(i)) >= len(prompt) for i, prompt in zip(ids, prompts, strict=True)]
    features = [torch.nn.functional.pad(answer.features_RC, (0, 0, 0, 1)) for answer in answers]
    micro = MicroBatch(
        0, 0, tuple(range(len(ids))), tuple(len(i) for i in ids), torch.cat(ids), torch.cat(masks)
    )  # fmt: skip
    return TrainBatch(micro, torch.cat(features), Version(0, "in-process"), 0)


def report(curves: Sequence[Measured], switched: int, output: Path | None) -> None:
    """Prints the table and the JSON line, and draws."""
    steps = sorted(curves[0].by_step)
    before = max(step for step in steps if step < switched)
    result = {
        curve.name: {"first": curve.by_step[steps[0]], "before_swap": curve.by_step[before],
                     "end": curve.by_step[steps[-1]]}
        for curve in curves
    }  # fmt: skip
    print(f"{'step':>6}" + "".join(f"{curve.name:>20}" for curve in curves))
    for step in steps:
        print(f"{step:>6}" + "".join(f"{curve.by_step[step]:>20.2f}" for curve in curves))
    if output is not None:
        lines = [Curve(curve.name, sorted(curve.by_step.items())) for curve in curves]
        output.write_text(draw(lines, mark=switched, x_label="step", y_label="simulated acceptance length"))
        say(f"drawn: {output}")
    print(f"\n{json.dumps({'switched_at': switched, **result})}")


if __name__ == "__main__":
    raise SystemExit(main())
