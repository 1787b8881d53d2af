"""The optimizer: parameter updates, learning rate, clipping, and the guard against bad gradients.

Owns the one place where weights change. A gradient norm that is NaN or infinite changes nothing, not the weights, the
moments, the schedule or the step counter, and is counted: clipping would turn one infinity into NaN everywhere, and a
comparison with 0 lets both pass.

Parameters are fp32 and stay so; bf16 compute is autocast's job. That keeps one copy of the weights (autocast's casts
are the bf16 copy), checkpoints need no second set, and an update of 1e-3 of a weight's size is not rounded away as it
would be in bf16's 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from drafter_trainer.sharded import cut_like

__all__ = ["DrafterOptimizer", "OptimSettings", "StepResult", "build_optimizer", "schedule_factor"]

Schedule = Literal["cosine", "linear", "constant", "wsd"]
Algorithm = Literal["adamw", "muon"]


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """How the weights are updated.

    Attributes:
        algorithm: adamw for everything; or muon for matrices and adamw for norm gains.
        lr: Peak learning rate. Published: 6e-4 for AdamW. Muon's updates are scaled to the size of AdamW's, so that one
            rate serves both.
        total_steps: Optimizer steps of the run, where the schedule ends.
        betas, eps, weight_decay: AdamW's. Published: defaults, no decay.
        schedule: cosine to `final_factor`; linear to it; constant; or wsd, constant and then linear over `decay_share`.
        warmup_share: Share of the run over which the rate rises linearly from 0. Published: 0.04.
        decay_share: Share of the run that wsd decays over.
        final_factor: The rate at the end of the run as a share of the peak.
        max_grad_norm: Gradients are scaled to at most this norm; None leaves them.
        momentum: Muon's.
        muon_dtype: Element type in which Muon orthogonalises. torch's own does it in bf16; cores that emulate bf16 take
            minutes for it, and fp32 there gives the same update to bf16's rounding.
    """

    algorithm: Algorithm = "adamw"
    lr: float = 6e-4
    total_steps: int
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Schedule = "cosine"
    warmup_share: float = 0.04
    decay_share: float = 0.2
    final_factor: float = 0.0
    max_grad_norm: float | None = 1.0
    momentum: float = 0.95
    muon_dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class StepResult:
    """Outcome of one `DrafterOptimizer.step`.

    Attributes:
        grad_norm: Norm of all gradients before clipping; NaN or infinite when the step was skipped.
        lr: The rate the step was, or would have been, made with.
        skipped: Whether nothing was changed.
    """

    grad_norm: float
    lr: float
    skipped: bool


def schedule_factor(settings: OptimSettings, step: int) -> float:
    """Return the rate of step `step` (0-based) as a share of the peak.

    The first step of a warm-up has a rate above 0 and the last step of the run one above the final factor: neither is
    spent on an update of nothing.
    """
    total = max(settings.total_steps, 1)
    warmup = math.ceil(settings.warmup_share * total)
    if step < warmup:
        return (step + 1) / warmup
    if settings.schedule == "constant":
        return 1.0
    start = warmup if settings.schedule != "wsd" else max(warmup, math.ceil((1 - settings.decay_share) * total))
    progress = min(max((step - start) / max(total - start, 1), 0.0), 1.0)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1 - progress
    return settings.final_factor + (1 - settings.final_factor) * remaining


class DrafterOptimizer:
    """An optimizer with its schedule, clipping and guard.

    Attributes:
        step_count: Steps made; skipped ones don't count.
        skipped_count: Steps refused because of a non-finite gradient.
        skipped_in_a_row: Of those, since the last step made.
    """

    def __init__(
        self, parameters: list[nn.Parameter], optimizers: list[torch.optim.Optimizer], settings: OptimSettings
    ):
        self._parameters = parameters
        self._optimizers = optimizers
        self._settings = settings
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        self.step_count = self.skipped_count = self.skipped_in_a_row = 0

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._settings.lr * schedule_factor(self._settings, self.step_count)

    def step(self) -> StepResult:
        """Update the weights from their gradients, or refuse; clears the gradients either way."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients, foreach=True)
        if hasattr(norm, "full_tensor"):  # a DTensor: with sharded gradients each rank holds a part of the sum
            norm = norm.full_tensor()
        grad_norm, lr = float(norm), self.lr
        skipped = not math.isfinite(grad_norm)
        if skipped:
            self.skipped_count += 1
            self.skipped_in_a_row += 1
        else:
            self._update(norm)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        return StepResult(grad_norm=grad_norm, lr=lr, skipped=skipped)

    def _update(self, norm: Tensor) -> None:
        if self._settings.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(self._parameters, self._settings.max_grad_norm, norm, foreach=True)
        factor = schedule_factor(self._settings, self.step_count)
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            optimizer.step()
        self.step_count += 1
        self.skipped_in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs; tensors are shared, not copied."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "step_count": self.step_count,
            "skipped_count": self.skipped_count,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state made by `state_dict` with the same parameters and settings."""
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict({**saved, "state": _cut_moments(optimizer, saved["state"])})
        self.step_count = int(state["step_count"])
        self.skipped_count = int(state["skipped_count"])
        self.skipped_in_a_row = int(state["skipped_in_a_row"])


def _cut_moments(optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """This rank's part of whole moments, by the number that an optimizer gives a parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        number: {name: cut_like(value, parameters[number]) for name, value in moments.items()}
        for number, moments in state.items()
    }


class Fp32Muon(torch.optim.Muon):
    """torch's Muon with its orthogonalisation in fp32; same settings, same state.

    For cores without bf16 instructions: there torch's takes 190 s for one step of a drafter 576 wide, this one 2 s.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closures here
        """Update every parameter that has a gradient."""
        assert closure is None, "a step's gradients are there before it"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = group["momentum"]
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(average, momentum) if group["nesterov"] else average
        direction = orthogonalised(direction, group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"])
        size = 0.2 * math.sqrt(max(parameter.shape))  # "match_rms_adamw"
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"] * size)


def orthogonalised(matrix: Tensor, coefficients: Sequence[float], *, steps: int, eps: float) -> Tensor:
    """Return the matrix with its singular values pushed towards 1 by Newton and Schulz's iteration."""
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def build_optimizer(drafter: nn.Module, settings: OptimSettings) -> DrafterOptimizer:
    """Build the optimizer of all trainable parameters; norm gains are never decayed."""
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    matrices = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay}
    gains = {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}
    if settings.algorithm == "adamw":
        return DrafterOptimizer(parameters, [_adamw([matrices, gains], settings)], settings)
    kind = torch.optim.Muon if settings.muon_dtype == torch.bfloat16 else Fp32Muon
    muon = kind([matrices], lr=settings.lr, momentum=settings.momentum, adjust_lr_fn="match_rms_adamw")
    return DrafterOptimizer(parameters, [muon, _adamw([gains], settings)], settings)


def _adamw(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
