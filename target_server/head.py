"""The target's embedding, head and final norm, as a trainer needs them: what they are, and their bytes piece by piece.

Reading a piece copies just that piece to the host, so a head of gigabytes never has a second copy in host memory. It
must not decide who may read (the servicer does).
"""

from __future__ import annotations

from typing import Any

import torch
from target_wire.codec import dtype_from_torch, tensor_to_buffer
from target_wire.messages import spec_to_message
from target_wire.spec import TensorSpec
from target_wire.v1 import target_pb2

from target_server.loading import LoadedTarget

__all__ = ["HeadSource"]


class HeadSource:
    """The head of one loaded target."""

    def __init__(self, target: LoadedTarget) -> None:
        self._target = target
        self._tensors = _head_tensors(target)

    def describe(self, version: target_pb2.TargetVersion) -> target_pb2.HeadDescription:
        """Returns what the head consists of and how its parts are used."""
        config = self._target.model.config.get_text_config()
        norm = getattr(self._target.decoder, "norm", None)
        return target_pb2.HeadDescription(
            version=version,
            tensors=[
                spec_to_message(TensorSpec(name, dtype_from_torch(tensor.dtype), tuple(tensor.shape)))
                for name, tensor in self._tensors.items()
            ],
            tie_word_embeddings=self._target.description.tie_word_embeddings,
            embedding_scale=_embedding_scale(self._target.model),
            logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
            logit_scale=_logit_scale(config),
            final_norm_epsilon=float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)) or 0.0),
        )

    def read(self, tensor_index: int, offset_bytes: int, size_bytes: int) -> memoryview:
        """Returns a piece of a tensor's bytes, shorter at its end; empty past it. Blocks on a device copy."""
        tensor = list(self._tensors.values())[tensor_index]
        itemsize = tensor.element_size()
        flat = tensor.reshape(-1)[offset_bytes // itemsize : (offset_bytes + size_bytes) // itemsize]
        return tensor_to_buffer(flat.cpu())


def _head_tensors(target: LoadedTarget) -> dict[str, torch.Tensor]:
    """Returns the tensors by their names on the wire; tied weights once."""
    model: Any = target.model
    tensors = {"embed_tokens": model.get_input_embeddings().weight}
    head = model.get_output_embeddings()
    if head is not None and not target.description.tie_word_embeddings:
        tensors["lm_head"] = head.weight
    norm = getattr(target.decoder, "norm", None)
    for name, module, attribute in (("final_norm", norm, "weight"), ("lm_head_bias", head, "bias")):
        tensor = getattr(module, attribute, None)
        if tensor is not None:
            tensors[name] = tensor
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _embedding_scale(model: Any) -> float:
    """Returns the factor between a row of the table and the first block's input.

    Gemma scales inside its embedding module, by a factor rounded to the weights' type; Granite in its decoder.
    """
    embedding = model.get_input_embeddings()
    scale = getattr(embedding, "embed_scale", None)
    if isinstance(scale, torch.Tensor):
        return float(scale.to(embedding.weight.dtype))
    if scale is not None:
        return float(scale)
    return float(getattr(model.config.get_text_config(), "embedding_multiplier", None) or 1.0)


def _logit_scale(config: Any) -> float:
    """Returns the factor on the logits: Cohere multiplies by logit_scale, Granite divides by logits_scaling."""
    if getattr(config, "logits_scaling", None):
        return 1.0 / float(config.logits_scaling)
    return float(getattr(config, "logit_scale", None) or 1.0)
