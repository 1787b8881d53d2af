"""Divergences between the drafter's and the target's next-token distributions, without ever holding all logits.

Owns the distillation losses. Like `linear_cross_entropy` it makes each chunk's logits once, target's and drafter's from
one frozen head, and keeps the gradient of the drafter's rows instead of the logits.

With p the target's distribution, q the drafter's and alpha = sum min(p, q) the chance that a drafted token is accepted:

    kl      sum p (log p - log q)
    tv      1 - alpha = sum |p - q| / 2
    lk      w kl + (1 - w) tv with w = exp(-3 alpha), detached: KL while they are far apart, where TV's gradient is
            weak, and TV, which is what acceptance counts, once they are near (LK losses, arXiv 2602.23881)

Near convergence q - p is a difference of nearly equal numbers, and so are the logits behind them: taken in bf16 it is
noise (a gradient 19 to 31 % wrong was seen elsewhere). Here the *difference* of the rows goes through the head, so that
its logits d carry bf16's relative error and not that of the logits themselves, and q - p = p (exp(u) - 1) with
u = d - log sum p exp(d), in fp32. A head with a cap is not linear: there the capped logits are subtracted.

Shapes: R rows, E hidden, V vocab.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafter_trainer.linear_cross_entropy import DEFAULT_CHUNK_ROWS, HeadRows, fill_logits

__all__ = ["Divergence", "linear_distillation"]

Divergence = Literal["kl", "tv", "lk"]

# Published value of the hybrid's rate.
LK_RATE = 3.0


def linear_distillation(
    hidden_RE: Tensor,
    target_RE: Tensor,
    head: HeadRows,
    *,
    divergence: Divergence,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> tuple[Tensor, Tensor]:
    """Return each row's divergence and acceptance chance.

    Args:
        hidden_RE: The drafter's final rows; row i predicts what follows the target's row i.
        target_RE: The target's own final rows, after its final norm; no gradient.
        head: The frozen head, for both.
        divergence: Which one.
        chunk_rows: Rows whose logits are held at once, twice.

    Returns:
        Losses, fp32 [R] with a graph to `hidden_RE`, and alpha, fp32 [R] without one.
    """
    result: tuple[Tensor, Tensor] = _LinearDistillation.apply(hidden_RE, target_RE, head, divergence, chunk_rows)  # type: ignore[no-untyped-call]
    return result


class _LinearDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RE: Tensor, target_RE: Tensor, head: HeadRows, divergence: Divergence, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        rows, weight = hidden_RE.shape[0], head.weight_VE
        accurate = torch.promote_types(weight.dtype, torch.float32)
        buffers = [
            torch.empty(min(chunk_rows, rows), weight.shape[0], dtype=accurate, device=weight.device) for _ in range(2)
        ]
        loss_R, alpha_R = (torch.empty(rows, dtype=accurate, device=weight.device) for _ in range(2))
        grad_RE = torch.empty_like(hidden_RE)
        with torch.autocast(hidden_RE.device.type, enabled=False):
            for start in range(0, rows, chunk_rows):
                part = slice(start, min(start + chunk_rows, rows))
                t, d = (buffer[: part.stop - start] for buffer in buffers)
                cap_slope = _fill_target_and_difference(t, d, target_RE[part], hidden_RE[part], head)
                loss_R[part], alpha_R[part], slope = _divergence(t, d, divergence)
                if cap_slope is not None:
                    slope *= cap_slope
                grad_RE[part] = (slope.to(weight.dtype) @ weight) * head.scale
        ctx.save_for_backward(grad_RE)
        ctx.mark_non_differentiable(alpha_R)
        return loss_R, alpha_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad_R: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        (grad_RE,) = ctx.saved_tensors
        return grad_RE * loss_grad_R[:, None].to(grad_RE.dtype), None, None, None, None


def _fill_target_and_difference(
    t_RV: Tensor, d_RV: Tensor, target_RE: Tensor, hidden_RE: Tensor, head: HeadRows
) -> Tensor | None:
    """Write the target's logits and how far the drafter's lie from them; return the slope of the cap, if any."""
    dtype = head.weight_VE.dtype
    fill_logits(t_RV, target_RE.to(dtype), head)
    if head.softcap > 0.0:
        cap_slope = fill_logits(d_RV, hidden_RE.to(dtype), head)
        d_RV -= t_RV
        return cap_slope
    difference_RE = hidden_RE.to(d_RV.dtype) - target_RE.to(d_RV.dtype)
    return fill_logits(d_RV, difference_RE.to(dtype), replace(head, bias_V=None, log_importance_V=None))


def _divergence(t_RV: Tensor, d_RV: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss [R], alpha [R] and the loss's slope by the drafter's logits [R, V]; overwrites both inputs."""
    log_p = torch.log_softmax(t_RV, 1, out=t_RV)
    u = d_RV.sub_((log_p + d_RV).logsumexp(1, keepdim=True))
    p, q = log_p.exp(), (log_p + u).exp()
    # Where the drafter's probability is far larger, exp(u) may overflow and nothing cancels.
    difference = torch.where(u < 1, p * torch.expm1(u.clamp(max=1)), q - p)
    tv = difference.abs().sum(1) / 2
    kl = (difference - p * u).sum(1)  # sum p (exp(u) - 1 - u), as q - p sums to 0: no term is negative
    if divergence == "kl":
        return kl, 1 - tv, difference
    # d tv / d q = sign(q - p) / 2, through the softmax: q (s - sum q s).
    half_sign = difference.sign() / 2
    tv_slope = q * (half_sign - (q * half_sign).sum(1, keepdim=True))
    if divergence == "tv":
        return tv, 1 - tv, tv_slope
    w = torch.exp(-LK_RATE * (1 - tv))
    return w * kl + (1 - w) * tv, 1 - tv, w[:, None] * difference + (1 - w[:, None]) * tv_slope
