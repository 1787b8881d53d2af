"""`python -m bench [--only PARTS] [--quick]`: measures, prints the table and, last, one line of JSON.

Exit codes: 0 measured (whatever the figures are), 1 a part could not be measured, 2 a mistake in what was given. stdout
has the result alone; everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Before anything imports transformers: nothing may be looked up by name on the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Servers are started by exec: gRPC's fork handlers would only warn about its threads. Read when grpc is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

from bench.options import CHECKOUT, BenchError, Options, say
from bench.parts import PARTS, choose_parts, load_part
from bench.results import Figure, as_json, table_lines, write_results

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        names = choose_parts(given.only)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    options = Options(quick=given.quick, cache=given.cache_dir.resolve())
    figures: list[Figure] = []
    failed = False
    for name in names:
        say(f"bench: {name}: {PARTS[name][1]} ...")
        began = time.monotonic()
        try:
            figures += load_part(name)(options)
            say(f"bench: {name}: took {time.monotonic() - began:.0f} s")
        except BenchError as error:
            failed = True
            print(f"bench: {name}: {error}", file=sys.stderr)
    content = as_json(figures)
    write_results(given.output, content)
    try:
        print("\n".join(table_lines(figures)))
        print(f"\n{json.dumps(content)}", flush=True)
    except BrokenPipeError:
        # The reader (`| head`) has gone; the results are in the file, and what is buffered would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parts = "\n".join(f"  {name:8} {what}" for name, (_, what) in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measures the figures that docs/running.md explains; each ratio within one run.",
        epilog=f"parts:\n{parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", default="", metavar="PARTS", help="comma-separated parts (all)")
    add("--quick", action="store_true", help="small sizes, few runs: that it works, not how fast")
    add("--output", type=Path, default=CHECKOUT / "bench" / "results.json", help="where the JSON goes")
    add("--cache-dir", type=Path, default=CHECKOUT / ".demo", help="keeps downloads and models (.demo)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
