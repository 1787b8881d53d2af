"""What a configuration will need of each device and of the host, from the checkpoint's headers alone. No torch.

Exact for weights, packed buffers and host slots; an estimate for what a forward holds between its layers and for the
processes themselves. It refuses what can't fit, naming the setting to lower, before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import psutil

from target_server.checkpoint import StoredTensor, check_checkpoint, stored_tensors
from target_server.config import ServerConfig
from target_server.errors import UserError

__all__ = ["MemoryPlan", "build_plan"]

_GB = 1e9
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "BF16": 2, "F16": 2, "F32": 4}
# Resident size of one replica process before weights (torch, transformers, gRPC) and of the front; measured.
_PROCESS_BYTES = 450_000_000
_FRONT_BYTES = 120_000_000
# HTTP/2 window and frames on their way of one stream; measured 16 to 25 MB.
_STREAM_BYTES = 25_000_000
# Tensors of hidden size, and of the widest projection, that are alive at once within a block.
_HIDDEN_COPIES = 8
_WIDE_COPIES = 3


@dataclass(frozen=True)
class _Model:
    """What the headers tell.

    Attributes:
        weight_bytes: of all weights in the served type.
        itemsize: bytes of one element.
        hidden_size: width D of the residual stream.
        layer_count: decoder blocks.
        widest: largest size of any block's projection.
    """

    weight_bytes: int
    itemsize: int
    hidden_size: int
    layer_count: int
    widest: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose.

    Attributes:
        devices: accelerator to its purposes.
        host: purposes on the host.
        slot_bytes: size of one host slot.
    """

    devices: dict[str, dict[str, int]]
    host: dict[str, int]
    slot_bytes: int

    def lines(self) -> list[str]:
        """Returns the plan as text, one line a purpose."""
        return [line for place, uses in (*self.devices.items(), ("host", self.host)) for line in _lines(place, uses)]

    def check(self, config: ServerConfig) -> None:
        """Refuses what can't fit.

        Raises:
            UserError: the host or a device is too small.
        """
        host_bytes = int(config.hardware.host_memory_gb * _GB) or psutil.virtual_memory().total
        _check("host", self.host, host_bytes, "buffers.host_slot_count", str(config.buffers.host_slot_count))
        device_bytes = int(config.hardware.device_memory_gb * _GB)
        for device, uses in self.devices.items():
            if device_bytes:
                limit = config.limits.max_batch_token_count
                _check(device, uses, device_bytes, "limits.max_batch_token_count", str(limit))

    def verdict(self, config: ServerConfig) -> str:
        """Returns one line for a plan that was checked: what is needed of what there is."""
        device_gb, host_gb = config.hardware.device_memory_gb, config.hardware.host_memory_gb
        has = f" of {device_gb:.1f}" if device_gb else ""
        parts = [f"{device} {sum(uses.values()) / _GB:.2f}{has} GB" for device, uses in self.devices.items()]
        host_gb = host_gb or psutil.virtual_memory().total / _GB
        parts.append(f"host {sum(self.host.values()) / _GB:.2f} of {host_gb:.1f} GB")
        unchecked = "" if device_gb or not self.devices else "; give hardware.device_memory_gb to check devices too"
        return f"fits: {', '.join(parts)}{unchecked}"


def build_plan(config: ServerConfig) -> MemoryPlan:
    """Returns what the configuration needs.

    Raises:
        UserError: the checkpoint's files.
    """
    model = _read_model(config)
    limits, buffers = config.limits, config.buffers
    taps = min(limits.max_tap_count, model.layer_count)
    slot_bytes = limits.max_batch_token_count * taps * model.hidden_size * model.itemsize
    padded = limits.max_padded_token_count or 2 * limits.max_batch_token_count
    forward = padded * (_HIDDEN_COPIES * model.hidden_size + _WIDE_COPIES * model.widest) * model.itemsize
    replicas = config.replica_devices
    devices = {}
    for names in replicas:
        for name in names:
            if name != "cpu":
                devices[name] = {
                    "weights": model.weight_bytes // len(names),
                    "packed buffers": buffers.device_buffer_count * slot_bytes if name == names[-1] else 0,
                    "forward (estimate)": forward,
                }
    on_cpu = sum(names[0] == "cpu" for names in replicas)
    host = {
        "weights (mapped once)": model.weight_bytes if on_cpu else 0,
        "forward (estimate)": on_cpu * forward,
        f"slots ({len(replicas)} x {buffers.host_slot_count} x {slot_bytes / 1e6:.0f} MB)": (
            len(replicas) * buffers.host_slot_count * slot_bytes
        ),
        "streams (credit is the clients' memory)": len(replicas) * limits.max_session_count * _STREAM_BYTES,
        "shared memory (clients on this host)": len(replicas) * limits.max_session_count * buffers.shared_memory_bytes,
        "processes (estimate)": _FRONT_BYTES + len(replicas) * _PROCESS_BYTES,
    }
    return MemoryPlan(devices, host, slot_bytes)


def _read_model(config: ServerConfig) -> _Model:
    content = check_checkpoint(config.model.path)
    assert config.model.path is not None
    tensors = stored_tensors(config.model.path)
    text = content.get("text_config") or content
    embedding = next((t for t in tensors if t.name.endswith(("embed_tokens.weight", "wte.weight"))), None)
    if embedding is None:
        raise UserError("model.path", config.model.path, "holds no input embedding; give a whole checkpoint")
    declared = text.get("dtype") or text.get("torch_dtype") or content.get("dtype") or content.get("torch_dtype")
    dtype = config.model.dtype if config.model.dtype != "auto" else declared or embedding.dtype
    itemsize = _ITEMSIZE.get(str(dtype), 4)
    blocks = list(_block_tensors(tensors))
    return _Model(
        weight_bytes=sum(prod(tensor.shape) for tensor in tensors) * itemsize,
        itemsize=itemsize,
        hidden_size=embedding.shape[1],
        layer_count=1 + max((index for index, _ in blocks), default=0),
        widest=max((max(tensor.shape) for _, tensor in blocks), default=embedding.shape[1]),
    )


def _block_tensors(tensors: Sequence[StoredTensor]) -> Iterator[tuple[int, StoredTensor]]:
    """Yields the tensors of the text decoder's blocks with their block's index."""
    for tensor in tensors:
        found = re.search(r"(?:^|\.)(?:layers|h)\.(\d+)\.", tensor.name)
        if found and "visual" not in tensor.name and "vision" not in tensor.name:
            yield int(found.group(1)), tensor


def _lines(place: str, uses: dict[str, int]) -> Iterator[str]:
    for purpose, size in uses.items():
        if size:
            yield f"{place:8} {purpose:44} {size / _GB:8.2f} GB"
    yield f"{place:8} {'total':44} {sum(uses.values()) / _GB:8.2f} GB"


def _check(place: str, uses: dict[str, int], available: int, field: str, value: str) -> None:
    needed = sum(uses.values())
    if needed > available:
        largest = max(uses, key=lambda purpose: uses[purpose])
        raise UserError(
            field,
            value,
            f"{place} would need {needed / _GB:.1f} GB and has {available / _GB:.1f}; most goes to {largest}: lower it",
        )
