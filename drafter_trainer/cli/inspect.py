"""`drafter-trainer inspect`: what a directory of ours holds, in words or as JSON. Loads no torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from drafter_trainer.dataset import TokenDataset, is_prepared
from drafter_trainer.errors import EXIT_DONE, UserError
from drafter_trainer.logging_setup import setup_logging

__all__ = ["describe_dataset", "run"]

_LAST_STEP_FIELDS = ("step", "epoch", "loss", "accept_len", "lr", "grad_norm", "skipped")


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Prints what `path` holds."""
    setup_logging(verbose=options.verbose)
    if flags:
        raise UserError("command line", flags[0], "not understood; see drafter-trainer inspect --help")
    path: Path = options.path
    if not path.is_dir():
        raise UserError("path", path, "no such directory; give a run, checkpoint, prepared dataset or drafter")
    if options.sample is not None:
        print(show_sample(path, options.sample, options.tokenizer))
    elif options.json:
        print(json.dumps(gather(path)))
    else:
        print(describe_dataset(TokenDataset(path)) if is_prepared(path) else _as_text(gather(path)), end="")
    return EXIT_DONE


def gather(path: Path) -> dict[str, Any]:
    """Everything worth knowing about a directory, as JSON values."""
    kinds: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
        "meta.json": ("prepared dataset", lambda directory: asdict(TokenDataset(directory).meta)),
        "manifest.json": ("checkpoint", _gather_checkpoint),
        "provenance.json": ("run", _gather_run),
        "config.json": ("drafter", lambda directory: _read_json(directory / "config.json")),
    }
    for file, (kind, gather_kind) in kinds.items():
        if (path / file).is_file():
            return {"kind": kind, "path": str(path), **gather_kind(path)}
    raise UserError("path", path, f"holds none of {', '.join(kinds)}; give a directory that drafter-trainer wrote")


def describe_dataset(dataset: TokenDataset) -> str:
    """A prepared dataset in words: what is in it and what was left out."""
    meta = dataset.meta
    lines = [
        f"{dataset.directory}: {meta.samples:,} samples from {meta.rows:,} rows",
        f"  tokens      {meta.tokens:,}, {meta.supervised_tokens:,} supervised ({_percent(meta)})",
        f"  lengths     {meta.tokens / meta.samples:,.1f} on average, {meta.longest_tokens:,} at most, "
        f"{meta.truncated:,} samples cut to fit",
        f"  fingerprint {meta.fingerprint}",
    ]
    for reason, count in sorted(meta.dropped.items(), key=lambda item: -item[1].count):
        example = f" ({count.example})" if count.example and count.example not in reason else ""
        lines.append(f"  dropped     {count.count:,} x {reason}; first in row {count.first_row + 1}{example}")
    return "".join(f"{line}\n" for line in lines)


def show_sample(path: Path, sample_id: int, tokenizer: Path | None) -> str:
    """One sample as text, what is supervised between ⟦ and ⟧; token ids where there is no tokenizer."""
    dataset = TokenDataset(path)
    if not 0 <= sample_id < len(dataset):
        raise UserError("--sample", sample_id, f"the dataset has samples 0 to {len(dataset) - 1}")
    ids, mask = dataset.sample(sample_id)
    decode = _decoder(tokenizer)
    pieces = [f"sample {sample_id}, {len(ids)} tokens, from row {dataset.source_row(sample_id) + 1}\n"]
    pairs = zip(ids.tolist(), mask.tolist(), strict=True)
    for supervised, group in groupby(pairs, key=lambda pair: pair[1]):
        text = decode([token_id for token_id, _ in group])
        pieces.append(f"⟦{text}⟧" if supervised else text)
    return "".join(pieces)


def _decoder(tokenizer: Path | None) -> Callable[[list[int]], str]:
    if tokenizer is None:
        return lambda ids: " ".join(str(token_id) for token_id in ids)
    from drafter_trainer.tokenizer import load_tokenizer  # noqa: PLC0415 - takes seconds

    loaded = load_tokenizer(tokenizer)
    return lambda ids: str(loaded.decode(ids, skip_special_tokens=False))


def _gather_checkpoint(path: Path) -> dict[str, Any]:
    state = _read_json(path / "state.json")
    kept = ("step", "position", "counters", "identity", "facts")
    return {name: state[name] for name in kept if name in state} | {
        "files": _read_json(path / "manifest.json")["files"]
    }


def _gather_run(path: Path) -> dict[str, Any]:
    provenance = _read_json(path / "provenance.json")
    checkpoints = sorted((p.name for p in (path / "checkpoints").glob("step-*")), key=lambda name: int(name[5:]))
    latest = path / "checkpoints" / "latest"
    summary = path / "summary.json"
    return {
        "started": [start["at"] for start in provenance["starts"]],
        "git_sha": provenance["git_sha"],
        "target": provenance["target"],
        "checkpoints": checkpoints,
        "latest": latest.readlink().name if latest.is_symlink() else None,
        "last_step": _last_line(path / "metrics.jsonl"),
        "summary": _read_json(summary) if summary.is_file() else None,
    }


def _last_line(file: Path) -> dict[str, Any] | None:
    """The last whole record of a file that may be growing, read from its end."""
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 2**16))
        lines = stream.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    return dict(json.loads(whole[-1])) if whole else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise UserError("path", file, f"can't be read ({error})") from error


def _as_text(gathered: dict[str, Any]) -> str:
    lines = [f"{gathered.pop('path')}: {gathered.pop('kind')}"]
    if gathered.get("last_step"):
        gathered["last_step"] = {name: gathered["last_step"].get(name) for name in _LAST_STEP_FIELDS}
    for name, value in gathered.items():
        if isinstance(value, dict):
            lines.append(f"  {name}")
            lines += [f"    {key:<28} {_short(inner)}" for key, inner in value.items()]
        else:
            lines.append(f"  {name:<12} {_short(value)}")
    return "".join(f"{line}\n" for line in lines)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


def _percent(meta: Any) -> str:
    return f"{100 * meta.supervised_tokens / meta.tokens:.0f} %"
