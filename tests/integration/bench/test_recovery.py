"""A drafter whose target is swapped for a fine-tuned one in mid-run drafts for the new one again, and only then.

Real processes: a minute of training each on two cores, so it is for `make soak`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.soak import soak_only

REPOSITORY = Path(__file__).parents[3]
TIMEOUT_S = 900


@soak_only
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_acceptance_against_the_new_target_drops_at_the_swap_and_comes_back(tmp_path: Path) -> None:
    chart = tmp_path / "chart.svg"
    command = [sys.executable, "-m", "bench.recovery", "--output", str(chart)]
    ended = subprocess.run(command, cwd=REPOSITORY, timeout=TIMEOUT_S, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert figures["same_answers"] < 0.2, "the second target behaves as the first one"
    assert figures["before"] > 2.0
    # A drafter that is of no use emits one token a round: what it had gained above that is gone, and comes back.
    gained = figures["before"] - 1.0
    assert figures["at_swap"] < 1.0 + 0.25 * gained
    assert figures["after"] > 1.0 + 0.8 * gained
    # It was the swap, not the text, which is the same in both runs.
    assert figures["after_without_swap"] < 1.0 + 0.25 * gained
    assert len(list(ElementTree.parse(chart).iter("{http://www.w3.org/2000/svg}polyline"))) == 4
