"""Cross-entropy of hidden rows against a frozen head, without ever holding all logits.

Owns the one pass over the vocabulary. The head is frozen, so the only gradient wanted is that of the hidden rows,
(softmax(z) - onehot(y)) W, and softmax(z) is at hand the moment the loss is: two matrix products in all, where
recomputing logits in the backward pass takes three and keeping them takes R x V memory. The price is a gradient [R, E]
kept for the backward pass, which only multiplies it by the row's incoming weight.

Logits exist one tile at a time, tall and narrow: products are fast with many rows, and then the head is read once.

```
             V in tiles of v columns
           +-----+-----+-----+--
    R rows |  z  |     |     |      p = softmax of the tile's logits z, l = their log sum exp, all in one buffer [r, v]
    (r at  |     |     |     |      L <- log(exp L + exp l)
    a time)|     |     |     |      G <- G exp(L_before - L) + (p W_tile) exp(l - L)
           +-----+-----+-----+--
```

After the last tile L is the row's log sum exp and G is softmax(z) W. The label's own share is left out of p and added
at the end as expm1(-loss) W[label]: once a row is nearly right, 1 - p taken after rounding p to 8 bits would be noise.

Matrix products run in the head's dtype; everything between them is fp32.

Shapes: R rows, r rows at a time, E hidden, V vocab (or candidates out of it), v columns of a tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["DEFAULT_CHUNK_ROWS", "HeadRows", "fill_logits", "linear_cross_entropy"]

# Room for 128 x 49,152 logits is 24 MB in fp32; larger tiles fall out of a CPU's last cache.
DEFAULT_CHUNK_ROWS = 128
# Narrower tiles spend their time between products; taller ones than this leaves room for gain nothing.
MIN_TILE_COLUMNS = 1024


@dataclass(frozen=True)
class HeadRows:
    """The rows of a head that take part in the partition sum, and how their products become logits.

    logit = cap(scale * (weight . hidden + bias)) + log_importance

    Attributes:
        weight_VE: Rows of the head; their dtype is that of the matrix products.
        bias_V: The head's own bias, or None.
        scale: Factor on the logits.
        softcap: cap(z) = softcap * tanh(z / softcap); 0 caps nothing.
        log_importance_V: How many rows of the whole head each row stands for, as a logarithm, fp32; None for one each.
    """

    weight_VE: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    log_importance_V: Tensor | None = None

    def part(self, rows: slice) -> HeadRows:
        """Return some of these rows; shares memory."""
        bias, importance = (None if v is None else v[rows] for v in (self.bias_V, self.log_importance_V))
        return HeadRows(self.weight_VE[rows], bias, self.scale, self.softcap, importance)


def linear_cross_entropy(
    hidden_RE: Tensor, head: HeadRows, label_R: Tensor, *, chunk_rows: int = DEFAULT_CHUNK_ROWS
) -> tuple[Tensor, Tensor]:
    """Return each row's cross-entropy and whether no logit is larger than its label's.

    Args:
        hidden_RE: Final hidden rows, any float dtype.
        head: The frozen head.
        label_R: Index of each row's label among the head's rows, int64.
        chunk_rows: As many logits are held at once as these rows have.

    Returns:
        Losses, fp32 [R] (fp64 for an fp64 head) with a graph to `hidden_RE`, and correctness, bool [R].
    """
    result: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(hidden_RE, head, label_R, chunk_rows)  # type: ignore[no-untyped-call]
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RE: Tensor, head: HeadRows, label_R: Tensor, chunk_rows: int) -> tuple[Tensor, Tensor]:
        rows, weight = hidden_RE.shape[0], head.weight_VE
        accurate = torch.promote_types(weight.dtype, torch.float32)
        at_once, columns = _tile_shape(rows, weight.shape[0], chunk_rows)
        buffer = torch.empty(at_once * columns, dtype=accurate, device=weight.device)
        tiles = [head.part(slice(start, start + columns)) for start in range(0, weight.shape[0], columns)]
        loss_R = torch.empty(rows, dtype=accurate, device=weight.device)
        correct_R = torch.empty(rows, dtype=torch.bool, device=weight.device)
        grad_RE = torch.empty_like(hidden_RE) if ctx.needs_input_grad[0] else None
        with torch.autocast(hidden_RE.device.type, enabled=False):
            for start in range(0, rows, at_once):
                part = slice(start, min(start + at_once, rows))
                sums = _RowSums(label_R[part], hidden_RE[part].to(weight.dtype), accurate)
                first = 0
                for tile in tiles:
                    sums.add(tile, first, buffer, with_gradient=grad_RE is not None)
                    first += tile.weight_VE.shape[0]
                loss_R[part], correct_R[part] = sums.loss_and_correct()
                if grad_RE is not None:
                    grad_RE[part] = sums.gradient(head)
        ctx.save_for_backward(*([] if grad_RE is None else [grad_RE]))
        ctx.mark_non_differentiable(correct_R)
        return loss_R, correct_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad_R: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        (grad_RE,) = ctx.saved_tensors
        return grad_RE * loss_grad_R[:, None].to(grad_RE.dtype), None, None, None


class _RowSums:
    """What of some rows is known after the tiles so far. Log sums are less the largest logit, to keep the low bits."""

    def __init__(self, label_R: Tensor, hidden_RE: Tensor, accurate: torch.dtype) -> None:
        self._label_R, self._hidden_RE = label_R, hidden_RE
        self._log_sum_R = torch.full(label_R.shape, -math.inf, dtype=accurate, device=hidden_RE.device)
        self._largest_R = self._log_sum_R.clone()
        self._at_label_R = torch.zeros_like(self._log_sum_R)
        self._slope_R: Tensor | None = None
        self._grad_RE = torch.zeros(hidden_RE.shape, dtype=accurate, device=hidden_RE.device)

    def add(self, tile: HeadRows, first: int, buffer: Tensor, *, with_gradient: bool) -> None:
        """Count in the vocabulary's rows from `first` on; `buffer` is overwritten."""
        rows, columns = self._hidden_RE.shape[0], tile.weight_VE.shape[0]
        z_RV = buffer[: rows * columns].view(rows, columns)
        slope_RV = fill_logits(z_RV, self._hidden_RE, tile)
        column_R = self._label_R - first
        inside_R = (column_R >= 0) & (column_R < columns)
        column = column_R.clamp(0, columns - 1)[:, None]
        self._at_label_R = torch.where(inside_R, z_RV.gather(1, column)[:, 0], self._at_label_R)
        tile_largest_R = z_RV.amax(1)
        # The sum is read off the largest probability, 1 / sum(exp(z - max z)), which is at least 1 / v: it neither
        # under- nor overflows, and `logsumexp`'s second buffer is not needed.
        torch.softmax(z_RV, 1, out=z_RV)
        tile_log_sum_R = -z_RV.amax(1).log()
        largest_R = torch.maximum(self._largest_R, tile_largest_R)
        before_R = self._log_sum_R + (self._largest_R - largest_R)
        tile_R = tile_log_sum_R + (tile_largest_R - largest_R)
        self._largest_R, self._log_sum_R = largest_R, torch.logaddexp(before_R, tile_R)
        if not with_gradient:
            return
        if slope_RV is not None:
            z_RV *= slope_RV
            slope_R = slope_RV.gather(1, column)[:, 0]
            self._slope_R = slope_R if self._slope_R is None else torch.where(inside_R, slope_R, self._slope_R)
        z_RV.scatter_(1, column, z_RV.gather(1, column).masked_fill(inside_R[:, None], 0.0))
        product_RE = torch.empty_like(self._grad_RE)
        _multiply_into(product_RE, z_RV.to(tile.weight_VE.dtype), tile.weight_VE)
        self._grad_RE *= (before_R - self._log_sum_R).exp()[:, None]
        self._grad_RE.addcmul_(product_RE, (tile_R - self._log_sum_R).exp()[:, None])

    def loss_and_correct(self) -> tuple[Tensor, Tensor]:
        """Return each row's cross-entropy and correctness, after the last tile."""
        return (self._largest_R - self._at_label_R) + self._log_sum_R, self._at_label_R >= self._largest_R

    def gradient(self, head: HeadRows) -> Tensor:
        """Return the gradient of each row's cross-entropy, [R, E], after the last tile."""
        share_R = torch.expm1(-self.loss_and_correct()[0])
        if self._slope_R is not None:
            share_R = share_R * self._slope_R
        grad_RE = self._grad_RE.addcmul_(head.weight_VE[self._label_R].to(share_R.dtype), share_R[:, None])
        return grad_RE * head.scale if head.scale != 1.0 else grad_RE


def _tile_shape(rows: int, vocab: int, chunk_rows: int) -> tuple[int, int]:
    """Return rows and columns of a tile: as tall as it can be in room for `chunk_rows` rows of the vocabulary."""
    room = min(chunk_rows, max(rows, 1)) * vocab
    at_once = max(1, min(rows, room // min(MIN_TILE_COLUMNS, vocab)))
    columns = min(vocab, room // at_once)
    # Products like whole vectors.
    return at_once, columns - columns % 64 if 64 <= columns < vocab else columns


def fill_logits(z_RV: Tensor, hidden_RE: Tensor, head: HeadRows) -> Tensor | None:
    """Write the logits of `hidden_RE` into `z_RV`; return the slope of the cap where there is one."""
    _multiply_into(z_RV, hidden_RE, head.weight_VE.t())
    if head.bias_V is not None:
        z_RV += head.bias_V
    if head.scale != 1.0:
        z_RV *= head.scale
    cap_slope = None
    if head.softcap > 0.0:
        z_RV.div_(head.softcap).tanh_()
        cap_slope = 1.0 - z_RV.square()
        z_RV *= head.softcap
    if head.log_importance_V is not None:
        z_RV += head.log_importance_V
    return cap_slope


def _multiply_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write left @ right to `out`. It may be of a wider type than they are; on CUDA the sums then come unrounded."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    elif out.is_cuda and out.dtype == torch.float32:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        out.copy_(left @ right)
