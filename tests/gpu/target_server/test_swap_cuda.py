"""A swap on CUDA: weights are copied over the old ones, at the same addresses, between two batches (I3, I8)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from target_server.config import ModelConfig
from target_server.loading import load_target
from target_server.weights import Placement, map_weights
from tests.support.served_targets import write_target
from tests.support.target_variants import scaled, write_variant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe"])
def test_weights_are_replaced_where_they_lie_and_come_back(architecture: str, tmp_path: Path) -> None:
    old = write_target(tmp_path / "old", architecture, dtype=torch.bfloat16)
    new = write_variant(old, tmp_path / "new", scaled(""))
    settings = ModelConfig(path=old)
    target = load_target(settings, ["cuda:0"])
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    places = [parameter.data_ptr() for parameter in target.model.parameters()]
    memory = torch.cuda.memory_allocated()
    placement = Placement(target, map_weights(target, old), settings, old=old, new=new)
    placement.apply()
    fresh = load_target(ModelConfig(path=new), ["cpu"]).model.state_dict()
    after = target.model.state_dict()
    assert [name for name in fresh if not torch.equal(after[name].cpu(), fresh[name])] == []
    assert [parameter.data_ptr() for parameter in target.model.parameters()] == places
    assert torch.cuda.memory_allocated() == memory
    placement.undo()
    again = target.model.state_dict()
    assert [name for name in before if not torch.equal(again[name], before[name])] == []
