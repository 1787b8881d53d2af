"""Settings of the target server: names, types, ranges, defaults, meanings, and the rules between them.

Where values come from is `config_layers`' part. It must stay importable without torch: the front uses it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

__all__ = [
    "BuffersConfig",
    "DeadlinesConfig",
    "HardwareConfig",
    "LimitsConfig",
    "MetricsConfig",
    "ModelConfig",
    "ReplicaConfig",
    "Section",
    "ServerConfig",
    "SwapConfig",
]


def _check_device(name: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError("give cpu or cuda:N")
    return name


def _check_address(address: str) -> str:
    if not re.fullmatch(r"\S*:\d{1,5}", address):
        raise ValueError("give HOST:PORT")
    return address


def _check_optional_address(address: str) -> str:
    return address and _check_address(address)


_Device = Annotated[str, AfterValidator(_check_device)]
_Address = Annotated[str, AfterValidator(_check_address)]
_OptionalAddress = Annotated[str, AfterValidator(_check_optional_address)]


class Section(BaseModel):
    """A group of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(Section):
    """What is served."""

    path: Path | None = None
    """Local Hugging Face directory: config.json and *.safetensors. Required."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute and weight type; auto: what the checkpoint's config says, else float32."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = "auto"
    """Attention backend of transformers; auto: the best that the model supports on its device."""
    compile_blocks: bool = False
    """Compile each decoder block with torch.compile: minutes at the first forward, and rows equal to rounding only."""


class ReplicaConfig(Section):
    """How replica processes are made."""

    devices_per_replica: int = Field(default=1, ge=1)
    """Devices that one copy of the model is spread over."""
    num_threads: int = Field(default=0, ge=0, le=1024)
    """Compute threads of one replica; 0: the usable cores ÷ replicas on the CPU, 1 beside an accelerator."""
    port_base: int = Field(default=0, ge=0, le=65535)
    """Data port of replica 0; replica i listens on port_base + i. 0: any free port."""
    advertise_host: str = ""
    """Host that clients are told to reach replicas under; empty: the one under which they reached the front."""
    socket_dir: Path | None = None
    """Directory for Unix sockets as data endpoints (replica-0.sock and so on), for clients on this host; none: TCP."""


class LimitsConfig(Section):
    """What a session may ask for."""

    max_batch_token_count: int = Field(default=8192, ge=1, le=1 << 24)
    """Largest batch, in tokens (sum of its sequence lengths)."""
    max_sequence_token_count: int = Field(default=0, ge=0)
    """Longest sequence, in tokens; 0: the largest batch, or the model's positions when those are fewer."""
    max_padded_token_count: int = Field(default=0, ge=0)
    """Largest forward, padding included; a larger batch is run in parts. 0: twice the largest batch."""
    max_tap_count: int = Field(default=8, ge=1, le=1024)
    """Most layers that one session may tap; with the largest batch it sets the size of a host slot."""
    max_session_count: int = Field(default=8, ge=1, le=4096)
    """Most sessions of one replica at a time; each has a host slot of its own."""
    max_outstanding_request_count: int = Field(default=64, ge=1)
    """Most unanswered requests of one session."""


class BuffersConfig(Section):
    """Memory between the forward and the wire; all of it is allocated once."""

    host_slot_count: int = Field(default=10, ge=2, le=4096)
    """Host buffers of one replica, each for the largest batch; above max_session_count they are shared."""
    device_buffer_count: int = Field(default=2, ge=1, le=64)
    """Packed buffers on the device; unused on the CPU, where a forward writes into the host slot itself."""
    copy_overlap: bool = True
    """Whether a batch is copied to the host while the next forward runs."""
    copy_audit: Literal["off", "sampled", "always"] = "sampled"
    """Which batches are checked against a checksum that the device computed; sampled: one in 16."""
    frame_bytes: int = Field(default=2 << 20, ge=1, le=4 << 20)
    """Aim for the size of a frame's body; frames are cut at token rows."""
    shared_memory_bytes: int = Field(default=32 << 20, ge=0, le=1 << 30)
    """Most shared memory for each session whose client is on this host, where frames' bodies then go; 0: none."""


class MetricsConfig(Section):
    """What can be watched."""

    listen: _OptionalAddress = ""
    """HOST:PORT of a Prometheus endpoint in the front; empty for none."""


class HardwareConfig(Section):
    """What the memory plan is held against (--dry-run, and before every start)."""

    host_memory_gb: float = Field(default=0.0, ge=0)
    """Host memory, in 1e9 bytes; 0: this machine's."""
    device_memory_gb: float = Field(default=0.0, ge=0)
    """Memory of each accelerator, in 1e9 bytes; 0: not checked before loading."""


class DeadlinesConfig(Section):
    """How long each wait may last, in seconds."""

    start_timeout_s: float = Field(default=1800.0, gt=0)
    """From a replica's start until it has loaded the model."""
    open_timeout_s: float = Field(default=30.0, gt=0)
    """From a stream's start until its first message."""
    write_timeout_s: float = Field(default=300.0, gt=0)
    """For one frame to be taken by the transport; then the session is closed as stalled."""
    forward_timeout_s: float = Field(default=600.0, gt=0)
    """For one forward with its copy; then the replica is taken for hung and restarted."""
    heartbeat_timeout_s: float = Field(default=60.0, gt=1)
    """Between two reports of a serving replica (it makes one a second); then it is taken for hung and restarted."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """From SIGTERM until what has begun is cancelled."""
    restart_delay_s: float = Field(default=0.5, gt=0)
    """Before a dead replica's first restart; doubled with each failure in a row."""
    restart_delay_max_s: float = Field(default=30.0, gt=0)
    """Longest delay before a restart."""
    max_start_failure_count: int = Field(default=5, ge=1)
    """Failures to start in a row after which a replica is given up."""


class SwapConfig(Section):
    """How the served weights may be replaced while the server runs."""

    checkpoint_root: Path | None = None
    """Checkpoints are taken from below this directory only; not given: the one that model.path lies in."""
    state_file: Path | None = None
    """Remembers the version served across restarts; not given: a hidden file in the checkpoint root, named after
    model.path and written by the first swap. Each server needs its own."""
    prepare_timeout_s: float = Field(default=3600.0, gt=0)
    """For every replica to have read the new weights."""
    commit_timeout_s: float = Field(default=300.0, gt=0)
    """For each step of taking them; a replica that overruns it is restarted."""
    watch_dir: Path | None = None
    """Directory whose new complete checkpoints are served by themselves; not given: none is watched."""
    watch_poll_s: float = Field(default=2.0, gt=0)
    """Between two looks at it."""
    watch_settle_s: float = Field(default=5.0, ge=0)
    """A checkpoint there counts as complete when its files have not changed for this long."""
    watch_marker: str = Field(default="", pattern=r"^[^/]*$")
    """Name of a file that says that the checkpoint beside it is complete; empty: watch_settle_s decides alone."""


class ServerConfig(BaseSettings):
    """All settings of `target-server serve`."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: ModelConfig = ModelConfig()
    """What is served."""
    listen: _Address = "127.0.0.1:50051"
    """HOST:PORT of the front; replicas listen on the same host. Port 0: any free port."""
    trusted_network: bool = False
    """Whether `listen` may be off loopback, where no encryption and no token keep anybody from reading or swapping."""
    devices: list[_Device] = Field(default=["cpu"], min_length=1)
    """Devices of the replicas in order, e.g. cuda:0,cuda:1; cpu may be given several times."""
    replica: ReplicaConfig = ReplicaConfig()
    """How replica processes are made."""
    limits: LimitsConfig = LimitsConfig()
    """What a session may ask for."""
    buffers: BuffersConfig = BuffersConfig()
    """Memory between the forward and the wire."""
    metrics: MetricsConfig = MetricsConfig()
    """What can be watched."""
    hardware: HardwareConfig = HardwareConfig()
    """What the memory plan is held against."""
    swap: SwapConfig = SwapConfig()
    """How the served weights may be replaced while the server runs."""
    deadlines: DeadlinesConfig = DeadlinesConfig()
    """How long each wait may last."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_others: PydanticBaseSettingsSource,
        **_more: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Takes only what the constructor is given: `load_config` merges the layers, so that it can name the winner."""
        return (init_settings,)

    @model_validator(mode="after")
    def _check_across(self) -> ServerConfig:
        if len(self.devices) % self.replica.devices_per_replica:
            raise ValueError(
                f"replica.devices_per_replica: {self.replica.devices_per_replica}: "
                f"{len(self.devices)} devices can't be divided evenly; give a divisor or other devices"
            )
        if self.replica.devices_per_replica > 1 and "cpu" in self.devices:
            raise ValueError(
                "devices: cpu: a model is spread over accelerators only; give cuda devices, or leave out "
                "replica.devices_per_replica"
            )
        if self.replica.socket_dir is not None and (self.replica.port_base or self.replica.advertise_host):
            raise ValueError(
                f"replica.socket_dir: {self.replica.socket_dir}: a Unix socket has no port and no host; leave out "
                "replica.port_base and replica.advertise_host, or socket_dir"
            )
        if self.buffers.host_slot_count <= self.limits.max_session_count:
            raise ValueError(
                f"buffers.host_slot_count: {self.buffers.host_slot_count}: each of limits.max_session_count "
                f"{self.limits.max_session_count} sessions owns one slot; give at least one more than that"
            )
        return self

    @property
    def host(self) -> str:
        """Host part of `listen`."""
        return self.listen.rpartition(":")[0]

    @property
    def port(self) -> int:
        """Port part of `listen`."""
        return int(self.listen.rpartition(":")[2])

    def replica_socket(self, index: int) -> str:
        """Address of a replica's Unix socket, "unix:PATH"; empty where data endpoints are TCP."""
        directory = self.replica.socket_dir
        return f"unix:{directory.resolve()}/replica-{index}.sock" if directory is not None else ""

    @property
    def replica_devices(self) -> list[list[str]]:
        """Devices of each replica."""
        size = self.replica.devices_per_replica
        return [self.devices[start : start + size] for start in range(0, len(self.devices), size)]
