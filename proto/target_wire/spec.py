"""What both ends must agree on before a byte is exchanged: protocol version, element types, tensor descriptions.

Standard library only, so that processes without torch or gRPC (the front, tools) can import it. It must never learn
about a model or a transport. The numbers are those of `v1/target.proto`; a contract test keeps the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

__all__ = ["HIDDEN_STATES", "PROTOCOL_VERSION", "DType", "TensorSpec", "row_bytes"]

# Raised only when an older peer could misread a newer one; additions to the contract do not raise it.
PROTOCOL_VERSION = 1

# Name of the one tensor of a batch.
HIDDEN_STATES = "hidden_states"


class DType(StrEnum):
    """Element type of a tensor on the wire; little-endian. The value is torch's name of the type."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def number(self) -> int:
        """Number of the enum value in the contract (never 0, which means "not set")."""
        return _NUMBER[self]

    @classmethod
    def from_number(cls, number: int) -> DType:
        """Returns the type with this enum number.

        Raises:
            ValueError: the number is 0 ("not set") or unknown to this version.
        """
        for dtype, known in _NUMBER.items():
            if known == number:
                return dtype
        choices = ", ".join(f"{known} ({dtype})" for dtype, known in _NUMBER.items())
        raise ValueError(f"dtype {number}: not a tensor element type; give one of {choices}")


_ITEMSIZE = {DType.BFLOAT16: 2, DType.FLOAT16: 2, DType.FLOAT32: 4}
_NUMBER = {DType.BFLOAT16: 1, DType.FLOAT16: 2, DType.FLOAT32: 3}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A dense row-major tensor's description.

    Attributes:
        name: unique within its message.
        dtype: element type.
        shape: sizes, outermost first, each at least 1; empty for a scalar.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuses a shape that describes no element."""
        if any(size < 1 for size in self.shape):
            raise ValueError(f"shape {list(self.shape)} of {self.name!r}: every size must be at least 1")

    @property
    def element_count(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the body."""
        return self.element_count * self.dtype.itemsize


def row_bytes(*, tap_count: int, hidden_size: int, dtype: DType) -> int:
    """Returns the bytes of one token's row: a batch costs exactly this times its tokens."""
    return tap_count * hidden_size * dtype.itemsize
