"""Verbs and their options. Settings are not here: every `--section.name` is passed on to `config.resolve_config`.

Imports nothing heavy: building the parser takes milliseconds, and a verb's module is imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from drafter_trainer.errors import UserError

__all__ = ["Verb", "build_parser"]

Verb = Callable[[argparse.Namespace, Sequence[str]], int]

_SETTINGS_HELP = "Settings come from flags > environment (TRIBUTARY_TRAINER__SECTION__NAME) > --config > defaults."


class _Parser(argparse.ArgumentParser):
    """Mistakes are one line, as everywhere; settings are listed only when a verb's help is asked for."""

    lists_settings = False

    def error(self, message: str) -> NoReturn:
        raise UserError("command line", " ".join(sys.argv[1:]), f"{message}; see {self.prog} --help")

    def format_help(self) -> str:
        text = super().format_help()
        if not self.lists_settings:
            return text
        # Imports pydantic: half a second that only a reader of this list pays.
        from drafter_trainer.config import setting_lines  # noqa: PLC0415

        settings = "".join(f"  {flag}\n      {meaning}\n" for flag, meaning in setting_lines())
        return f"{text}\nsettings:\n{settings}"


def build_parser(program: str) -> argparse.ArgumentParser:
    """The parser; what it parses has `load_verb`, which gives the verb's function."""
    parser = _Parser(
        prog=program, description="Trains DFlash drafters from a streamed, frozen target.", allow_abbrev=False
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_prepare(verbs)
    _add_train(verbs)
    _add_evaluate(verbs)
    _add_export(verbs)
    _add_inspect(verbs)
    _add_replay(verbs)
    return parser


def _add_verb(verbs: Any, name: str, summary: str, *, with_settings: bool = True) -> _Parser:
    description = f"{summary} {_SETTINGS_HELP}" if with_settings else summary
    verb: _Parser = verbs.add_parser(name, help=summary, description=description, allow_abbrev=False)
    verb.lists_settings = with_settings
    if with_settings:
        verb.add_argument("--config", type=Path, metavar="FILE", help="YAML with what differs from the defaults")
        verb.add_argument("--print-config", action="store_true", help="print all settings and where they come from")
    verb.add_argument("--verbose", action="store_true", help="log more")
    # A function that imports and returns the verb's function, not the verb: importing is what must wait.
    verb.set_defaults(load_verb=lambda: importlib.import_module(f"drafter_trainer.cli.{name}").run)
    return verb


def _add_prepare(verbs: Any) -> None:
    _add_verb(verbs, "prepare", "Tokenise conversations with the target's chat template, once, for training.")


def _add_train(verbs: Any) -> None:
    verb = _add_verb(verbs, "train", "Train a drafter from a running target-server.")
    verb.add_argument(
        "--dry-run",
        action="store_true",
        help="say what a run would be and need, and stop; needs no server, and no data either",
    )
    verb.add_argument("--ranks", type=int, metavar="N", help="with --dry-run: plan for this many ranks")
    verb.add_argument("--print-plan", type=int, metavar="N", help="print the first N micro-batches; contacts no server")


def _add_evaluate(verbs: Any) -> None:
    verb = _add_verb(verbs, "evaluate", "Decode held-out prompts with target and drafter; measure acceptance length.")
    verb.add_argument("--json", action="store_true", help="print the result as one JSON object")


def _add_export(verbs: Any) -> None:
    verb = _add_verb(verbs, "export", "Write a checkpoint as serving engines load it.")
    verb.add_argument("--output", type=Path, metavar="DIR", help="where to; by default run.dir/export")
    verb.add_argument("--checkpoint", type=Path, metavar="DIR", help="which one; by default run.dir's latest")
    verb.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="type of the weights")


def _add_inspect(verbs: Any) -> None:
    verb = _add_verb(
        verbs, "inspect", "Say what a run, checkpoint, prepared dataset or drafter holds.", with_settings=False
    )
    verb.add_argument("path", type=Path, help="run directory, checkpoint, prepared dataset or exported drafter")
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.add_argument("--sample", type=int, metavar="ID", help="of a prepared dataset: show one sample, answers marked")
    verb.add_argument("--tokenizer", type=Path, metavar="DIR", help="the target's, to show a sample as text")


def _add_replay(verbs: Any) -> None:
    verb = _add_verb(verbs, "replay", "Do a dumped batch again; say where it stops being finite.", with_settings=False)
    verb.add_argument("dump", type=Path, metavar="DUMP", help="a directory under run.dir/bad")
    verb.add_argument("--checkpoint", type=Path, metavar="DIR", help="take the weights of this checkpoint instead")
    verb.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    verb.add_argument("--json", action="store_true", help="print one JSON object")
