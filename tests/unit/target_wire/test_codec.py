from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from target_wire.codec import dtype_from_torch, dtype_to_torch, tensor_from_buffer, tensor_to_buffer
from target_wire.spec import DType

# Any bit pattern is a value that must survive: NaNs with payloads, subnormals, both zeros, infinities.
BITS = {DType.BFLOAT16: np.int16, DType.FLOAT16: np.int16, DType.FLOAT32: np.int32}
SHAPES = st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DType))
    bits = draw(st_numpy.arrays(BITS[dtype], draw(SHAPES)))
    return torch.from_numpy(np.array(bits)).view(dtype_to_torch(dtype))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert torch.equal(bits_of(left), bits_of(right))


def round_trip(tensor: torch.Tensor) -> torch.Tensor:
    received = bytes(tensor_to_buffer(tensor))
    return tensor_from_buffer(received, dtype_from_torch(tensor.dtype), tensor.shape)


@given(tensors())
def test_round_trip_keeps_every_bit(tensor: torch.Tensor) -> None:
    assert_same_bits(round_trip(tensor), tensor)


@given(tensors().filter(lambda tensor: tensor.dim() >= 2), st.data())
def test_round_trip_of_a_strided_view_is_row_major(tensor: torch.Tensor, data: st.DataObject) -> None:
    permuted = tensor.permute(data.draw(st.permutations(range(tensor.dim()))))
    view = permuted[:: data.draw(st.integers(1, 3))]
    assert_same_bits(round_trip(view), view)


@pytest.mark.parametrize("view", [slice(5, None, 7), slice(5, 6, 7), slice(12, None, 3), slice(None, None, 2)])
def test_round_trip_of_a_few_elements_with_odd_strides(view: slice) -> None:
    tensor = torch.arange(12).to(torch.bfloat16)[view]
    assert_same_bits(round_trip(tensor), tensor)
    assert_same_bits(round_trip(tensor[:, None]), tensor[:, None])


def test_nan_payload_survives() -> None:
    payloads = torch.tensor([0x7FC1, 0x7F81, 0xFFFF - (1 << 16)], dtype=torch.int16).view(torch.bfloat16)
    assert torch.isnan(payloads).all()
    assert_same_bits(round_trip(payloads), payloads)


def test_bytes_are_little_endian_rows() -> None:
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    assert tensor_to_buffer(tensor).hex(" ", 2) == "803f 0040 4040 8040"


def test_buffer_of_a_contiguous_tensor_is_its_own_memory() -> None:
    tensor = torch.zeros(4, dtype=torch.float32)
    view = tensor_to_buffer(tensor[1:])
    tensor[1] = 1.0
    assert view[:4] == b"\0\0\x80\x3f"


def test_buffer_keeps_the_memory_alive() -> None:
    view = tensor_to_buffer(torch.full((1 << 20,), 2.0))
    torch.full((1 << 20,), 3.0)
    assert bytes(view[:4]) == b"\0\0\0\x40"


def test_buffer_of_a_tensor_that_requires_grad() -> None:
    assert len(tensor_to_buffer(torch.ones(3, requires_grad=True))) == 12


def test_tensor_shares_the_buffer() -> None:
    buffer = bytearray(8)
    tensor = tensor_from_buffer(buffer, DType.FLOAT32, (2,))
    buffer[3] = 0x40
    assert tensor[0].item() == 2.0


def test_tensor_at_an_odd_offset_of_a_message() -> None:
    message = memoryview(b"\x22\x07\x82" + bytes(tensor_to_buffer(torch.arange(6, dtype=torch.float32))))[3:]
    assert tensor_from_buffer(message, DType.FLOAT32, (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(("size", "shape"), [(7, (2, 2)), (9, (2, 2)), (0, (1,)), (8, (0,))])
def test_buffer_of_another_length_is_refused(size: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"buffer of {size} bytes: shape"):
        tensor_from_buffer(bytes(size), DType.BFLOAT16, shape)


@pytest.mark.parametrize("torch_dtype", [torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_other_types_do_not_travel(torch_dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="not a wire type; give one of bfloat16, float16, float32"):
        tensor_to_buffer(torch.zeros(2).to(torch_dtype))


def test_a_tensor_on_another_device_is_not_copied_silently() -> None:
    with pytest.raises(ValueError, match="device meta: copy the tensor to the CPU first"):
        tensor_to_buffer(torch.empty(2, device="meta"))
