"""Between the contract's messages and the plain types of `spec`, without torch.

It must stay a translation: no defaults, no checks beyond those of the types themselves.
"""

from __future__ import annotations

from target_wire.spec import DType, TensorSpec
from target_wire.v1 import target_pb2

__all__ = ["spec_from_message", "spec_to_message"]


def spec_to_message(spec: TensorSpec) -> target_pb2.TensorSpec:
    """Returns the message that describes a tensor."""
    return target_pb2.TensorSpec(name=spec.name, dtype=target_pb2.Dtype.ValueType(spec.dtype.number), shape=spec.shape)


def spec_from_message(message: target_pb2.TensorSpec) -> TensorSpec:
    """Returns a tensor's description.

    Raises:
        ValueError: the dtype is not set or unknown, or a size is below 1.
    """
    return TensorSpec(message.name, DType.from_number(message.dtype), tuple(message.shape))
