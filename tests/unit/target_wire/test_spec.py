from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from target_wire.spec import DType, TensorSpec, row_bytes


@pytest.mark.parametrize("dtype", DType)
def test_dtype_is_found_by_its_number(dtype: DType) -> None:
    assert DType.from_number(dtype.number) is dtype
    assert DType(dtype.value) is dtype


@pytest.mark.parametrize("number", [0, -1, 4, 1 << 31])
def test_dtype_refuses_an_unknown_number_and_names_the_choices(number: int) -> None:
    with pytest.raises(ValueError, match=rf"dtype {number}: .* 1 \(bfloat16\), 2 \(float16\), 3 \(float32\)"):
        DType.from_number(number)


@given(st.lists(st.integers(1, 50), max_size=4).map(tuple), st.sampled_from(DType))
def test_tensor_spec_bytes_are_elements_times_itemsize(shape: tuple[int, ...], dtype: DType) -> None:
    spec = TensorSpec("x", dtype, shape)
    count = 1
    for size in shape:
        count *= size
    assert spec.element_count == count
    assert spec.nbytes == count * dtype.itemsize


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (-1, 4)])
def test_tensor_spec_refuses_a_shape_without_elements(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="every size must be at least 1"):
        TensorSpec("x", DType.FLOAT32, shape)


def test_row_is_taps_times_width_times_itemsize() -> None:
    # The reference target: five taps of width 5120 in bf16.
    assert row_bytes(tap_count=5, hidden_size=5120, dtype=DType.BFLOAT16) == 51_200


@pytest.mark.parametrize("module", ["spec", "errors", "credits", "channel"])
def test_module_imports_neither_torch_nor_grpc(module: str) -> None:
    probe = f"import sys, target_wire.{module}; print([m for m in ('torch', 'grpc', 'google') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
