"""Tensors to and from wire bytes, without pickle and without protobuf.

Row-major, little-endian, no padding. It must never touch a device (a hidden device-to-host copy would break the
ownership rules of the server) nor change a bit: NaN payloads and negative zeros survive.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from math import prod

import torch

from target_wire.spec import DType

__all__ = ["dtype_from_torch", "dtype_to_torch", "tensor_from_buffer", "tensor_to_buffer"]

if sys.byteorder != "little":
    raise ImportError("target_wire.codec: the wire is little-endian and this host is not")

_TO_TORCH = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16, DType.FLOAT32: torch.float32}
_FROM_TORCH = {torch_dtype: dtype for dtype, torch_dtype in _TO_TORCH.items()}

# torch warns, once a process, that a tensor over received bytes must not be written to. Received tensors are read-only
# by contract (see tensor_from_buffer), so the one warning is taken here rather than in the middle of a run.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def dtype_to_torch(dtype: DType) -> torch.dtype:
    """Returns torch's type for a wire type."""
    return _TO_TORCH[dtype]


def dtype_from_torch(torch_dtype: torch.dtype) -> DType:
    """Returns the wire type for torch's type.

    Raises:
        ValueError: the type does not travel.
    """
    try:
        return _FROM_TORCH[torch_dtype]
    except KeyError:
        choices = ", ".join(_TO_TORCH)
        raise ValueError(f"dtype {torch_dtype}: not a wire type; give one of {choices}") from None


def tensor_to_buffer(tensor: torch.Tensor) -> memoryview:
    """Returns a tensor's bytes as a flat view.

    Args:
        tensor: on the CPU, of a wire dtype, of any shape.

    Returns:
        A view of the tensor's own memory when it is contiguous, else of a copy. The view keeps the memory alive;
        while it is in use the tensor must not be written to.

    Raises:
        ValueError: another device or dtype.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"device {tensor.device}: copy the tensor to the CPU first")
    dtype_from_torch(tensor.dtype)
    if tensor.numel() < 2:
        # Counts as contiguous whatever its strides, which `view` below does not forgive.
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_from_buffer(buffer: bytes | bytearray | memoryview, dtype: DType, shape: Sequence[int]) -> torch.Tensor:
    """Returns a tensor over received bytes, without a copy.

    Args:
        buffer: exactly the tensor's bytes.
        dtype: element type.
        shape: sizes, outermost first.

    Returns:
        A tensor that shares the buffer's memory and keeps it alive. Where the buffer is read-only (bytes), writing to
        the tensor is undefined behaviour: clone it first.

    Raises:
        ValueError: the buffer's length is not the tensor's.
    """
    view = memoryview(buffer)
    expected = prod(shape) * dtype.itemsize
    if view.nbytes != expected:
        raise ValueError(f"buffer of {view.nbytes} bytes: shape {list(shape)} of {dtype} needs {expected}")
    torch_dtype = dtype_to_torch(dtype)
    if expected == 0:
        return torch.empty(tuple(shape), dtype=torch_dtype)
    return torch.frombuffer(view, dtype=torch_dtype).view(tuple(shape))
