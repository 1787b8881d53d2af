"""Linear layers on few rows: the fastest of the equivalent forms (`linear_forms`), measured once.

Owns the forward of a frozen model's `nn.Linear` modules while decoding, where a forward has 1 to 16 rows and costs what
reading the weights costs, or a prompt's many. Must never run under autograd, and never assume which form is fast: they
are timed where they run.

One choice is made per (weight shape, dtype, rows) and kept, so results of one process do not depend on timing noise
within it. Plain and block decoding share the table, so that their comparison is fair.

Shapes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafter_trainer.linear_forms import NATIVE, Form, forms_for

__all__ = ["LinearForms", "SkinnyLinear"]

MAX_ROWS = 16
"""Up to here every number of rows has its own choice; beyond, all have the one of `MANY_ROWS`."""
MANY_ROWS = 32
"""Stands for a prompt's worth of rows: compute-bound, where only bfloat16 without instructions for it has a choice."""
_SAMPLES = 6
"""Weights of one shape timed one after another, so that they come from memory and not from a cache."""
_REPEATS = 3
_HOPELESS = 2.0
"""A form this many times slower than the best so far is not timed again."""


@dataclass
class LinearForms:
    """The table of choices, and the copies of weights that the chosen forms need.

    A packed copy costs the memory of the weight it is of, a float32 one of a bfloat16 weight twice that; they are made
    only for shapes where a form that needs them won, once per storage (a tied head and table share one).
    """

    chosen: dict[tuple[int, int, torch.dtype, int], Form] = field(default_factory=dict)
    _copies: dict[tuple[int, str], tuple[Tensor, Any]] = field(default_factory=dict)

    def form(self, weight_OI: Tensor, rows: int) -> Form:
        """Form for `rows` rows of this weight: the measured one, the native one where nothing was measured."""
        return self.chosen.get((*weight_OI.shape, weight_OI.dtype, _row_class(rows)), NATIVE)

    def measure(self, weights: Iterable[Tensor], rows: Iterable[int]) -> None:
        """Choose a form for every (shape, dtype) among `weights` at each of `rows` that has none yet.

        Weights that are not on the CPU are left alone. Takes some seconds for a model of 135 M parameters.
        """
        by_shape: dict[tuple[int, int, torch.dtype], list[Tensor]] = defaultdict(list)
        for weight_OI in weights:
            if weight_OI.device.type == "cpu":
                by_shape[*weight_OI.shape, weight_OI.dtype].append(weight_OI.detach())
        for shape, same in by_shape.items():
            for count in sorted({_row_class(count) for count in rows}):
                if (*shape, count) not in self.chosen:
                    self.chosen[*shape, count] = _fastest(same[:_SAMPLES], count)

    def weight_for(self, form: Form, weight_OI: Tensor) -> Any:
        """What `form.run` takes as its weight: the weight, or the copy that `form.prepare` made of it."""
        if form.prepare is None:
            return weight_OI
        key = (weight_OI.data_ptr(), form.prepare.__name__)
        kept = self._copies.get(key)
        if kept is None or kept[0].shape != weight_OI.shape:
            # The original is kept beside its copy so that its address cannot come to mean another tensor.
            kept = (weight_OI, form.prepare(weight_OI.detach()))
            self._copies[key] = kept
        return kept[1]

    def linear(self, rows_XI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """`F.linear(rows_XI, weight_OI, bias_O)` by the chosen form; leading dimensions are kept."""
        inputs = rows_XI.shape[-1]
        form = self.form(weight_OI, rows_XI.numel() // inputs)
        if form is NATIVE:
            return F.linear(rows_XI, weight_OI, bias_O)
        output_RO = form.run(rows_XI.reshape(-1, inputs), self.weight_for(form, weight_OI), bias_O)
        return output_RO.view(*rows_XI.shape[:-1], -1)


class SkinnyLinear:
    """Runs a frozen model's `nn.Linear` modules through a table of forms, from `install` to `remove`.

    Args:
        model: The frozen model; only plain `nn.Linear` modules on the CPU are touched.
        forms: Shared table; measured here for what it lacks.
        rows: Row counts to choose forms for; others run natively.
    """

    def __init__(self, model: nn.Module, forms: LinearForms, *, rows: Iterable[int]) -> None:
        self._linears = [m for m in model.modules() if type(m) is nn.Linear and m.weight.device.type == "cpu"]
        self._forms = forms
        with torch.inference_mode():
            forms.measure((m.weight for m in self._linears), rows)

    def install(self) -> None:
        """Replace the forwards."""
        for module in self._linears:
            module.forward = self._replacement(module)  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Put the class's own forward back; harmless when nothing is installed."""
        for module in self._linears:
            module.__dict__.pop("forward", None)

    def __enter__(self) -> SkinnyLinear:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _replacement(self, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        weight_OI, bias_O, forms = module.weight.detach(), module.bias, self._forms

        def forward(rows_XI: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                return F.linear(rows_XI, module.weight, bias_O)
            return forms.linear(rows_XI, weight_OI, bias_O)

        return forward


def _row_class(rows: int) -> int:
    """The number of rows whose choice `rows` rows take."""
    return rows if rows <= MAX_ROWS else MANY_ROWS


def _fastest(weights: list[Tensor], rows: int) -> Form:
    """Time every form over all of `weights`, interleaved, and take the one whose best pass is shortest."""
    candidates = list(forms_for(weights[0].dtype, rows))
    rows_RI = torch.randn(rows, weights[0].shape[1], dtype=torch.float32).to(weights[0].dtype)
    makers = {form.prepare for form in candidates}
    prepared = {make: weights if make is None else [make(w) for w in weights] for make in makers}
    best_s: dict[str, float] = {}
    for _ in range(_REPEATS):
        for form in candidates:
            # This thread's own time: a neighbour that takes the core away must not decide the form.
            started = time.thread_time()
            for weight in prepared[form.prepare]:
                form.run(rows_RI, weight, None)
            seconds = time.thread_time() - started
            best_s[form.name] = min(best_s.get(form.name, seconds), seconds)
        limit_s = _HOPELESS * min(best_s.values())
        candidates = [form for form in candidates if best_s[form.name] <= limit_s]
    return min(candidates, key=lambda form: best_s[form.name])
