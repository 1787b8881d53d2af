"""What a rank needs, worked out before anything is loaded: parameters, device memory, tokens.

Pure arithmetic on settings; no torch. Activations are an estimate of the tensors that wait for the backward pass; the
rest is exact to a few percent of the allocator's rounding.

Shapes: E hidden, I MLP width, N query heads, M key heads, H head dim, V vocab, Q block tokens, T packed tokens.
"""

from __future__ import annotations

import dataclasses

from drafter_trainer.config import TrainerConfig
from drafter_trainer.drafter_config import DrafterConfig

__all__ = ["MemoryPlan", "count_parameters", "plan_memory"]

FP32_BYTES = 4


def count_parameters(config: DrafterConfig) -> int:
    """Trainable parameters of a drafter of this shape."""
    size, head = config.hidden_size, config.head_dim
    attention = 2 * size * head * (config.num_attention_heads + config.num_key_value_heads) + 2 * head
    layer = attention + 3 * size * config.intermediate_size + 2 * size
    return (len(config.target_layer_ids) * size + 2) * size + config.num_hidden_layers * layer


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank by what they are for; all but the window on the device."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    average: int
    head: int
    features: int
    logits: int
    activations: int
    window: int
    sequence_tokens: int
    """Tokens of the sequences that the activations are estimated for: shorter ones have more anchors a token."""

    @property
    def device(self) -> int:
        """On the rank's device in all."""
        parts = dataclasses.asdict(self)
        return sum(value for name, value in parts.items() if name not in ("parameters", "window", "sequence_tokens"))

    def lines(self) -> list[str]:
        """For people."""
        names = ("weights", "gradients", "optimizer", "average", "head", "features", "logits", "activations")
        parts = ", ".join(f"{name} {_gb(getattr(self, name))}" for name in names if getattr(self, name))
        return [
            f"memory    about {_gb(self.device)} GB a rank on its device, without FSDP2: {parts}",
            f"          (activations for sequences of {self.sequence_tokens:,} tokens), and {_gb(self.window)} GB of "
            "host memory a rank for batches on their way",
        ]


def plan_memory(
    config: TrainerConfig,
    drafter: DrafterConfig,
    *,
    compute_bytes: int,
    tied: bool,
    sequence_tokens: int | None = None,
) -> MemoryPlan:
    """Adds up a rank's memory for the largest micro-batch.

    Args:
        config: The settings.
        drafter: The drafter's shape.
        compute_bytes: Of an element of the compute type: 2 for bf16.
        tied: Whether the target's head is its embedding.
        sequence_tokens: Usual length of a sequence; by default the longest.
    """
    sequence_tokens = sequence_tokens or config.max_length_tokens
    parameters = count_parameters(drafter)
    matrices_only = config.optim.algorithm == "muon"
    taps = len(drafter.target_layer_ids) + (config.loss.distill is not None)
    weights = parameters * FP32_BYTES
    vocabulary = drafter.vocab_size if config.loss.sampled_vocabulary is None else config.loss.sampled_vocabulary
    return MemoryPlan(
        parameters=parameters,
        weights=weights,
        gradients=weights,
        optimizer=weights if matrices_only else 2 * weights,
        average=weights if config.optim.ema_decay is not None else 0,
        head=drafter.vocab_size * drafter.hidden_size * compute_bytes * (1 if tied else 2),
        features=config.batch.max_tokens * taps * drafter.hidden_size * compute_bytes,
        logits=config.loss.chunk_rows * vocabulary * FP32_BYTES * (2 if config.loss.distill else 1),
        activations=_activations(config, drafter, compute_bytes, sequence_tokens),
        window=config.target.window_bytes,
        sequence_tokens=sequence_tokens,
    )


def _activations(config: TrainerConfig, drafter: DrafterConfig, compute_bytes: int, sequence_tokens: int) -> int:
    """Tensors kept for the backward pass."""
    sequences = max(1, min(config.batch.max_sequences, config.batch.max_tokens // sequence_tokens))
    blocks = min(sequences * config.anchors.num_anchors, config.batch.max_tokens)
    block_tokens = blocks * drafter.block_size
    size, attention = drafter.hidden_size, drafter.num_attention_heads * drafter.head_dim
    key_value = 2 * drafter.num_key_value_heads * drafter.head_dim
    # Per block token: two norms' inputs and outputs and two residuals; queries, keys, values and the attention's
    # output; three tensors as wide as the MLP. Per context token: keys and values before and after norm and rotation.
    by_block_token = 6 * size + 3 * attention + 2 * key_value + 3 * drafter.intermediate_size
    by_context_token = 2 * key_value
    layer = block_tokens * by_block_token + config.batch.max_tokens * by_context_token
    kept = drafter.num_hidden_layers * block_tokens * size + layer if config.run.recompute_layers else None
    total = kept if kept is not None else drafter.num_hidden_layers * layer
    # Besides: the final rows and, for supervised slots, the gradient that the loss keeps.
    return (total + 3 * block_tokens * size) * compute_bytes


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f}" if count < 1e10 else f"{count / 1e9:.1f}"
