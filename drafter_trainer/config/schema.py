"""Every setting of the trainer: its type, range, unit, default and meaning.

Owns the schema and the rules between fields. Reads no file, no environment and no flag (`resolve` does), contacts
nothing and imports no torch, so that a mistake is told before anything is loaded. Frozen; unknown keys are refused.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from drafter_trainer.errors import UserError

ENV_PREFIX = "TRIBUTARY_TRAINER__"

# The published length of training samples (DFlash, appendix A.1).
_USUAL_LENGTH_TOKENS = 3072
# The paper's pairs of block size and gamma (DFlash, appendix A.1).
_PUBLISHED_GAMMAS = ((8, 4.0), (10, 5.0), (16, 7.0))


def _split_commas(value: Any) -> Any:
    """Lets a list be given as `a,b` or `[a, b]` on the command line and in the environment."""
    if isinstance(value, str):
        return [part.strip() for part in value.strip().removeprefix("[").removesuffix("]").split(",") if part.strip()]
    return value


def _split_pairs(value: Any) -> Any:
    """Lets a mapping be given as `key=value,key=value` or as JSON; values are read as YAML reads them."""
    if not isinstance(value, str):
        return value
    try:
        if value.lstrip().startswith("{"):
            return yaml.safe_load(value)
        pairs = [part.partition("=") for part in _split_commas(value)]
        return {key.strip(): yaml.safe_load(text) for key, _, text in pairs}
    except yaml.YAMLError as error:
        raise ValueError("give key=value,key=value or JSON") from error


def _check_device_name(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError("give auto, cpu, cuda or cuda:N")
    return value


StrList = Annotated[tuple[str, ...], BeforeValidator(_split_commas)]
IntList = Annotated[tuple[int, ...], BeforeValidator(_split_commas)]
RoleMap = Annotated[
    dict[str, Literal["system", "developer", "user", "assistant", "tool"]], BeforeValidator(_split_pairs)
]
ScalarMap = Annotated[dict[str, bool | int | float | str], BeforeValidator(_split_pairs)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_split_commas)]


class Section(BaseModel):
    """A group of settings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, protected_namespaces=()
    )


class TargetSection(Section):
    """Where the target's features come from."""

    addresses: StrList = ()
    """Servers' fronts as HOST:PORT; replicas are found through them."""
    wait_timeout_s: float = Field(default=600.0, gt=0)
    """How long to wait for a first replica, and later for one to come back when all are gone."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    """Deadline of one connection attempt."""
    request_timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait for a batch after its request was sent; then another replica is asked."""
    attempts_per_batch: int = Field(default=8, ge=1)
    """How often one batch is asked for before the run stops."""
    retry_backoff_s: float = Field(default=0.25, ge=0)
    """Pause before the second attempt; doubles with each further one."""
    retry_backoff_max_s: float = Field(default=10.0, ge=0)
    """Longest pause between attempts."""
    window_bytes: int = Field(default=256 * 2**20, ge=2**16)
    """Bytes of features that may be on the way or waiting, per rank. Must hold the largest micro-batch."""
    requests_ahead: int = Field(default=4, ge=1, le=1024)
    """Micro-batches requested ahead of the one in training, as far as the window allows."""
    feature_cache_bytes: int = Field(default=0, ge=0)
    """Host memory, per rank, in which features are kept so that later epochs don't ask the target again. 0: none, and a
    resumed run repeats an unbroken one bit for bit."""
    on_target_change: Literal["follow", "finish_step_then_follow", "stop"] = "follow"
    """When other weights are served (a swap, or a restart with another checkpoint of the same shape). follow: train on
    with them, each batch with its own version's head; a step may hold both. finish_step_then_follow: the same, but no
    step mixes them; one that would is made again. stop: checkpoint, then end with exit code 2."""
    shared_memory: Literal["auto", "off"] = "auto"
    """How features come from replicas on this host. auto: through shared memory where that can be had, at half of the
    CPU time; off: always on the gRPC stream, as from other hosts."""
    wire_dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Element type of the features on the wire; auto takes the target's own."""
    hidden_size: int | None = Field(default=None, ge=1)
    """Width that the target must have; `--dry-run` plans with it where there's no config.json by the tokenizer."""
    num_layers: int | None = Field(default=None, ge=1)
    """Decoder layers that the target must have; as hidden_size."""
    vocab_size: int | None = Field(default=None, ge=2)
    """Rows that the target's embedding must have; as hidden_size."""


class DataSection(Section):
    """What is trained on and how it becomes tokens."""

    path: Path | None = None
    """JSON Lines of conversations, or a directory that `prepare` wrote."""
    tokenizer: Path | None = None
    """Directory of the target's tokenizer, with its chat template. Needed to prepare."""
    prepared_dir: Path | None = None
    """Where `prepare` writes; by default `<path>.prepared`."""
    max_length_tokens: int | None = Field(default=None, ge=2)
    """Longest sample; by default 3072, or batch.max_tokens where that is less."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """What happens to a longer one; truncating keeps its beginning."""
    min_supervised_tokens: int = Field(default=2, ge=2)
    """Samples with fewer supervised tokens are dropped. Two adjacent ones are needed in any case."""
    rewritten_history: Literal["split", "drop"] = "split"
    """When the template renders earlier turns otherwise than they were answered: one sample a turn, or none."""
    template_options: ScalarMap = {}
    """Extra variables for the chat template, such as enable_thinking=false. Use what serving uses."""
    max_dropped_ratio: float = Field(default=0.5, ge=0, le=1)
    """Part of the rows that may be dropped because they are no conversations; 1 to train on whatever is left."""
    role_aliases: RoleMap = {}
    """More names for roles, such as my_model=assistant."""
    num_workers: int = Field(default=1, ge=1, le=256)
    """Processes that tokenise."""
    wait_timeout_s: float = Field(default=3600.0, gt=0)
    """How long to wait while another process prepares the same data."""


class DrafterSection(Section):
    """The drafter's shape. What is left out follows the target."""

    num_layers: int = Field(default=5, ge=1, le=64)
    """Decoder layers."""
    block_size: int = Field(default=16, ge=2, le=256)
    """Tokens of a block: the anchor and block_size - 1 drafted ones."""
    target_layer_ids: IntList | None = None
    """Target blocks whose outputs are tapped, from 0. By default spread as published, one per drafter layer."""
    mask_token_id: int | None = Field(default=None, ge=0)
    """Row of the target's embedding that means "to be drafted"; by default the tokenizer's or the first unused row."""
    num_attention_heads: int | None = Field(default=None, ge=1)
    """Query heads; by default the target's."""
    num_key_value_heads: int | None = Field(default=None, ge=1)
    """Key and value heads; by default the target's."""
    head_dim: int | None = Field(default=None, ge=2)
    """Width of one head; by default the target's."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the MLP; by default the target's."""
    rope_theta: float | None = Field(default=None, gt=0)
    """Base of the rotary embedding; by default the target's."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of every RMSNorm."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Tokens that sliding layers see back, the current one included; none means full attention everywhere."""
    full_attention_layers: int = Field(default=1, ge=0)
    """With a sliding window: how many of the last layers still see everything."""
    init_target_layers: Path | None = None
    """Local directory of the target, whose last blocks become the first weights of the layers (Llama, Mistral, Qwen2,
    Qwen3). Learns faster where steps are few."""
    init_from: Path | None = None
    """Exported drafter or checkpoint to start from instead of random weights."""


class AnchorsSection(Section):
    """Where blocks start."""

    num_anchors: int = Field(default=512, ge=1)
    """Anchors drawn per sequence and visit, or as many as are eligible."""


class LossSection(Section):
    """What is minimised."""

    type: Literal["ce", "dpace"] = "ce"
    """ce: cross-entropy weighted by exp(-(slot - 1) / gamma). dpace: weights from the drafter's own confidence."""
    gamma: float | None = Field(default=None, gt=0)
    """Decay over slots; by default the paper's for the block size (7 for 16, 5 for 10, 4 for 8)."""
    dpace_alpha: float = Field(default=0.5, ge=0, le=1)
    """Smoothing of D-PACE confidences."""
    distill: Literal["kl", "tv", "lk"] | None = None
    """Also compare with the target's own distribution: Kullback-Leibler, total variation, or their LK hybrid. Asks the
    target for its last block's output too. None: labels only."""
    distill_weight: float = Field(default=0.5, gt=0, le=1)
    """With distill: its share of the loss; cross-entropy has the rest."""
    chunk_rows: int = Field(default=128, ge=1)
    """As many logits exist at one time as this many slots have; bounds memory to chunk_rows x vocabulary."""
    sampled_vocabulary: int | None = Field(default=None, ge=2)
    """Rows of the head in the softmax: the batch's labels, the answers' most frequent tokens (half of the rows) and a
    random rest that stands for all others. None uses all."""


class BatchSection(Section):
    """How samples become micro-batches and steps."""

    max_tokens: int = Field(default=8192, ge=2)
    """Most tokens in a micro-batch."""
    max_sequences: int = Field(default=64, ge=1)
    """Most sequences in a micro-batch."""
    accumulation: int = Field(default=1, ge=1)
    """Micro-batches that each rank takes per optimizer step."""
    shuffle_window_samples: int = Field(default=4096, ge=1)
    """Samples within which lengths are sorted into micro-batches. Larger packs tighter, smaller shuffles better."""


class OptimSection(Section):
    """How the weights are updated, and when an update is left out."""

    algorithm: Literal["adamw", "muon"] = "adamw"
    """adamw for everything, or muon for matrices and adamw for norm gains."""
    lr: float = Field(default=6e-4, gt=0)
    """Highest learning rate. Muon's updates are scaled to the size of AdamW's, so one rate serves both."""
    betas: Betas = (0.9, 0.999)
    """AdamW's decay of both moments."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's: added to the denominator."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after the warm-up; wsd is constant, then linear over the last decay_ratio of all steps."""
    warmup_ratio: float = Field(default=0.04, ge=0, le=1)
    """Part of all steps in which the rate rises linearly."""
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """With wsd: part of all steps in which the rate falls."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Part of lr that remains at the end."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest global gradient norm."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Keep a moving average of the weights with this decay (such as 0.999); it is what is evaluated and exported. None
    keeps none."""
    max_skipped_steps: int = Field(default=10, ge=1)
    """Steps in a row with something not finite before the run stops."""
    spike_factor: float | None = Field(default=2.0, gt=1)
    """Warn of a loss this many times the median of the 100 steps before; none warns of none."""


class RunSection(Section):
    """One run: how long, where, with what."""

    dir: Path | None = None
    """Run directory: metrics, checkpoints, provenance."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps to train. Give this or epochs."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the data; 6 when neither is given, as published."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds the order, the anchors and the initial weights."""
    device: Annotated[str, AfterValidator(_check_device_name)] = "auto"
    """auto, cpu, cuda or cuda:N. auto takes a GPU where there is one."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type of the drafter; masters are always fp32. auto: bf16 where the hardware multiplies it fast."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch; by default its own choice."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several ranks hold the drafter. ddp: each has all of it. fsdp: weights, gradients and moments are spread over
    them, for a drafter that doesn't fit; its layers are gathered for every pass. Checkpoints are the same."""
    recompute_layers: bool = False
    """Run each drafter layer again in the backward pass instead of keeping what is in it: less memory, a third more
    time."""
    compile_drafter: bool = False
    """Compile the drafter's MLPs with torch.compile: the first steps take longer, and a C++ compiler is needed."""
    profile_stats: bool = False
    """Time the parts of a step (`parts_s` in the metrics) with device events; nothing waits for them."""
    bottleneck_every_steps: int = Field(default=100, ge=1)
    """Steps between lines that say which side waits for the other and what to change."""
    checkpoint_every_steps: int = Field(default=500, ge=1)
    """Steps between checkpoints; one is always written at the end."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Newest checkpoints that are kept."""
    keep_dumps: int = Field(default=3, ge=0)
    """Batches with something not finite that are kept in run.dir/bad for `replay`; each with the drafter's weights."""
    log_every_steps: int = Field(default=10, ge=1)
    """Steps between lines on the console; the metrics file has every step."""
    resume: Literal["auto", "never", "require"] = "auto"
    """auto: go on from run.dir's newest checkpoint, if any; never: refuse a used run.dir; require: there must be."""
    allow_changed: StrList = ()
    """Dotted settings that may differ from the checkpoint's on resume."""
    tensorboard: bool = True
    """Also write TensorBoard files."""


class EvaluateSection(Section):
    """Acceptance length: by real decoding in `evaluate`, simulated while training."""

    prompts: Path | None = None
    """JSON Lines of held-out prompts, or of conversations, whose last answers are then left out."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Prompts to use from the start of the file; by default all."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Tokens generated per prompt."""
    target_model: Path | None = None
    """Local directory of the target, loaded by `evaluate` itself."""
    checkpoint: Path | None = None
    """Exported drafter or checkpoint; by default run.dir's newest checkpoint."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type of target and drafter."""
    block_size: int | None = Field(default=None, ge=2)
    """Block length to decode with; by default the trained one."""
    speed_prompts: int | None = Field(default=None, ge=0)
    """Prompts that are also timed, plain and with blocks; by default all, 0 for none."""
    every_steps: int | None = Field(default=None, ge=1)
    """Training steps between simulated acceptance lengths; by default as run.log_every_steps."""


class TrainerConfig(BaseSettings):
    """All settings of drafter-trainer. Build it with `resolve_config`; constructing it directly reads nothing else."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        enable_decoding=False,
    )

    target: TargetSection = TargetSection()
    data: DataSection = DataSection()
    drafter: DrafterSection = DrafterSection()
    anchors: AnchorsSection = AnchorsSection()
    loss: LossSection = LossSection()
    batch: BatchSection = BatchSection()
    optim: OptimSection = OptimSection()
    run: RunSection = RunSection()
    evaluate: EvaluateSection = EvaluateSection()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Takes only what it is given: layering, and which layer won, is `resolve_config`'s job."""
        return (init_settings,)

    @model_validator(mode="after")
    def _check_rules_between_fields(self) -> TrainerConfig:
        if self.run.steps is not None and self.run.epochs is not None:
            raise UserError("run.epochs", self.run.epochs, "run.steps is set too; give one of them")
        if self.loss.distill is not None and self.loss.sampled_vocabulary is not None:
            fix = "loss.sampled_vocabulary is set too, and a divergence needs the whole head; give one of them"
            raise UserError("loss.distill", self.loss.distill, fix)
        if self.max_length_tokens > self.batch.max_tokens:
            fix = f"a micro-batch holds {self.batch.max_tokens} tokens; give at most that, or raise batch.max_tokens"
            raise UserError("data.max_length_tokens", self.max_length_tokens, fix)
        return self

    @property
    def gamma(self) -> float:
        """The loss's decay: as given, or the paper's for the block size."""
        return self.loss.gamma if self.loss.gamma is not None else default_gamma(self.drafter.block_size)

    @property
    def max_length_tokens(self) -> int:
        """Longest sample: as given, or the usual length, which must fit a micro-batch."""
        given = self.data.max_length_tokens
        return min(_USUAL_LENGTH_TOKENS, self.batch.max_tokens) if given is None else given

    @property
    def epochs(self) -> int | None:
        """Epochs to train, or None where `run.steps` limits the run."""
        return None if self.run.steps is not None else self.run.epochs or 6


def default_gamma(block_size: int) -> float:
    """The paper's gamma for a block size, on straight lines between the published pairs.

    Below 8 it is half the block size, above 16 it stays at 7.
    """
    if block_size <= _PUBLISHED_GAMMAS[0][0]:
        return block_size / 2
    for (low, low_gamma), (high, high_gamma) in pairwise(_PUBLISHED_GAMMAS):
        if block_size <= high:
            return low_gamma + (high_gamma - low_gamma) * (block_size - low) / (high - low)
    return _PUBLISHED_GAMMAS[-1][1]
