"""From a checkpoint directory to a frozen decoder on its devices, with the facts that a trainer needs.

Only a local directory, only safetensors, no code from the checkpoint, no network. Every weight must come from the
files: transformers would fill a missing one at random and go on, so that is refused here. The only module that knows
how transformers names a model's parts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from target_wire.codec import dtype_from_torch
from target_wire.spec import DType
from target_wire.v1 import target_pb2
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from target_server.config import ModelConfig
from target_server.errors import UserError
from target_server.versions import tokenizer_digest

__all__ = ["LoadedTarget", "load_target", "read_config"]

_FIELD = "model.path"


@dataclass(frozen=True)
class LoadedTarget:
    """A frozen target, ready to run.

    Attributes:
        model: the whole model, in eval mode.
        decoder: its text decoder, without the head.
        layers: the decoder's blocks in order; block i's output is "layer i".
        dtype: type of the residual stream.
        input_device: where token ids go.
        output_device: where the last block's output is.
        description: the facts that clients are told.
    """

    model: Any
    decoder: nn.Module
    layers: nn.ModuleList
    dtype: DType
    input_device: torch.device
    output_device: torch.device
    description: target_pb2.TargetModel


def load_target(settings: ModelConfig, devices: list[str]) -> LoadedTarget:
    """Loads the checkpoint onto the devices of one replica.

    Raises:
        UserError: transformers can't build the model from what the directory holds, or a device doesn't exist.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    path = settings.path
    assert path is not None
    _check_devices(devices)
    model = _build_model(path, settings, devices).eval().requires_grad_(False)
    decoder = model.get_decoder()
    layers = _blocks(decoder, path)
    weight = _embedding(model).weight
    dtype = _wire_dtype(weight.dtype, path)
    if settings.compile_blocks:
        _compile(layers)
    return LoadedTarget(
        model=model,
        decoder=decoder,
        layers=layers,
        dtype=dtype,
        input_device=weight.device,
        output_device=next(layers[-1].parameters()).device,
        description=_describe(model, len(layers), dtype, path),
    )


def _compile(layers: nn.ModuleList) -> None:
    """Compiles the blocks in place, for any batch shape.

    Only their `forward`: hooks stay outside of it, so capturing changes no graph and may end a forward as it does.
    """
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def read_config(path: Path) -> dict[str, Any]:
    """Returns a checkpoint's config under the names of this transformers release, whichever one wrote it.

    Raises:
        UserError: transformers does not understand it.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        ).to_dict()
    except (ValueError, KeyError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(_FIELD, path, f"transformers can't read its config.json: {reason}") from error
    return config


def _build_model(path: Path, settings: ModelConfig, devices: list[str]) -> Any:
    disable_progress_bar()
    set_verbosity_error()
    placement: dict[str, Any] = {"device_map": "auto", "max_memory": _memory_of(devices)} if len(devices) > 1 else {}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype),
            attn_implementation=None if settings.attention == "auto" else settings.attention,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            # Neither is accepted: `_check_report` names them, where transformers prints a table.
            ignore_mismatched_sizes=True,
            **placement,
        )
    except (ValueError, KeyError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(_FIELD, path, f"transformers can't load it: {reason}") from error
    _check_report(report, path)
    return model if placement else model.to(devices[0])


def _check_report(report: Mapping[str, Any], path: Path) -> None:
    for kind, problem in (("missing_keys", "lacks the weight"), ("mismatched_keys", "has another shape for")):
        entries = report.get(kind) or ()
        names = sorted(entry if isinstance(entry, str) else str(entry[0]) for entry in entries)
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(_FIELD, path, f"{problem} {names[0]}{more}; its config.json and safetensors disagree")


def _check_devices(devices: list[str]) -> None:
    for name in devices:
        device = torch.device(name)
        count = torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= count:
            fix = (
                f"has {count} CUDA devices; give cuda:0 to cuda:{count - 1}"
                if count
                else "has no CUDA device; give cpu"
            )
            raise UserError("devices", name, f"this machine {fix}")
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise UserError("devices", name, f"can't be used ({reason}); give cpu or another cuda:N") from error


def _memory_of(devices: list[str]) -> dict[int, int]:
    """Returns what accelerate may place on each device: all of its free memory but a tenth, for activations."""
    indices = [torch.device(name).index or 0 for name in devices]
    return {index: int(torch.cuda.mem_get_info(index)[0] * 0.9) for index in indices}


def _blocks(decoder: nn.Module, path: Path) -> nn.ModuleList:
    layers = getattr(decoder, "layers", None)
    if isinstance(layers, nn.ModuleList):
        return layers
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    if len(lists) != 1:
        raise UserError(_FIELD, path, f"can't tell the blocks of {type(decoder).__name__}; give another architecture")
    return lists[0]


def _wire_dtype(dtype: torch.dtype, path: Path) -> DType:
    try:
        return dtype_from_torch(dtype)
    except ValueError as error:
        raise UserError(_FIELD, path, f"has weights of {dtype}; set model.dtype to bfloat16 or float32") from error


def _describe(model: Any, layer_count: int, dtype: DType, path: Path) -> target_pb2.TargetModel:
    config = model.config.get_text_config()
    embedding, head = _embedding(model), model.get_output_embeddings()
    return target_pb2.TargetModel(
        architecture=type(model).__name__,
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        layer_count=layer_count,
        vocab_size=embedding.weight.shape[0],
        tie_word_embeddings=head is None or head.weight.data_ptr() == embedding.weight.data_ptr(),
        dtype=target_pb2.Dtype.ValueType(dtype.number),
        max_position_count=int(getattr(config, "max_position_embeddings", 0) or 0),
        tokenizer_digest=tokenizer_digest(path),
        name=path.resolve().name,
    )


def _embedding(model: Any) -> nn.Embedding:
    embedding: nn.Embedding = model.get_input_embeddings()
    return embedding
