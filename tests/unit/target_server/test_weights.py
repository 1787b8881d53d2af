"""Weights put into a loaded model equal a fresh load of the other checkpoint, and come back after any failure (I8)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from target_server.config import ModelConfig
from target_server.loading import LoadedTarget, load_target
from target_server.weights import Placement, WeightMap, map_weights
from tests.support.served_targets import ARCHITECTURES, write_target
from tests.support.target_variants import scaled, write_variant

EVERYTHING = scaled("weight")
# transformers fuses the experts of these, or renames what it loads.
REARRANGED = {"qwen3_moe", "deepseek_v3"}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp(request.param)
    old = write_target(root / request.param, request.param)
    return old, write_variant(old, root / "new", scaled(""))


def state(target: LoadedTarget) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in target.model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def place(old: Path, new: Path, **settings: object) -> tuple[LoadedTarget, WeightMap, Placement]:
    config = ModelConfig(path=old, **settings)
    target = load_target(config, ["cpu"])
    weights = map_weights(target, old)
    return target, weights, Placement(target, weights, config, old=old, new=new)


def test_every_tensor_becomes_the_other_checkpoint_s_and_back(checkpoints: tuple[Path, Path]) -> None:
    old, new = checkpoints
    target, weights, placement = place(old, new)
    assert (weights.stored_names is None) == (old.name in REARRANGED)
    before = state(target)
    placement.apply()
    assert_same(state(target), state(load_target(ModelConfig(path=new), ["cpu"])))
    after = state(target)
    assert [name for name in before if before[name].any() and torch.equal(before[name], after[name])] == []
    placement.undo()
    assert_same(state(target), before)


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("llama")
    old = write_target(root / "old", "llama")
    return old, write_variant(old, root / "new", EVERYTHING)


def test_tied_weights_stay_tied(llamas: tuple[Path, Path]) -> None:
    # case 103
    target, _, placement = place(*llamas)
    placement.apply()
    embedding, head = target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight
    assert embedding.data_ptr() == head.data_ptr()


def test_new_weights_are_pages_of_the_new_file(llamas: tuple[Path, Path]) -> None:
    target, _, placement = place(*llamas)
    placement.apply()
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str((llamas[1] / "model.safetensors").resolve())):
            start, _, end = line.split()[0].partition("-")
            mapped.append(range(int(start, 16), int(end, 16)))
    parameters = list(target.model.parameters())
    assert all(any(p.data_ptr() in pages for pages in mapped) for p in parameters)


def test_converted_weights_are_copied_into_the_same_memory(llamas: tuple[Path, Path]) -> None:
    # As on an accelerator: there is no room for a second copy.
    target, weights, placement = place(*llamas, dtype="bfloat16")
    assert weights.stored_names is not None
    before = state(target)
    places = [parameter.data_ptr() for parameter in target.model.parameters()]
    placement.apply()
    assert [parameter.data_ptr() for parameter in target.model.parameters()] == places
    assert_same(state(target), state(load_target(ModelConfig(path=llamas[1], dtype="bfloat16"), ["cpu"])))
    placement.undo()
    assert_same(state(target), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_failure_half_way_is_undone(dtype: str, llamas: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    target, weights, placement = place(*llamas, dtype=dtype)
    before = state(target)
    assert placement._mapped is not None
    assert weights.stored_names is not None
    last = next(name for name in reversed(weights.stored_names) if "embed" not in name)
    broken = {name: tensor for name, tensor in placement._mapped.items() if name != last}
    monkeypatch.setattr(placement, "_mapped", broken)
    with pytest.raises(KeyError):
        placement.apply()
    assert any(not torch.equal(before[name], tensor) for name, tensor in state(target).items())
    placement.undo()
    assert_same(state(target), before)


def test_stored_transposed_is_not_taken_for_stored_as_used(llamas: tuple[Path, Path], tmp_path: Path) -> None:
    target = load_target(ModelConfig(path=llamas[0]), ["cpu"])

    def transpose(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.2.self_attn.q_proj.weight"
        assert tensors[name].shape[0] == tensors[name].shape[1]
        tensors[name] = tensors[name].T.contiguous()

    assert map_weights(target, write_variant(llamas[0], tmp_path / "t", transpose)).stored_names is None
