"""The frozen ends of the target: embedding table, lm_head and final norm of one target version.

Owns how token ids become embeddings and hidden rows become logits, the way the target's own code does it. It is not an
`nn.Module`: nothing here may ever reach an optimizer, a checkpoint or an export.

Shapes: V vocab, D target hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from drafter_trainer.types import Version

__all__ = ["TargetHead", "final_norm_offset"]


class TargetHead:
    """Embedding, lm_head and final norm of one target version, frozen.

    Attributes:
        embed_tokens_VD: The raw embedding table.
        lm_head_weight_VD: The head; the same tensor as the table when the target ties them.
        lm_head_bias_V: The head's bias, or None.
        final_norm_D: Gain of the target's final norm as stored, or None where it has none.
        final_norm_offset: What is added to that gain; 1 where the target stores it as a distance from 1.
        embedding_scale, logit_scale, logit_softcap: See `embed` and `logits`.
        version: The target version these belong to.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        tied: bool,
        embedding_scale: float = 1.0,
        logit_softcap: float = 0.0,
        logit_scale: float = 1.0,
        final_norm_epsilon: float = 1e-6,
        final_norm_offset: float = 0.0,
        version: Version | None = None,
    ) -> None:
        """Take the tensors as the target serves them.

        Args:
            tensors: "embed_tokens" [V, D]; "lm_head" [V, D] unless tied; "final_norm" [D] and "lm_head_bias" [V] where
                the target has them.
            tied: Whether the head is the embedding table.
            embedding_scale: Factor on embedding rows (Gemma).
            logit_softcap: Cap of the logits; 0 caps nothing.
            logit_scale: Factor on the logits, before the cap.
            final_norm_epsilon: Epsilon of the final norm.
            final_norm_offset: See the attribute, and `final_norm_offset`.
            version: Which target version the tensors belong to.

        Raises:
            ValueError: A tensor is missing or has the wrong shape.
        """
        self.embed_tokens_VD = _frozen(tensors, "embed_tokens")
        self.lm_head_weight_VD = self.embed_tokens_VD if tied else _frozen(tensors, "lm_head")
        self.lm_head_bias_V = _frozen(tensors, "lm_head_bias") if "lm_head_bias" in tensors else None
        self.final_norm_D = _frozen(tensors, "final_norm") if "final_norm" in tensors else None
        if self.lm_head_weight_VD.shape != self.embed_tokens_VD.shape:
            raise ValueError(
                f"lm_head is {tuple(self.lm_head_weight_VD.shape)}, embed_tokens {tuple(self.embed_tokens_VD.shape)}"
            )
        self.tied = tied
        self.embedding_scale = float(embedding_scale)
        self.logit_softcap = float(logit_softcap)
        self.logit_scale = float(logit_scale)
        self.final_norm_epsilon = float(final_norm_epsilon)
        self.final_norm_offset = float(final_norm_offset)
        self.version = version

    @classmethod
    def from_model(cls, model: Any, *, version: Version | None = None) -> TargetHead:
        """Read the head of a transformers causal LM in this process; shares its memory."""
        config = model.config.get_text_config()
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        final_norm = getattr(getattr(model.get_decoder(), "norm", None), "weight", None)
        tensors = {"embed_tokens": embedding.weight}
        tied = output is None or output.weight is embedding.weight
        if output is not None and not tied:
            tensors["lm_head"] = output.weight
        if output is not None and getattr(output, "bias", None) is not None:
            tensors["lm_head_bias"] = output.bias
        if final_norm is not None:
            tensors["final_norm"] = final_norm
        return cls(
            tensors,
            tied=tied,
            embedding_scale=float(getattr(embedding, "embed_scale", 1.0)),
            logit_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
            logit_scale=getattr(config, "logit_scale", None) or 1.0,
            final_norm_epsilon=getattr(config, "rms_norm_eps", 1e-6),
            final_norm_offset=final_norm_offset(type(model).__name__) or 0.0,
            version=version,
        )

    @property
    def vocab_size(self) -> int:
        """Rows of the table, V."""
        return self.embed_tokens_VD.shape[0]

    @property
    def hidden_size(self) -> int:
        """Width D."""
        return self.embed_tokens_VD.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.embed_tokens_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the head's weights, in which logits are computed."""
        return self.lm_head_weight_VD.dtype

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> TargetHead:
        """Return this head on `device` in `dtype`; shares memory where nothing changes."""
        names = {
            "embed_tokens": self.embed_tokens_VD,
            "lm_head": None if self.tied else self.lm_head_weight_VD,
            "lm_head_bias": self.lm_head_bias_V,
            "final_norm": self.final_norm_D,
        }
        return TargetHead(
            {name: t.to(device=device, dtype=dtype or t.dtype) for name, t in names.items() if t is not None},
            tied=self.tied,
            embedding_scale=self.embedding_scale,
            logit_softcap=self.logit_softcap,
            logit_scale=self.logit_scale,
            final_norm_epsilon=self.final_norm_epsilon,
            final_norm_offset=self.final_norm_offset,
            version=self.version,
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Embed token ids [*] as the target does: [*, D] in the table's dtype, scaled in that dtype."""
        rows = F.embedding(ids, self.embed_tokens_VD)
        if self.embedding_scale == 1.0:
            return rows
        return rows * torch.tensor(self.embedding_scale, dtype=rows.dtype, device=rows.device)

    def with_norm_offset(self, offset: float) -> TargetHead:
        """Return this head with another `final_norm_offset`; shares memory."""
        head = self.to()
        head.final_norm_offset = offset
        return head

    def normed(self, last: Tensor) -> Tensor:
        """Apply the target's final norm to outputs of its last block [*, D], in fp32; what `logits` takes.

        Raises:
            ValueError: The target sent no gain for it.
        """
        if self.final_norm_D is None:
            raise ValueError("the target's final norm has no weight")
        x = last.to(torch.float32)
        gain_D = self.final_norm_D.to(torch.float32) + self.final_norm_offset
        return F.rms_norm(x, gain_D.shape, gain_D, self.final_norm_epsilon)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [*, V] of final hidden rows [*, D], in the head's dtype."""
        weight, bias = self.lm_head_weight_VD, self.lm_head_bias_V
        logits = F.linear(hidden.to(weight.dtype), weight, bias)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap > 0.0:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits


def final_norm_offset(architecture: str) -> float | None:
    """Return what a target adds to the stored gain of its final RMSNorm; None for a target not known to have one.

    Args:
        architecture: Class of the target's model, such as "Qwen3ForCausalLM".
    """
    for offset, families in _RMS_NORM_FAMILIES.items():
        if architecture.startswith(families):
            return offset
    return None


# More specific names first: Qwen3Next and Qwen3_5 store distances from 1, Qwen3 does not.
_RMS_NORM_FAMILIES = {
    1.0: ("Gemma", "Qwen3Next", "Qwen3_5", "RecurrentGemma"),
    0.0: ("Llama", "Mistral", "Mixtral", "Ministral", "Qwen2", "Qwen3", "GptOss", "Phi3", "Granite", "SmolLM3"),
}


def _frozen(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"the target's head has no tensor {name!r} (got {', '.join(sorted(tensors))})")
    return tensors[name].detach()
