"""The command line's grammar: verbs and their options. Settings are passed on to `config_layers.load_config` by name.

Mistakes are one line like every other mistake of the user, with the nearest name that exists.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

from target_server.config_layers import ENV_PREFIX, setting_lines, setting_names
from target_server.errors import UserError

__all__ = ["parse_command_line"]

_REQUIRED = "the following arguments are required: "


class _Parser(argparse.ArgumentParser):
    """A parser that raises its errors, and lists settings below the options of a verb that has them."""

    has_settings = False

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would print with its usage."""
        if message.startswith(_REQUIRED):
            raise UserError(message.removeprefix(_REQUIRED), "(not set)", f"needed here; see {self.prog} --help")
        name, _, wrong = message.removeprefix("argument ").partition(": ")
        raise UserError(name, wrong or "-", f"not understood; see {self.prog} --help")

    def format_help(self) -> str:
        """The usual help, with what each setting means and its default."""
        text = super().format_help()
        if not self.has_settings:
            return text
        settings = "".join(f"  --{name}\n      {meaning}\n" for name, meaning in setting_lines())
        order = f"flag > environment ({ENV_PREFIX}SECTION__NAME) > --config > default"
        return f"{text}\nsettings, each --name value ({order}):\n{settings}"

    def names(self) -> list[str]:
        """Every name that may be given, dashes included."""
        own = [name for name in self._option_string_actions if name.startswith("--")]
        return own + [f"--{name}" for name in setting_names()] if self.has_settings else own


def parse_command_line(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the verb with its options, and the settings' flags as they were typed.

    Raises:
        UserError: something that is not understood; names what was probably meant.
    """
    parser = _Parser(prog="target-server", description="Serves a frozen target's hidden states.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve|swap|status")
    _add_serve(commands)
    _add_swap(commands)
    _add_status(commands)
    arguments, rest = parser.parse_known_args(argv)
    verb: _Parser = commands.choices[arguments.command]
    settings = {f"--{name}" for name in setting_names()} if verb.has_settings else set()
    for given, following in zip_longest(rest, rest[1:], fillvalue="-"):
        name, _, value = given.partition("=")
        if name.startswith("--") and name not in settings:
            raise UserError(name, value or following, f"no such option; {_hint(name, verb)}")
    if rest and not verb.has_settings:
        raise UserError("command line", " ".join(rest), f"not understood; see {verb.prog} --help")
    return arguments, rest


def _hint(name: str, verb: _Parser) -> str:
    names = verb.names()
    last = name.rpartition(".")[2].removeprefix("--")
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7) or [n for n in names if n.endswith(f".{last}")]
    return f"did you mean {close[0]}?" if close else f"see {verb.prog} --help"


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser("serve", help="serve a checkpoint directory", allow_abbrev=False)
    serve.has_settings = True
    serve.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    serve.add_argument("--port-file", type=Path, metavar="FILE", help="write the front's port there once it serves")
    serve.add_argument(
        "--print-config", action="store_true", help="print the settings and where each is from, and exit"
    )
    serve.add_argument(
        "--dry-run", action="store_true", help="print the memory plan, say that it fits or refuse it, and exit"
    )


def _add_swap(commands: Any) -> None:
    swap = commands.add_parser(
        "swap", help="serve another checkpoint of the same shape, without a restart", allow_abbrev=False
    )
    swap.add_argument("--address", required=True, metavar="HOST:PORT", help="the front's address")
    swap.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="local directory, or a path below the server's swap.checkpoint_root",
    )
    swap.add_argument("--dry-run", action="store_true", help="only check and read it; change nothing")
    swap.add_argument(
        "--wait-for-trainer", action="store_true", help="end when every open session has had a batch of the new version"
    )
    swap.add_argument("--request-id", default="", metavar="ID", help="names the swap: given again, it is joined")
    swap.add_argument("--timeout", type=float, default=7200.0, metavar="SECONDS", help="for all of it (7200)")


def _add_status(commands: Any) -> None:
    status = commands.add_parser("status", help="what a server serves and how its replicas are", allow_abbrev=False)
    status.add_argument("address", metavar="HOST:PORT", help="the front's address")
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as one JSON object")
    form.add_argument("--watch", action="store_true", help="every second: a table, or plain lines into a pipe or file")
    status.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="for the answer (5)")
