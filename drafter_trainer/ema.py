"""An exponential moving average of the drafter's weights.

Owns a second copy of every parameter, in fp32, that follows the trained ones and is what gets evaluated and exported
where asked for. Must never feed back into training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from drafter_trainer.sharded import cut_like

__all__ = ["WeightAverage"]


class WeightAverage:
    """Follows a module's parameters.

    The decay of update n is min(decay, (1 + n) / (10 + n)), as is usual, so that the first weights, which are noise,
    are forgotten within some steps and not within 1 / (1 - decay) of them.
    """

    def __init__(self, module: nn.Module, *, decay: float) -> None:
        """Start at the module's present weights.

        Args:
            module: Its parameters must keep their names and shapes.
            decay: Share of the average that remains at an update, in [0, 1).
        """
        self._module = module
        self._decay = decay
        self._updates = 0
        self._average = {name: p.detach().float().clone() for name, p in module.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the module's weights; call after each step that was made, not after a skipped one."""
        decay = min(self._decay, (1 + self._updates) / (10 + self._updates))
        self._updates += 1
        weights = [p.detach().to(torch.float32) for p in self._module.parameters()]
        torch._foreach_lerp_(list(self._average.values()), weights, 1 - decay)

    @contextmanager
    @torch.no_grad()
    def applied(self) -> Iterator[None]:
        """Within the context the module holds the average; afterwards its own weights again, bit for bit."""
        own = {name: p.detach().clone() for name, p in self._module.named_parameters()}
        try:
            self._assign(self._average)
            yield
        finally:
            self._assign(own)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average by parameter name and, as "updates", how many there were; tensors are shared."""
        return {**self._average, "updates": torch.tensor(self._updates)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a state made by `state_dict` of a module with the same parameters."""
        for name, average in self._average.items():
            average.copy_(cut_like(state[name], average))
        self._updates = int(state["updates"])

    def _assign(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self._module.named_parameters():
            parameter.copy_(weights[name])
