"""What transformers would take silently, and the server refuses."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from target_server.capture import capture_batch
from target_server.config import ModelConfig
from target_server.errors import UserError
from target_server.loading import load_target
from target_server.packing import plan_parts
from tests.support.served_targets import LAYERS, VOCAB_SIZE, some_ids, write_target


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("llama"), "llama")


def _variant(checkpoint: Path, directory: Path, *, without: str = "", **config: object) -> Path:
    content = json.loads((checkpoint / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**content, **config}))
    tensors = load_file(checkpoint / "model.safetensors")
    tensors.pop(without, None)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _refusal(directory: Path) -> str:
    with pytest.raises(UserError) as refused:
        load_target(ModelConfig(path=directory), ["cpu"])
    assert refused.value.field == "model.path"
    assert "\n" not in str(refused.value)
    return refused.value.fix


def test_compiled_blocks_give_the_same_rows(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced by torch.compile and run without a code generator: what differs is the tracing, and that must not show."""
    compiled: list[object] = []

    def trace_only(function: object, **options: object) -> object:
        compiled.append(function)
        return real_compile(function, backend="eager", **options)

    real_compile = torch.compile
    monkeypatch.setattr(torch, "compile", trace_only)
    plain = load_target(ModelConfig(path=checkpoint), ["cpu"])
    traced = load_target(ModelConfig(path=checkpoint, compile_blocks=True), ["cpu"])
    assert len(compiled) == LAYERS
    for lengths in ((7, 3), (5,), (2, 9, 4)):
        ids = array("i", some_ids(sum(lengths)))
        rows = []
        for target in (plain, traced):
            rows.append(torch.empty(sum(lengths), 2, 64))
            capture_batch(target, ids, plan_parts(lengths, 1024), taps=(4, 1), packed_TLD=rows[-1])
        assert torch.equal(rows[0], rows[1])


def test_facts_are_those_of_the_checkpoint(checkpoint: Path) -> None:
    description = load_target(ModelConfig(path=checkpoint), ["cpu"]).description
    assert description.architecture == "LlamaForCausalLM"
    assert (description.layer_count, description.vocab_size, description.hidden_size) == (LAYERS, VOCAB_SIZE, 64)
    assert description.tie_word_embeddings
    assert description.max_position_count == 512


def test_dtype_can_be_chosen(checkpoint: Path) -> None:
    target = load_target(ModelConfig(path=checkpoint, dtype="bfloat16"), ["cpu"])
    assert target.dtype == "bfloat16"
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.bfloat16}


def test_weights_on_the_cpu_are_pages_of_the_file(checkpoint: Path) -> None:
    """Replicas on one host share them (issue: several CPU replicas, one copy of the weights)."""
    target = load_target(ModelConfig(path=checkpoint), ["cpu"])
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str((checkpoint / "model.safetensors").resolve())):
            start, _, end = line.split()[0].partition("-")
            mapped.append(range(int(start, 16), int(end, 16)))
    parameters = list(target.model.parameters())
    shared = sum(p.nbytes for p in parameters if any(p.data_ptr() in pages for pages in mapped))
    assert shared > 0.9 * sum(p.nbytes for p in parameters)


def test_missing_weight_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    fix = _refusal(_variant(checkpoint, tmp_path, without="model.layers.3.mlp.up_proj.weight"))
    assert "lacks the weight model.layers.3.mlp.up_proj.weight" in fix


def test_weight_of_another_shape_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    fix = _refusal(_variant(checkpoint, tmp_path, intermediate_size=100))
    assert "has another shape for model.layers.0.mlp.down_proj.weight and 17 more" in fix


def test_unknown_architecture_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    assert "transformers can't load it" in _refusal(_variant(checkpoint, tmp_path, model_type="nonesuch"))


def test_code_of_the_checkpoint_is_never_run(checkpoint: Path, tmp_path: Path) -> None:
    # I9
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    _refusal(_variant(checkpoint, tmp_path, model_type="evil", auto_map=auto_map))


def test_attention_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    directory = write_target(tmp_path, "gpt_oss")
    with pytest.raises(UserError, match="can't load it"):
        load_target(ModelConfig(path=directory, attention="sdpa"), ["cpu"])
    assert load_target(ModelConfig(path=directory), ["cpu"]).model.config._attn_implementation == "eager"
