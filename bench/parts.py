"""The parts of the benchmark: a module each with `run(options) -> list[Figure]`.

A module is imported only when its part runs: what one needs (torch, a model, a server) costs the others nothing. A part
starts its own processes, leaves none behind, and raises `BenchError` where it can't be measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from bench.options import BenchError, Options
from bench.results import Figure

__all__ = ["PARTS", "choose_parts", "load_part"]

# By name, in the order in which they run: the module and what it measures.
PARTS: dict[str, tuple[str, str]] = {
    "stream": ("bench.stream", "tokens out of the stream against loops without a server"),
    "overlap": ("bench.overlap", "copying beside the next forward, on against off"),
    "wire": ("bench.wire", "one stream against a raw socket, and its CPU time"),
    "scale": ("bench.scale", "requests of many ranks to many simulated replicas"),
    "step": ("bench.step", "the drafter's forward and backward against a plain reference"),
    "swap": ("bench.swap", "speed while another checkpoint is read, and the pause of a swap"),
}


def choose_parts(only: str) -> list[str]:
    """Returns the parts named in a comma-separated list; all of them for an empty one.

    Raises:
        BenchError: there is no such part.
    """
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    for name in wanted:
        if name not in PARTS:
            raise BenchError(f"--only: {name}: no such part; give some of {','.join(PARTS)}")
    return [name for name in PARTS if name in wanted or not wanted]


def load_part(name: str) -> Callable[[Options], list[Figure]]:
    """Imports a part."""
    module, _ = PARTS[name]
    run: Callable[[Options], list[Figure]] = importlib.import_module(module).run
    return run
