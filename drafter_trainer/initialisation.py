"""The drafter's first weights.

Owns the draw. Published trainers draw every matrix with deviation 0.02 and set every gain to 1. On SmolLM2 the first
loss is then above 50 where ln V is 10.8, and a hundred steps go by before it takes off: the layers add so little to the
mask token's embedding that the final row still points along it, at a full gain, and a tied head answers "mask". Here

- a matrix is drawn with deviation fan_in^-1/2, so that each projection keeps its input's size and what the layers
  compute from the context outweighs the embedding;
- the final norm's gain is the largest at which the head is still nearly indifferent to what comes out.

Starting the projections back into the residual stream (o_proj, down_proj) at 0 instead leaves the mask row alone in the
stream: the loss on real answers then starts at 14.6 even at the indifferent gain, a gain so small that it throttles
what follows.

Shapes: A anchors, K block, Q = A*K block tokens, R rows, C taps * D, E hidden, V vocab.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter_trainer.attention import BlockLayout
from drafter_trainer.head import TargetHead

if TYPE_CHECKING:
    from drafter_trainer.model import Drafter

__all__ = ["draw_weights", "indifferent_gain"]


@torch.no_grad()
def draw_weights(drafter: Drafter, head: TargetHead, generator: torch.Generator) -> None:
    """Overwrite all weights of `drafter`.

    Args:
        drafter: Any weights.
        head: The frozen head; decides the final norm's gain.
        generator: On the CPU, whatever the drafter's device, so that a seed means the same weights everywhere.
    """
    for weight in drafter.parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
    drafter.norm.weight.fill_(indifferent_gain(head, _probe(drafter, head, generator)))


def indifferent_gain(head: TargetHead, rows_RE: Tensor) -> float:
    """Return the largest gain up to 1 at which `head` is nearly indifferent to `rows_RE`.

    That is: its loss over labels uniform in the vocabulary, log sum exp z - mean z, exceeds ln V by at most 1.5 %. Real
    labels are frequent tokens, whose head rows resemble each other, and share the luck of the draw: on SmolLM2 their
    first loss is 4 to 15 % above ln V by seed and depth, 8 % in the mean of nine. Gains of 0.2 and 0.41 learn alike
    there in the first 40 steps, with a small edge for the larger; 0.064 is at 6.9 after 60 steps where 0.41 is at 5.8.
    """
    rows_RE = rows_RE.to(head.device, torch.float32)
    limit = 1.015 * math.log(head.vocab_size)
    low, high = 1e-4, 1.0
    for _ in range(12):  # to 0.3 %
        middle = (low * high) ** 0.5
        logits_RV = head.logits(rows_RE * middle).float()
        loss = float((logits_RV.logsumexp(-1) - logits_RV.mean(-1)).mean())
        low, high = (middle, high) if loss <= limit else (low, middle)
    return low


def _probe(drafter: Drafter, head: TargetHead, generator: torch.Generator) -> Tensor:
    """Return final rows of mask slots over random context and anchors, [8, E].

    Random states serve: `hidden_norm` takes their size away, and their direction is random to new weights anyway.
    """
    config, device = drafter.config, drafter.fc.weight.device
    context_TC = torch.randn(32, drafter.fc.weight.shape[1], generator=generator)
    anchors = torch.randint(0, config.vocab_size, (4, 1), generator=generator)
    ids_AK = F.pad(anchors, (0, config.block_size - 1), value=config.mask_token_id)
    layout = BlockLayout((32,), torch.zeros(4).long(), torch.tensor([4, 12, 20, 31]), config.block_size)
    embeds_QE = head.embed(ids_AK.flatten().to(head.device)).to(device, drafter.fc.weight.dtype)
    hidden_QE: Tensor = drafter(embeds_QE, context_TC.to(device), layout=layout)
    return torch.unflatten(hidden_QE, 0, (4, config.block_size))[:, [1, -1]].flatten(0, 1)
