"""What the verbs with settings share: reading them, and the checks that need nothing but them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from drafter_trainer.config import TrainerConfig, resolve_config
from drafter_trainer.errors import UserError
from drafter_trainer.logging_setup import setup_logging
from drafter_trainer.plan import Plan, PlanSettings

__all__ = ["plan_settings", "read_settings", "require"]


_REMEDIES = {
    "target.addresses": "give the server's HOST:PORT",
    "run.dir": "give a directory for checkpoints and metrics",
    "data.path": "give JSON Lines of conversations, or a directory that `prepare` wrote",
    "evaluate.target_model": "give the target's local directory",
    "evaluate.prompts": "give JSON Lines of held-out prompts",
}


def read_settings(options: argparse.Namespace, flags: Sequence[str]) -> TrainerConfig | None:
    """The settings in force; None where they were only to be printed, which is done then."""
    setup_logging(verbose=options.verbose)
    resolved = resolve_config(file=options.config, flags=flags)
    if options.print_config:
        print(resolved.as_yaml(), end="")
        return None
    return resolved.config


def require(config: TrainerConfig, *names: str) -> None:
    """Refuses settings a verb can't do without.

    Raises:
        UserError: The first one that isn't set.
    """
    for name in names:
        section, _, field = name.partition(".")
        if getattr(getattr(config, section), field) in (None, ()):
            raise UserError(name, None, f"needed here; {_REMEDIES[name]}")


def plan_settings(config: TrainerConfig) -> PlanSettings:
    """What decides the order."""
    return PlanSettings(
        seed=config.run.seed,
        max_tokens=config.batch.max_tokens,
        max_sequences=config.batch.max_sequences,
        shuffle_window_samples=config.batch.shuffle_window_samples,
    )


def total_steps(config: TrainerConfig, plan: Plan, *, num_ranks: int) -> int:
    """Optimizer steps of the whole run."""
    if config.run.steps is not None:
        return config.run.steps
    assert config.epochs is not None, "without steps there are epochs"
    return plan.steps_in(config.epochs, micro_batches_per_step=num_ranks * config.batch.accumulation)
