from __future__ import annotations

import pytest
from target_wire.messages import spec_from_message, spec_to_message
from target_wire.spec import DType, TensorSpec
from target_wire.v1 import target_pb2


@pytest.mark.parametrize("dtype", DType)
def test_description_survives_the_wire(dtype: DType) -> None:
    spec = TensorSpec("hidden_states", dtype, (7, 2, 576))
    received = target_pb2.TensorSpec.FromString(spec_to_message(spec).SerializeToString())
    assert spec_from_message(received) == spec


@pytest.mark.parametrize(
    ("message", "detail"),
    [
        (target_pb2.TensorSpec(name="x", shape=[2]), "dtype 0"),
        (target_pb2.TensorSpec(name="x", dtype=target_pb2.DTYPE_FLOAT32, shape=[2, 0]), "every size must be at least"),
        (target_pb2.TensorSpec(name="x", dtype=target_pb2.DTYPE_FLOAT32, shape=[-2]), "every size must be at least"),
    ],
)
def test_description_that_describes_nothing_is_refused(message: target_pb2.TensorSpec, detail: str) -> None:
    with pytest.raises(ValueError, match=detail):
        spec_from_message(message)
