"""Ratios on a shared machine: whatever is compared is run in turns, and each turn gives one ratio.

A busy neighbour or a clock that changes slows both sides of a pair alike; medians over pairs then say more than two
medians divided. The order is reversed each round, so that warming up or drifting favours neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

__all__ = ["ratios", "take_turns"]

Value = TypeVar("Value")


def take_turns(measures: Mapping[str, Callable[[], Value]], *, rounds: int) -> list[dict[str, Value]]:
    """Runs every measure once a round, in alternating order.

    Args:
        measures: by name, each returning its value; the first call of each should already be warm.
        rounds: how often.

    Returns:
        The values by name, one mapping a round.
    """
    results = []
    order = list(measures)
    for _ in range(rounds):
        values = {name: measures[name]() for name in order}
        results.append({name: values[name] for name in measures})
        order.reverse()
    return results


def ratios(rounds: list[dict[str, float]], above: str, below: str) -> list[float]:
    """Returns one ratio of two measures a round."""
    return [values[above] / values[below] for values in rounds]
