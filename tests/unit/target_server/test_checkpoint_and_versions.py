"""What is refused before torch is near, and the digest of the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from target_server.checkpoint import check_checkpoint, stored_tensors
from target_server.errors import UserError
from target_server.versions import tokenizer_digest, weights_digest

TENSORS = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(5)}


def _write(directory: Path, shards: list[dict[str, torch.Tensor]]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    names = [f"model-{i}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, directory / name)
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return _write(tmp_path / "one", [TENSORS])


def test_digest_does_not_depend_on_sharding(checkpoint: Path, tmp_path: Path) -> None:
    shards = [{"c": TENSORS["c"]}, {"a": TENSORS["a"], "b": TENSORS["b"]}]
    digest = weights_digest(checkpoint)
    assert digest == weights_digest(_write(tmp_path / "two", shards))
    assert len(digest) == 32
    assert set(digest) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    "change",
    [
        {"b": TENSORS["b"].view(3, 2)},
        {"b": TENSORS["b"].view(torch.int32)},
        {"b": TENSORS["b"].clone().index_fill(1, torch.tensor(1), 9.0)},
        {"d": TENSORS["c"], "c": None},
    ],
    ids=["shape", "dtype", "value", "name"],
)
def test_digest_changes_with(change: dict[str, torch.Tensor | None], checkpoint: Path, tmp_path: Path) -> None:
    changed = {name: tensor for name, tensor in {**TENSORS, **change}.items() if tensor is not None}
    assert weights_digest(checkpoint) != weights_digest(_write(tmp_path / "other", [changed]))


def test_stored_tensors_point_at_their_bytes(checkpoint: Path) -> None:
    stored = {tensor.name: tensor for tensor in stored_tensors(checkpoint)}
    assert list(stored) == ["a", "b", "c"]
    content = stored["b"].file.read_bytes()[stored["b"].start : stored["b"].end]
    assert content == TENSORS["b"].numpy().tobytes()


def test_tokenizer_digest_covers_the_chat_template(checkpoint: Path) -> None:
    assert tokenizer_digest(checkpoint) == ""
    (checkpoint / "tokenizer.json").write_text("{}")
    before = tokenizer_digest(checkpoint)
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_digest(checkpoint) not in ("", before)


def _remove_config(path: Path) -> None:
    (path / "config.json").unlink()


def _break_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def _forget_type(path: Path) -> None:
    (path / "config.json").write_text("{}")


def _remove_weights(path: Path) -> None:
    (path / "model-0.safetensors").unlink()


def _truncate_weights(path: Path) -> None:
    file = path / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def _offer_a_pickle(path: Path) -> None:
    (path / "model-0.safetensors").unlink()
    torch.save(TENSORS, path / "pytorch_model.bin")


def _lose_a_shard(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove_config, "holds no config.json"),
        (_break_config, "can't be read as JSON"),
        (_forget_type, "no model_type"),
        (_remove_weights, "holds no *.safetensors"),
        (_truncate_weights, "cut short"),
        (_offer_a_pickle, "holds no *.safetensors"),
        (_lose_a_shard, "gone.safetensors, which is missing"),
    ],
)
def test_damaged_checkpoint_is_refused_by_name(damage: object, message: str, checkpoint: Path) -> None:
    check_checkpoint(checkpoint)
    damage(checkpoint)
    with pytest.raises(UserError) as refused:
        check_checkpoint(checkpoint)
    assert refused.value.field == "model.path"
    assert message in refused.value.fix


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        check_checkpoint(tmp_path / "none")
