"""From evaluations and training metrics to the table and the last line.

Owns the names in the last line, which tools rely on, and which evaluation each figure is taken from: acceptance,
speed and `ties` from the one in bf16, as models are served, `identical` from the fp32 one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Outcome", "build_outcome", "print_table"]

_TABLE_WIDTH = 100


@dataclass(frozen=True)
class Outcome:
    """The last line, in its order."""

    accept_len: float
    """Tokens emitted by verification rounds ÷ rounds, over all prompts (micro), in bf16."""
    accept_len_macro: float
    """Mean of the prompts' own ratios."""
    accept_len_simulated: float
    """The same answers walked without running the target."""
    prompts: int
    """Held-out prompts decoded in bf16."""
    identical: int
    """Prompts whose fp32 output equals plain greedy decoding's, of `prompts_fp32`."""
    ties: int
    """Prompts whose bf16 output first differs from plain greedy decoding's at a tie, of `prompts`."""
    tok_s_plain: float
    """Tokens a second of plain greedy decoding, in bf16."""
    tok_s_speculative: float
    """Tokens a second with the drafter, in bf16."""
    tokens_trained: int
    """Tokens whose features were trained on, repetitions counted."""
    steps: int
    """Optimizer steps."""
    minutes: float
    """From start to the end of evaluation, downloads included."""
    train_dtype: str
    """Element type of training: the one that this machine multiplies faster."""
    prompts_fp32: int
    """Prompts decoded in fp32."""
    accept_len_fp32: float
    """As `accept_len`, in fp32."""
    tok_s_plain_fp32: float | None
    """As `tok_s_plain`, in fp32; None where it was not timed."""
    tok_s_speculative_fp32: float | None
    """As `tok_s_speculative`, in fp32."""
    errors: int
    """Outputs that differ from plain decoding's where there is no tie; anything but 0 is a fault."""
    train_minutes: float
    """Training alone, starting both programs included."""
    tok_s_trained: float
    """Tokens trained a second, over the steps' own time."""

    def as_json(self) -> dict[str, Any]:
        """All figures by name, floats to four digits after the point."""
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


def build_outcome(
    evaluations: Mapping[str, Mapping[str, Any]],
    metrics: Sequence[Mapping[str, Any]],
    *,
    train_dtype: str,
    minutes: float,
    train_minutes: float,
) -> Outcome:
    """Puts the figures together.

    Args:
        evaluations: What `drafter-trainer evaluate --json` printed, by element type: "fp32" and "bf16".
        metrics: One object a training step, at least one.
        train_dtype: The element type of training.
        minutes: Time of everything.
        train_minutes: Time of training.
    """
    fp32, bf16 = evaluations["fp32"], evaluations["bf16"]
    tokens = sum(row["tokens"] for row in metrics)
    return Outcome(
        accept_len=bf16["accept_len"],
        accept_len_macro=bf16["accept_len_macro"],
        accept_len_simulated=bf16["accept_len_simulated"],
        prompts=bf16["prompts"],
        identical=fp32["identical"],
        ties=bf16["ties"],
        tok_s_plain=bf16["tok_s_plain"],
        tok_s_speculative=bf16["tok_s_speculative"],
        tokens_trained=tokens,
        steps=metrics[-1]["step"],
        minutes=minutes,
        train_dtype=train_dtype,
        prompts_fp32=fp32["prompts"],
        accept_len_fp32=fp32["accept_len"],
        tok_s_plain_fp32=fp32["tok_s_plain"],
        tok_s_speculative_fp32=fp32["tok_s_speculative"],
        errors=sum(evaluation["mismatches"] for evaluation in evaluations.values()),
        train_minutes=train_minutes,
        tok_s_trained=tokens / max(1e-9, sum(row["step_s"] for row in metrics)),
    )


def print_table(outcome: Outcome, *, title: str) -> None:
    """Prints the figures for people, to stdout: it is a result."""
    table = Table(title=title, show_header=False, title_justify="left", min_width=len(title) + 4)
    table.add_column("what", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    rows = {
        f"acceptance length, {outcome.prompts} held-out prompts, bf16": f"{outcome.accept_len:.2f} tokens",
        "  mean of the prompts' own": f"{outcome.accept_len_macro:.2f} tokens",
        "  simulated": f"{outcome.accept_len_simulated:.2f} tokens",
        "plain greedy decoding, bf16": _speed(outcome.tok_s_plain),
        "with the drafter, bf16": _speed(outcome.tok_s_speculative, outcome.tok_s_plain),
        "plain greedy decoding, fp32": _speed(outcome.tok_s_plain_fp32),
        "with the drafter, fp32": _speed(outcome.tok_s_speculative_fp32, outcome.tok_s_plain_fp32),
        "outputs equal in fp32": f"{outcome.identical} of {outcome.prompts_fp32}",
        "outputs that differ in bf16, at a tie": f"{outcome.ties} of {outcome.prompts}",
        "outputs that differ without a tie": str(outcome.errors),
        "trained": f"{outcome.steps} steps, {outcome.tokens_trained:,} tokens, {outcome.tok_s_trained:,.0f} tok/s",
        "time": f"{outcome.minutes:.1f} minutes, {outcome.train_minutes:.1f} of them training",
    }
    for what, value in rows.items():
        table.add_row(what, value)
    # Wide enough for the table wherever it goes: a file has no width.
    Console(highlight=False, width=_TABLE_WIDTH).print(table)


def _speed(tok_s: float | None, plain_tok_s: float | None = None) -> str:
    if tok_s is None:
        return "not timed"
    return f"{tok_s:.1f} tok/s" + (f" ({tok_s / plain_tok_s:.2f} x)" if plain_tok_s else "")
