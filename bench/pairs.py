"""Ratios on a shared machine: whatever is compared is run in turns, and each turn gives one ratio.

A busy neighbour or a clock that changes slows both sides of a pair alike; medians over pairs then say more than two
medians divided. The order is reversed each round, so that warming up or drifting favours neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from bench.options import say

__all__ = ["ratios", "take_numbered_turns", "take_turns"]

Value = TypeVar("Value")


def take_turns(measures: Mapping[str, Callable[[], Value]], *, rounds: int) -> list[dict[str, Value]]:
    """Runs every measure once a round, in alternating order.

    Args:
        measures: by name, each returning its value; the first call of each should already be warm.
        rounds: how often.

    Returns:
        The values by name, one mapping a round.
    """

    def without_number(measure: Callable[[], Value]) -> Callable[[int], Value]:
        return lambda _round: measure()

    return take_numbered_turns({name: without_number(measure) for name, measure in measures.items()}, rounds=rounds)


def take_numbered_turns(measures: Mapping[str, Callable[[int], Value]], *, rounds: int) -> list[dict[str, Value]]:
    """As `take_turns`; each measure is told the number of the round, from 0, so that all can do the same work in it."""
    results = []
    order = list(measures)
    for number in range(rounds):
        values = {name: measures[name](number) for name in order}
        results.append({name: values[name] for name in measures})
        order.reverse()
        shown = ", ".join(f"{name} {_as_text(value)}" for name, value in results[-1].items())
        say(f"bench:   round {number + 1} of {rounds}: {shown}")
    return results


def _as_text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def ratios(rounds: list[dict[str, float]], above: str, below: str) -> list[float]:
    """Returns one ratio of two measures a round."""
    return [values[above] / values[below] for values in rounds]
