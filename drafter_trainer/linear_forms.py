"""The equivalent forms of a product of few rows and a frozen weight.

Owns how rows_RI @ weight_OI.T may be computed. Every form multiplies the same values, accumulates in float32 and rounds
once to the rows' dtype; which one is fastest depends on the machine, so `skinny` times them where they run.

The facts that force it (AVX2 without bfloat16 instructions, torch 2.13, weight 49152 x 576, two threads): `F.linear` on
4 bfloat16 rows takes 13 ms and on 1 row 4.6 ms; on a float32 copy 30 ms, because the BLAS repacks the weight for each
call, with the weight as the left operand 9.5 ms; FBGEMM's product of float32 rows and a weight packed once as float16
4.1 ms on 4 rows and 2.9 ms on 1. A CPU with AMX or AVX512-BF16 prefers the native form.

Shapes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["NATIVE", "Form", "forms_for", "packs_half"]

_TILE_ROWS = 4
"""Rows that the BLAS's kernels take at once."""
_HALF_TOP = 2.0**15
"""The largest weight of a packed matrix is scaled to between half of this and this; float16 ends at 65504."""


@dataclass(frozen=True)
class Form:
    """One way of computing rows_RI @ weight_OI.T.

    Attributes:
        name: For reports.
        run: (rows [R, I], what `prepare` made of weight [O, I], bias [O] or None) -> [R, O] contiguous, in the rows'
            dtype.
        prepare: Made once per weight; None where `run` takes the weight itself.
    """

    name: str
    run: Callable[[Tensor, Any, Tensor | None], Tensor]
    prepare: Callable[[Tensor], Any] | None = None


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


@dataclass(frozen=True)
class _PackedHalf:
    """A weight in FBGEMM's float16 layout, times `scale` (a power of two)."""

    weight: Any
    scale: float


def _pack_half(weight_OI: Tensor) -> _PackedHalf:
    # Scaled to the top of float16's range, a bfloat16 weight loses bits only below 2**-31 of the largest one, and then
    # less than 2**-39 of it: far under what accumulating in float32 rounds away.
    largest = weight_OI.abs().max().item()
    scale = 2.0 ** math.floor(math.log2(_HALF_TOP / largest)) if 0 < largest < math.inf else 1.0
    return _PackedHalf(torch.ops.quantized.linear_prepack_fp16(weight_OI.float() * scale, None), scale)


def _packed_half(rows_RI: Tensor, packed: _PackedHalf, bias_O: Tensor | None) -> Tensor:
    output_RO: Tensor = torch.ops.quantized.linear_dynamic_fp16(rows_RI.float(), packed.weight)
    output_RO.mul_(1 / packed.scale)
    return (output_RO if bias_O is None else output_RO.add_(bias_O)).to(rows_RI.dtype)


def packs_half() -> bool:
    """Whether this torch build and CPU have FBGEMM's float16 products."""
    return torch.backends.quantized.engine in ("x86", "fbgemm") and hasattr(torch.ops.quantized, "linear_dynamic_fp16")


NATIVE = Form("native", F.linear)
_FORMS = (NATIVE, Form("transposed", _transposed), Form("padded", _padded))
_HALF_WIDTH_FORMS = (
    Form("upcast", _upcast_native, Tensor.float),
    Form("upcast-transposed", _upcast_transposed, Tensor.float),
    Form("upcast-padded", _upcast_padded, Tensor.float),
)
_PACKED_FORM = Form("packed-half", _packed_half, _pack_half)


def forms_for(dtype: torch.dtype, rows: int) -> tuple[Form, ...]:
    """Every form that applies to `rows` rows and weights of `dtype`."""
    forms = _FORMS
    if dtype != torch.float32:
        forms = (*_FORMS, *_HALF_WIDTH_FORMS, *((_PACKED_FORM,) if packs_half() else ()))
    pads = rows > 1 and rows % _TILE_ROWS != 0
    return tuple(f for f in forms if pads or not f.name.endswith("padded"))
