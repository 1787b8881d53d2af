"""`python -m demo [--tiny]`: parses, runs, prints the table and, last, one line of JSON. 0 done, 1 failed, 2 a mistake.

stdout has the result alone; everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# Before anything imports transformers: nothing may be looked up by name on the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from demo.errors import DemoError
from demo.pipeline import Options, run_demo
from demo.programs import interrupted_by_sigterm
from demo.progress import say
from demo.recipe import CHECKOUT, smollm2_recipe, tiny_recipe
from demo.report import print_table

__all__ = ["main"]

_DEFAULT_MINUTES = {"smollm2": 13.6, "tiny": 1.25}
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    given = _parser().parse_args(arguments)
    recipe = tiny_recipe(given.prompts or 24) if given.tiny else smollm2_recipe(given.prompts or 42)
    options = Options(
        minutes=given.minutes or _DEFAULT_MINUTES[recipe.name],
        steps=given.steps or (None if given.minutes else recipe.default_steps),
        cache=given.cache_dir.resolve(),
        run_dir=(given.run_dir or CHECKOUT / "runs" / f"demo-{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}").resolve(),
    )
    try:
        with interrupted_by_sigterm():
            outcome = run_demo(recipe, options)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say(f"demo: interrupted; both programs are stopped, what there is lies in {options.run_dir}")
        return _INTERRUPTED
    print_table(outcome, title=recipe.title)
    line = json.dumps(outcome.as_json())
    (options.run_dir / "result.json").write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="Trains a drafter through both programs, then decodes held-out prompts with it.",
    )
    add = parser.add_argument
    add("--tiny", action="store_true", help="with a tiny target that can count, in 90 seconds")
    add("--minutes", type=_positive(float), help="time for everything (13.6); sets the number of steps")
    add("--steps", type=_positive(int), help="training steps (as many as fit; tiny 120)")
    add("--prompts", type=_positive(int), help="held-out prompts that are decoded (42, tiny 24)")
    add("--run-dir", type=Path, help="new directory for results and logs (runs/demo-NAME-TIME)")
    add("--cache-dir", type=Path, default=CHECKOUT / ".demo", help="keeps downloads and models (.demo)")
    return parser


def _positive(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    """A type for argparse whose values are above 0."""

    def parse(text: str) -> int | float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
        return value

    parse.__name__ = kind.__name__
    return parse


if __name__ == "__main__":
    sys.exit(main())
