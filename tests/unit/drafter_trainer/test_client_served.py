"""What a trainer believes is served, and what it refuses to go on with."""

from __future__ import annotations

from typing import Any

import pytest
from target_wire.v1 import target_pb2 as pb

from drafter_trainer.client.served import ServedVersion
from drafter_trainer.client.shape import shape_difference, shape_of
from drafter_trainer.types import Version

A, B, A_AGAIN = Version(1, "a"), Version(2, "b"), Version(3, "a")


def test_a_late_batch_of_an_earlier_version_is_not_what_is_served() -> None:
    served = ServedVersion()
    assert served.version is None
    for version in (A, B, A):
        served.told_by_batch(version)
    assert served.version == B
    served.told_by_batch(A_AGAIN)
    assert served.version == A_AGAIN


def test_a_front_is_believed_when_it_tells_something_new() -> None:
    served = ServedVersion()
    served.told_by_front("x", A)
    served.told_by_batch(B)
    served.told_by_front("y", A)  # another server, not swapped yet
    served.told_by_front("x", B)
    served.told_by_front("y", A)
    assert served.version == B
    served.told_by_front("x", A)  # started again with the first checkpoint
    assert served.version == A


def description(**model: Any) -> pb.DescribeTargetResponse:
    facts: dict[str, Any] = {
        "architecture": "Qwen3ForCausalLM", "model_type": "qwen3", "hidden_size": 64, "layer_count": 4,
        "vocab_size": 640, "dtype": pb.DTYPE_FLOAT32, "tokenizer_digest": "t", "name": "one",
    }  # fmt: skip
    return pb.DescribeTargetResponse(
        protocol_version=1,
        model=pb.TargetModel(**{**facts, **model}),
        version=pb.TargetVersion(number=1, digest="a"),
        max_batch_token_count=1000,
        max_sequence_token_count=100,
    )


def difference(**model: Any) -> str:
    shape = shape_of(description(), max_batch_tokens=800, max_sequence_tokens=90)
    return shape_difference(shape, description(**model))


def test_other_weights_and_names_are_no_difference() -> None:
    assert difference(name="two", tie_word_embeddings=True, tokenizer_digest="") == ""


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"hidden_size": 48}, "hidden_size was 64, is 48"),
        ({"vocab_size": 641, "layer_count": 5}, "layer_count was 4, is 5; vocab_size was 640, is 641"),
        ({"tokenizer_digest": "u"}, "tokenizer_digest was 't', is 'u'"),
        ({"dtype": pb.DTYPE_BFLOAT16}, "dtype was 'float32', is 'bfloat16'"),
        ({"architecture": "LlamaForCausalLM"}, "architecture was 'Qwen3ForCausalLM', is 'LlamaForCausalLM'"),
    ],
)
def test_a_difference_is_told_field_by_field(model: dict[str, Any], told: str) -> None:
    assert difference(**model) == told


def test_limits_may_grow_but_not_fall_below_what_the_run_needs() -> None:
    shape = shape_of(description(), max_batch_tokens=800, max_sequence_tokens=90)
    smaller = description()
    smaller.max_batch_token_count, smaller.max_sequence_token_count = 800, 89
    assert shape_difference(shape, smaller) == "max_sequence_token_count is 89, this run needs 90"
