"""Linear layers on few rows: the fastest of a few equivalent forms, measured once.

Owns the forward of a frozen model's `nn.Linear` modules while decoding, where a forward has 1 to 16 rows and costs what
reading the weights costs, or a prompt's many. Must never run under autograd, and never change what is computed: every
form multiplies the same values and accumulates in float32.

The facts that force it (AVX2 without bfloat16 instructions, torch 2.13, weight 49152 x 576, one thread): `F.linear`
on 8 float32 rows takes 60 ms because the BLAS repacks the weight for each call, `mm(weight, rows.T)` 14 to 34 ms;
three rows so take longer than four. Bfloat16 costs 16 ms *a row*, while a float32 copy of the weight costs what
float32 costs. A CPU with AMX or AVX512-BF16 prefers the native form, so nothing is assumed: the forms are timed where
they run.

One choice is made per (weight shape, dtype, rows) and kept, so results of one process do not depend on timing noise
within it. Plain and block decoding share the table, so that their comparison is fair.

Shapes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Form", "LinearForms", "SkinnyLinear"]

MAX_ROWS = 16
"""Up to here every number of rows has its own choice; beyond, all have the one of `MANY_ROWS`."""
MANY_ROWS = 32
"""Stands for a prompt's worth of rows: compute-bound, where only bfloat16 without instructions for it has a choice."""
_SAMPLES = 6
"""Weights of one shape timed one after another, so that they come from memory and not from a cache."""
_REPEATS = 3
_HOPELESS = 2.0
"""A form this many times slower than the best so far is not timed again."""
_TILE_ROWS = 4
"""Rows that the BLAS's kernels take at once."""


@dataclass(frozen=True)
class Form:
    """One way of computing rows_RI @ weight_OI.T.

    Attributes:
        name: For reports.
        run: (rows [R, I], weight [O, I], bias [O] or None) -> [R, O] contiguous, in the rows' dtype.
        float32_weight: Whether `run` takes the weight's float32 copy.
    """

    name: str
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    float32_weight: bool = False


def _weight_first(rows_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    # The weight is the left operand as it lies in memory: the BLAS packs the few rows instead of it.
    if bias_O is None:
        return torch.mm(weight_OI, rows_RI.t()).t()
    return torch.addmm(bias_O[:, None], weight_OI, rows_RI.t()).t()


def _transposed(rows_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return _weight_first(rows_RI, weight_OI, bias_O).contiguous()


def _upcast_native(rows_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return F.linear(rows_RI.float(), weight_OI, None if bias_O is None else bias_O.float()).to(rows_RI.dtype)


def _upcast_transposed(rows_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    output_RO = _weight_first(rows_RI.float(), weight_OI, None if bias_O is None else bias_O.float())
    return output_RO.to(rows_RI.dtype, memory_format=torch.contiguous_format)


def _padded(rows_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    count = rows_RI.shape[0]
    wide = F.pad(rows_RI, (0, 0, 0, -count % _TILE_ROWS))
    return _transposed(wide, weight_OI, bias_O)[:count]


def _upcast_padded(rows_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    count = rows_RI.shape[0]
    wide = F.pad(rows_RI, (0, 0, 0, -count % _TILE_ROWS))
    return _upcast_transposed(wide, weight_OI, bias_O)[:count]


NATIVE = Form("native", F.linear)
_FORMS = (NATIVE, Form("transposed", _transposed), Form("padded", _padded))
_UPCAST_FORMS = (
    Form("upcast", _upcast_native, float32_weight=True),
    Form("upcast-transposed", _upcast_transposed, float32_weight=True),
    Form("upcast-padded", _upcast_padded, float32_weight=True),
)


def forms_for(dtype: torch.dtype, rows: int) -> tuple[Form, ...]:
    """Every form that applies to `rows` rows and weights of `dtype`."""
    forms = _FORMS if dtype == torch.float32 else (*_FORMS, *_UPCAST_FORMS)
    pads = rows > 1 and rows % _TILE_ROWS != 0
    return tuple(f for f in forms if pads or not f.name.endswith("padded"))


@dataclass
class LinearForms:
    """The table of choices, and the float32 copies that the chosen forms need.

    Float32 copies cost twice the memory of the bfloat16 weights they are of; they are made only for shapes where a form
    that needs them won, once per storage (a tied head and table share one).
    """

    chosen: dict[tuple[int, int, torch.dtype, int], Form] = field(default_factory=dict)
    _copies: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

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

    def weight_for(self, form: Form, weight_OI: Tensor) -> Tensor:
        """The tensor that `form` multiplies: the weight, or its float32 copy."""
        if not form.float32_weight:
            return weight_OI
        kept = self._copies.get(weight_OI.data_ptr())
        if kept is None or kept[0].shape != weight_OI.shape:
            # The original is kept beside its copy so that its address cannot come to mean another tensor.
            kept = (weight_OI, weight_OI.detach().float())
            self._copies[weight_OI.data_ptr()] = kept
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
    copies = [w.float() for w in weights] if any(f.float32_weight for f in candidates) else []
    best_s: dict[str, float] = {}
    for _ in range(_REPEATS):
        for form in candidates:
            # This thread's own time: a neighbour that takes the core away must not decide the form.
            started = time.thread_time()
            for weight_OI in copies if form.float32_weight else weights:
                form.run(rows_RI, weight_OI, None)
            seconds = time.thread_time() - started
            best_s[form.name] = min(best_s.get(form.name, seconds), seconds)
        limit_s = _HOPELESS * min(best_s.values())
        candidates = [form for form in candidates if best_s[form.name] <= limit_s]
    return min(candidates, key=lambda form: best_s[form.name])
