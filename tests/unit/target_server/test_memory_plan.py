"""The memory plan from headers alone, also of a model that is not on this machine."""

from __future__ import annotations

import json
import re
import struct
from math import prod
from pathlib import Path

import pytest

from target_server.__main__ import main
from target_server.config import ServerConfig
from target_server.errors import UserError
from target_server.memory_plan import build_plan

REPOSITORY = Path(__file__).parents[3]
HIDDEN, LAYERS, VOCAB, WIDE = 5120, 64, 248_320, 17_408


def write_headers(directory: Path) -> Path:
    """Writes a checkpoint with the sizes of a 27 B model whose files are all hole (sparse): 54 GB of nothing."""
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        for name in ("gate_proj", "up_proj", "down_proj", "attention"):
            shapes[f"model.layers.{layer}.mlp.{name}.weight"] = (WIDE, HIDDEN)
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    directory.mkdir(exist_ok=True)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        file.truncate(8 + len(content) + end)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "dtype": "bfloat16"}))
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_headers(tmp_path_factory.mktemp("sizes"))


@pytest.mark.parametrize("file", sorted((REPOSITORY / "configs/server").glob("*.yaml")), ids=lambda file: file.name)
def test_every_shipped_config_passes_a_dry_run(
    file: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = ["--hardware.host_memory_gb", "256"]
    assert main(["serve", "--config", str(file), "--model.path", str(checkpoint), "--dry-run", *memory]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("total" in line for line in lines)
    assert re.fullmatch(
        r"fits: (cuda:\d [\d.]+( of [\d.]+)? GB, )*host [\d.]+ of 256\.0 GB(; give hardware.*)?", lines[-1]
    )


def test_plan_of_five_cards_counts_weights_buffers_and_slots(checkpoint: Path) -> None:
    limits = {"max_batch_token_count": 16384, "max_tap_count": 5, "max_session_count": 4}
    devices = [f"cuda:{index}" for index in range(5)]
    plan = build_plan(
        ServerConfig(model={"path": checkpoint}, devices=devices, limits=limits, buffers={"host_slot_count": 6})
    )
    weights = 2 * (2 * VOCAB * HIDDEN + 4 * LAYERS * WIDE * HIDDEN)
    assert plan.slot_bytes == 16384 * 5 * HIDDEN * 2
    assert list(plan.devices) == devices
    assert plan.devices["cuda:3"]["weights"] == weights
    assert plan.devices["cuda:3"]["packed buffers"] == 2 * plan.slot_bytes
    assert 5 * 6 * plan.slot_bytes in plan.host.values()
    assert weights not in plan.host.values()


def test_replicas_on_the_cpu_map_the_weights_once(checkpoint: Path) -> None:
    one = build_plan(ServerConfig(model={"path": checkpoint}, devices=["cpu"]))
    three = build_plan(ServerConfig(model={"path": checkpoint}, devices=["cpu"] * 3))
    assert one.host["weights (mapped once)"] == three.host["weights (mapped once)"] > 0


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"hardware": {"host_memory_gb": 10}, "devices": ["cpu"]}, "buffers.host_slot_count"),
        (
            {"hardware": {"host_memory_gb": 500, "device_memory_gb": 48}, "devices": ["cuda:0"]},
            "limits.max_batch_token_count",
        ),
    ],
)
def test_plan_that_cannot_fit_is_refused_by_setting(settings: dict, field: str, checkpoint: Path) -> None:
    config = ServerConfig(model={"path": checkpoint}, **settings)
    with pytest.raises(UserError) as refused:
        build_plan(config).check(config)
    assert refused.value.field == field
    assert "would need" in refused.value.fix
