"""What must not change in a target while a run goes on, and how a change is told, field by field.

Weights may change (a swap, or a server started again with another checkpoint); what the drafter was built for may not.
No torch, no grpc; the receiver imports this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from target_wire.v1 import target_pb2 as pb

# Fields of `TargetModel` that decide the drafter's shape, or what its tokens and features mean.
_MODEL_FIELDS = ("architecture", "model_type", "hidden_size", "layer_count", "vocab_size", "tokenizer_digest")
# A checkpoint without a tokenizer beside it says nothing against the one before.
_MAY_BE_UNSAID = frozenset({"tokenizer_digest"})
# Limits of the server that may grow, but not fall below what the run needs.
_LIMITS = {"max_batch_token_count": "max_batch_tokens", "max_sequence_token_count": "max_sequence_tokens"}

Shape = dict[str, Any]


def shape_of(description: pb.DescribeTargetResponse, *, max_batch_tokens: int, max_sequence_tokens: int) -> Shape:
    """The shape of the target that a run begins with, and what the run asks of its server, as JSON values."""
    return {
        **_facts(description),
        "max_batch_tokens": max_batch_tokens,
        "max_sequence_tokens": max_sequence_tokens,
    }


def shape_difference(shape: Mapping[str, Any], description: pb.DescribeTargetResponse) -> str:
    """What a described target has otherwise: "FIELD was A, is B; ..."; empty when a run can go on with it."""
    found = _facts(description)
    changed = [
        f"{name} was {shape[name]!r}, is {value!r}"
        for name, value in found.items()
        if value != shape[name] and not (name in _MAY_BE_UNSAID and "" in (value, shape[name]))
    ]
    for field, needed in _LIMITS.items():
        limit = getattr(description, field)
        if limit < shape[needed]:
            changed.append(f"{field} is {limit}, this run needs {shape[needed]}")
    return "; ".join(changed)


def _facts(description: pb.DescribeTargetResponse) -> Shape:
    model = description.model
    return {
        **{name: getattr(model, name) for name in _MODEL_FIELDS},
        "dtype": pb.Dtype.Name(model.dtype).removeprefix("DTYPE_").lower(),
        "protocol_version": description.protocol_version,
    }
