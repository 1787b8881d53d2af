"""Settings of the trainer: `schema` says what they are, `resolve` where each value comes from."""

from __future__ import annotations

from drafter_trainer.config.resolve import ResolvedConfig, resolve_config, setting_lines
from drafter_trainer.config.schema import (
    AnchorsSection,
    BatchSection,
    DataSection,
    DrafterSection,
    EvaluateSection,
    LossSection,
    OptimSection,
    RunSection,
    TargetSection,
    TrainerConfig,
    default_gamma,
)

__all__ = [
    "AnchorsSection",
    "BatchSection",
    "DataSection",
    "DrafterSection",
    "EvaluateSection",
    "LossSection",
    "OptimSection",
    "ResolvedConfig",
    "RunSection",
    "TargetSection",
    "TrainerConfig",
    "default_gamma",
    "resolve_config",
    "setting_lines",
]
