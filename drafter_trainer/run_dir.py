"""The files of a run directory and their names, which tools rely on.

config.yaml          the resolved settings
provenance.json      config, code, versions, command line, target: one entry per start of the run
metrics.jsonl        one object a step
consumed-rank-N.jsonl  which samples rank N trained, one object a step
checkpoints/         step-N/ and latest
heads/               the target's head, by version digest
tensorboard/
bad/                 batches that were not finite, to replay
summary.json         how it ended
lock                 held by the run's first rank while it lives; says which process that is
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from drafter_trainer.checkpoint import replace_json

__all__ = ["RunDir", "write_provenance"]

PACKAGES = ("tributary", "torch", "transformers", "grpcio", "protobuf", "safetensors", "numpy")


@dataclasses.dataclass(frozen=True)
class RunDir:
    """Paths within a run directory."""

    root: Path

    @property
    def metrics(self) -> Path:
        """One object a step."""
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints and the link to the latest."""
        return self.root / "checkpoints"

    @property
    def heads(self) -> Path:
        """The target's head, by version."""
        return self.root / "heads"

    @property
    def bad(self) -> Path:
        """Batches that made something not finite."""
        return self.root / "bad"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.root / "tensorboard"

    @property
    def summary(self) -> Path:
        """How the run ended."""
        return self.root / "summary.json"

    @property
    def lock(self) -> Path:
        """Held by the first rank while it lives."""
        return self.root / "lock"

    def consumed(self, rank: int) -> Path:
        """Which samples a rank trained."""
        return self.root / f"consumed-rank-{rank}.jsonl"

    def consumed_by_others(self, num_ranks: int) -> list[Path]:
        """The same of ranks that the run had once, when it had more than these."""
        mine = {self.consumed(rank) for rank in range(num_ranks)}
        return sorted(set(self.root.glob("consumed-rank-*.jsonl")) - mine)


def write_provenance(run_dir: RunDir, *, config: dict[str, Any], target: dict[str, Any]) -> None:
    """Writes config.yaml, and adds this start to provenance.json (a resumed run has several)."""
    (run_dir.root / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    path = run_dir.root / "provenance.json"
    starts = json.loads(path.read_text(encoding="utf-8"))["starts"] if path.exists() else []
    this_start = {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "git_sha": git_sha(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "config": config,
        "target": target,
    }
    replace_json(path, {**this_start, "starts": [*starts, this_start]})


def package_versions() -> dict[str, str | None]:
    """Installed versions of what a run depends on."""
    return {name: _version(name) for name in PACKAGES}


def git_sha() -> str | None:
    """Commit of the running code with "+" for local changes; None outside a checkout."""
    here = Path(__file__).parent
    try:
        sha = _git(here, "rev-parse", "HEAD")
        return sha + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
