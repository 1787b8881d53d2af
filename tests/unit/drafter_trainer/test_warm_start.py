"""Going on from an existing drafter: its shape, the user's settings, and nothing ignored (case 100)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from target_wire.v1 import target_pb2 as pb

from drafter_trainer.config import DrafterSection
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.drafter_shape import resolve_drafter_config
from drafter_trainer.errors import UserError
from drafter_trainer.export import export_drafter
from drafter_trainer.learner import load_weights
from drafter_trainer.model import Drafter
from drafter_trainer.warm_start import read_start_config, read_start_weights
from tests.support.drafters import HIDDEN, MASK_ID, VOCAB, random_drafter, tiny_config

TARGET = pb.TargetModel(hidden_size=HIDDEN, layer_count=8, vocab_size=VOCAB, tie_word_embeddings=True)
START = tiny_config(sliding_window=9, layer_types=("sliding_attention", "full_attention"), rope_theta=5e5)


def published(directory: Path, layout: str) -> Path:
    """A drafter as z-lab publishes it, as newer checkpoints are, or as we export it."""
    drafter = random_drafter(START)
    if layout == "ours":
        return export_drafter(START, drafter.state_dict(), directory, dtype=torch.float32)
    config = START.to_json()
    inner = config["dflash_config"]
    config.pop("rope_parameters")
    if layout == "z-lab":
        inner.pop("block_size")
    else:
        config.pop("block_size")
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    extra = {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), "rotary.inv_freq": torch.zeros(4)}
    weights = {**drafter.state_dict(), **extra}
    if layout == "z-lab":
        save_file(weights, directory / "model.safetensors")
        return directory
    names = sorted(weights)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, directory / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def resolve(directory: Path, **section: Any) -> DrafterConfig:
    given = DrafterSection(init_from=directory, **section)
    start = read_start_config(directory)
    mask = given.mask_token_id if given.mask_token_id is not None else start.mask_token_id
    return resolve_drafter_config(given, TARGET, mask_token_id=mask, model_config={}, start=start)


@pytest.mark.parametrize("layout", ["ours", "z-lab", "sharded, block size in dflash_config"])
def test_every_layout_gives_shape_and_weights(layout: str, tmp_path: Path) -> None:
    directory = published(tmp_path / "drafter", layout)
    config = resolve(directory)
    for name in ("num_hidden_layers", "block_size", "layer_types", "sliding_window", "rope_theta", "target_layer_ids"):
        assert getattr(config, name) == getattr(START, name), name
    assert (config.mask_token_id, config.vocab_size, config.tie_word_embeddings) == (MASK_ID, VOCAB, True)
    drafter = Drafter(config)
    load_weights(drafter, directory)
    expected = random_drafter(START).state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in drafter.state_dict().items())


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ({"block_size": 6}, "block_size", 6),
        ({"mask_token_id": 5}, "mask_token_id", 5),
        ({"target_layer_ids": (2, 6)}, "target_layer_ids", (2, 6)),
        ({"rope_theta": 7.0}, "rope_theta", 7.0),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps", 1e-5),
        ({"sliding_window": 33}, "sliding_window", 33),
        ({"sliding_window": 5, "full_attention_layers": 0}, "layer_types", ("sliding_attention",) * 2),
        ({"sliding_window": None}, "layer_types", ("full_attention",) * 2),
        ({"num_layers": 2, "head_dim": 16}, "num_hidden_layers", 2),
    ],
)
def test_what_the_user_gives_wins_where_the_weights_allow_it(
    section: dict[str, Any], name: str, value: Any, tmp_path: Path
) -> None:  # case 100
    assert getattr(resolve(published(tmp_path / "drafter", "ours"), **section), name) == value


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"num_layers": 5}, "drafter.num_layers: 5: the drafter of drafter.init_from has 2"),
        ({"num_attention_heads": 8}, "drafter.num_attention_heads: 8: the drafter of drafter.init_from has 4"),
        ({"num_key_value_heads": 4}, "drafter.num_key_value_heads: 4: "),
        ({"head_dim": 8}, "drafter.head_dim: 8: "),
        ({"intermediate_size": 8}, "drafter.intermediate_size: 8: "),
        ({"target_layer_ids": (1, 2, 3)}, "drafter.target_layer_ids: 1,2,3: the drafter of drafter.init_from reads 2"),
        ({"target_layer_ids": (1, 8)}, "drafter.target_layer_ids: 1,8: "),
        ({"mask_token_id": VOCAB}, f"drafter.mask_token_id: {VOCAB}: "),
    ],
)
def test_what_the_weights_do_not_allow_is_refused_and_never_ignored(
    section: dict[str, Any], message: str, tmp_path: Path
) -> None:  # case 100
    with pytest.raises(UserError) as caught:
        resolve(published(tmp_path / "drafter", "ours"), **section)
    assert str(caught.value).startswith(message)


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    directory = published(tmp_path / "drafter", "ours")
    target = pb.TargetModel(hidden_size=HIDDEN, layer_count=9, vocab_size=VOCAB)
    with pytest.raises(UserError, match="made for a target 8 layers deep, this one is 9"):
        resolve_drafter_config(
            DrafterSection(init_from=directory),
            target,
            mask_token_id=1,
            model_config={},
            start=read_start_config(directory),
        )


def test_a_checkpoint_with_an_average_gives_the_average(tmp_path: Path) -> None:
    weights = {name: tensor * 2 for name, tensor in random_drafter(START).state_dict().items()}
    (tmp_path / "state.json").write_text(json.dumps({"facts": {"drafter_config": START.to_json()}}))
    save_file(random_drafter(START).state_dict(), tmp_path / "model.safetensors")
    save_file({**weights, "updates": torch.tensor(3)}, tmp_path / "average.safetensors")
    assert read_start_config(tmp_path).block_size == START.block_size
    assert torch.equal(read_start_weights(tmp_path)["fc.weight"], weights["fc.weight"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "config.json").unlink(), "holds neither config.json nor state.json"),
        (lambda d: (d / "config.json").write_text("{}"), "is no drafter (the drafter's config lacks"),
        (lambda d: (d / "model.safetensors").unlink(), "no weights there"),
        (lambda d: (d / "model.safetensors").write_bytes(b"torn"), "no weights there"),
        (lambda d: save_file({"d2t": torch.zeros(2)}, d / "model.safetensors"), "has a vocabulary of its own"),
        (lambda d: save_file({"fc.weight": torch.full((2, 2), torch.nan)}, d / "model.safetensors"), "is not finite"),
        (lambda d: save_file({"fc.weight": torch.zeros(2, 2)}, d / "model.safetensors"), "its weights don't fit"),
    ],
)
def test_what_is_wrong_with_a_directory_is_one_line(spoil: Any, message: str, tmp_path: Path) -> None:
    directory = published(tmp_path / "drafter", "ours")
    spoil(directory)
    with pytest.raises(UserError) as caught:
        load_weights(Drafter(resolve(directory)), directory)
    assert caught.value.field == "drafter.init_from"
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
