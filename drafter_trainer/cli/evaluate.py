"""`drafter-trainer evaluate`: decodes held-out prompts with target and drafter, and prints what was accepted."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from target_wire.imports import quick_imports

from drafter_trainer.cli.export import load_checkpoint, target_text, trained_for
from drafter_trainer.cli.settings import read_settings, require
from drafter_trainer.config import TrainerConfig
from drafter_trainer.conversations import DroppedError, parse_prompt
from drafter_trainer.errors import EXIT_DONE, UserError
from drafter_trainer.templates import ChatTokenizer
from drafter_trainer.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from drafter_trainer.evaluate import Prompt
    from drafter_trainer.model import Drafter
    from drafter_trainer.report import AcceptanceReport

__all__ = ["run"]

logger = logging.getLogger(__name__)


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Evaluates and prints the report; as one JSON object with --json."""
    config = read_settings(options, flags)
    if config is None:
        return EXIT_DONE
    require(config, "evaluate.target_model", "evaluate.prompts")
    if config.evaluate.checkpoint is None:
        require(config, "run.dir")
    report, target = measure(config, read_prompts(config))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if options.json:
        print(json.dumps({**report.to_json(), "trained_for": target}))
    else:
        print(as_text(report))
        print(f"the drafter was trained for {target_text(target) if target else 'a target that it does not name'}")
    return EXIT_DONE


def read_prompts(config: TrainerConfig) -> list[Prompt]:
    """The prompts of `evaluate.prompts`, tokenised as they would be served.

    Raises:
        UserError: The file is missing, or no row of it is a prompt.
    """
    from drafter_trainer.evaluate import Prompt  # noqa: PLC0415 - loads torch

    file = config.evaluate.prompts
    assert file is not None, "required before"
    if not file.is_file():
        raise UserError("evaluate.prompts", file, "no such file; give JSON Lines of prompts")
    tokenizer = load_tokenizer(config.data.tokenizer or config.evaluate.target_model)
    chat = ChatTokenizer(tokenizer, options=config.data.template_options)
    prompts: list[Prompt] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if len(prompts) == config.evaluate.num_prompts:
                break
            try:
                conversation, source = parse_prompt(line, role_aliases=config.data.role_aliases)
                prompts.append(Prompt(tuple(chat.prompt_ids(conversation)), source))
            except DroppedError as error:
                logger.warning("row %d of %s is left out: %s", number, file, error)
    if not prompts:
        raise UserError("evaluate.prompts", file, "holds no prompt; give JSON Lines with messages")
    return prompts


def measure(config: TrainerConfig, prompts: Sequence[Prompt]) -> tuple[AcceptanceReport, dict[str, Any] | None]:
    """Loads target and drafter, and measures; returns the report, and which target the drafter was trained for."""
    with quick_imports():  # after everything that can be wrong with the options
        import torch  # noqa: PLC0415

        from drafter_trainer.devices import resolve_compute_dtype, resolve_device, resolve_num_threads  # noqa: PLC0415
        from drafter_trainer.evaluate import EvaluationSettings, evaluate_acceptance  # noqa: PLC0415

    torch.set_num_threads(resolve_num_threads(config.run.num_threads, processes_here=1))
    try:
        device = resolve_device(config.run.device)
    except ValueError as error:
        raise UserError("run.device", config.run.device, str(error)) from error
    dtype = resolve_compute_dtype(config.evaluate.dtype, device)
    drafter, trained_for = load_any_drafter(config)
    drafter = drafter.to(device=device, dtype=dtype).eval().requires_grad_(False)
    trained, wanted = drafter.config.block_size, config.evaluate.block_size
    if wanted is not None and wanted > trained:
        raise UserError("evaluate.block_size", wanted, f"the drafter was trained with {trained}; give at most that")
    settings = EvaluationSettings(
        max_new_tokens=config.evaluate.max_new_tokens,
        block_size=wanted,
        speed_prompts=config.evaluate.speed_prompts,
        progress=_progress(),
    )
    return evaluate_acceptance(_load_target(config, device, dtype), drafter, prompts, settings), trained_for


def load_any_drafter(config: TrainerConfig) -> tuple[Drafter, dict[str, Any] | None]:
    """An exported or published drafter, a checkpoint, or the newest checkpoint of run.dir; and its target, if named."""
    from drafter_trainer.drafter_config import DrafterConfig  # noqa: PLC0415
    from drafter_trainer.export import load_drafter, read_trained_for  # noqa: PLC0415
    from drafter_trainer.model import Drafter  # noqa: PLC0415

    named = config.evaluate.checkpoint
    if named is not None and (named / "config.json").is_file():
        return load_drafter(named), read_trained_for(named)
    if named is not None and not (named / "state.json").is_file():
        raise UserError("evaluate.checkpoint", named, "is neither an exported drafter nor a checkpoint")
    assert named is not None or config.run.dir is not None, "required before"
    checkpoint = load_checkpoint(config.run.dir or Path(), named)
    drafter = Drafter(DrafterConfig.from_json(checkpoint.facts["drafter_config"]))
    drafter.load_state_dict(checkpoint.final_weights)
    return drafter, trained_for(checkpoint)


def as_text(report: AcceptanceReport) -> str:
    """The report as a table by source."""
    lines = [
        f"{'source':<24} {'prompts':>7} {'accept_len':>10} {'identical':>9} {'ties':>5} {'plain':>9} {'blocks':>9}"
    ]
    lines += [
        f"{row.source or '(none)':<24} {row.prompts:>7} {row.accept_len:>10.2f} {row.identical:>9} {row.ties:>5} "
        f"{_speed(row.tok_s_plain):>9} {_speed(row.tok_s_speculative):>9}"
        for row in (*report.by_source, _total(report))
    ]
    by_slot = " ".join("-" if rate is None else f"{rate:.2f}" for rate in report.acc_at)
    lines.append(f"acceptance by slot, given all before it: {by_slot}")
    lines.append(
        f"mean of the prompts' own lengths {report.accept_len_macro:.2f}, simulated {report.accept_len_simulated:.2f}; "
        f"computed in {report.dtype} with blocks of {report.block_size}"
    )
    if report.speedup is not None:
        lines.append(f"speed {report.speedup:.2f} x with blocks of {report.speed_block_size}, in tokens a second")
    if report.mismatches:
        lines.append(f"{report.mismatches} answers differ from plain decoding by more than rounding: please report it")
    return "\n".join(lines)


def _total(report: AcceptanceReport) -> Any:
    from drafter_trainer.report import SourceRow  # noqa: PLC0415 - loaded by now

    return SourceRow(
        "all",
        report.prompts,
        report.accept_len,
        report.identical,
        report.ties,
        report.tok_s_plain,
        report.tok_s_speculative,
    )


def _speed(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else f"{tokens_per_s:.1f}"


def _load_target(config: TrainerConfig, device: Any, dtype: Any) -> Any:
    with quick_imports():
        from transformers import AutoModelForCausalLM  # noqa: PLC0415
        from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()
    directory = config.evaluate.target_model
    try:
        with quick_imports():  # the model's own module
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UserError("evaluate.target_model", directory, f"can't be loaded ({reason})") from error
    return model.to(device).eval().requires_grad_(False)


def _progress() -> Callable[[str, int, int], None]:
    """A line that is rewritten on a terminal; one line for each kind of work elsewhere."""
    if sys.stderr.isatty():
        return lambda what, done, total: print(f"\r\033[K{what} {done} of {total}", end="", file=sys.stderr, flush=True)
    told: set[str] = set()

    def tell(what: str, done: int, total: int) -> None:
        if what not in told:
            told.add(what)
            logger.info("%s: %d prompts", what, total)

    return tell
