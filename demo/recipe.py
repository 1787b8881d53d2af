"""The two demos as values: which target, which data, how much work, what is evaluated.

Owns every path and constant in which `python -m demo` and `python -m demo --tiny` differ. Hyper-parameters are not here
but in configs/, where any other run could use them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CHECKOUT", "Evaluation", "Prepared", "Recipe", "smollm2_recipe", "tiny_recipe"]

CHECKOUT = Path(__file__).resolve().parent.parent
_DATA = Path(__file__).resolve().parent / "data"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """What a demo trains and evaluates with."""

    target: Path
    """Hugging Face directory."""
    training: Path
    """Conversations with the target's own answers, JSON Lines."""
    held_out: Path
    """Prompts, JSON Lines."""


@dataclass(frozen=True)
class Evaluation:
    """How much is decoded in one element type."""

    num_prompts: int
    """Prompts from the start of the held-out file."""
    max_new_tokens: int
    """Tokens of an answer at most."""
    speed_prompts: int
    """How many of the prompts are timed, with and without the drafter."""


@dataclass(frozen=True)
class Recipe:
    """One demo."""

    name: str
    """As in the names of its files under configs/."""
    title: str
    """For people."""
    prepare: Callable[[Path, Say], Prepared]
    """(cache directory, line printer) -> the files; makes what is missing."""
    bf16_evaluation: Evaluation
    """In bf16, as models are served: acceptance, ties and speed are of this one."""
    fp32_evaluation: Evaluation
    """In fp32: whether every output is plain greedy decoding's."""
    threads: int | None
    """Threads of each program; None: one a core. Server and trainer take turns in waiting, so each can use all."""
    conversations_per_step: float | None
    """How many conversations are trained on, by the number of steps; None: all there are. A conversation's first visit
    costs the target's forward, later ones are free: where few steps fit, fewer conversations come round oftener."""
    default_steps: int | None
    """Training steps when neither steps nor minutes are given; None: as many as fit the usual time."""
    step_gflop: float
    """Matrix-product work of a training step, target's forward included, in giga floating-point operations."""
    step_overhead_s: float
    """What a step takes besides, in seconds."""
    evaluation_gflop: float
    """Work of both evaluations, in giga floating-point operations as `machine` measures them."""
    reserved_s: float
    """What starting the programs, loading models three times, exporting, and the part of decoding that is no product
    take, in seconds."""

    @property
    def evaluations(self) -> dict[str, Evaluation]:
        """By element type."""
        return {"bf16": self.bf16_evaluation, "fp32": self.fp32_evaluation}

    @property
    def server_config(self) -> Path:
        """Settings of target-server."""
        return CHECKOUT / "configs" / "server" / f"demo-{self.name}.yaml"

    @property
    def trainer_config(self) -> Path:
        """Settings of drafter-trainer."""
        return CHECKOUT / "configs" / "trainer" / f"demo-{self.name}.yaml"


def smollm2_recipe(num_prompts: int) -> Recipe:
    """The demo on a real model."""
    return Recipe(
        name="smollm2",
        title="SmolLM2-135M-Instruct, 770 conversations with its own answers",
        prepare=_prepare_smollm2,
        bf16_evaluation=Evaluation(num_prompts, max_new_tokens=24, speed_prompts=14),
        fp32_evaluation=Evaluation(num_prompts, max_new_tokens=24, speed_prompts=7),
        threads=None,
        conversations_per_step=0.45,
        default_steps=None,
        step_gflop=54.0,
        step_overhead_s=0.05,
        evaluation_gflop=1_000.0,
        reserved_s=340.0,
    )


def tiny_recipe(num_prompts: int) -> Recipe:
    """The same path with a target that can only count."""
    return Recipe(
        name="tiny",
        title="a tiny target that can count",
        prepare=_prepare_tiny,
        bf16_evaluation=Evaluation(num_prompts, max_new_tokens=24, speed_prompts=8),
        fp32_evaluation=Evaluation(num_prompts, max_new_tokens=24, speed_prompts=0),
        threads=1,  # products this small are not worth waking a second thread for
        conversations_per_step=None,
        default_steps=120,
        step_gflop=0.0,
        step_overhead_s=0.05,
        evaluation_gflop=0.0,
        reserved_s=45.0,
    )


def _prepare_smollm2(cache: Path, say: Say) -> Prepared:
    from demo.smollm2 import ensure_smollm2  # noqa: PLC0415  # each demo imports only its own target's needs

    return Prepared(
        target=ensure_smollm2(cache, say=say),
        training=_DATA / "smollm2-answers.jsonl",
        held_out=_DATA / "held-out-prompts.jsonl",
    )


def _prepare_tiny(cache: Path, say: Say) -> Prepared:
    from demo.tiny import ensure_tiny_target  # noqa: PLC0415  # imports torch and transformers: seconds

    directory = ensure_tiny_target(cache / "tiny", say=say)
    return Prepared(directory / "target", directory / "train.jsonl", directory / "held-out.jsonl")
