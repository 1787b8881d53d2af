"""A frozen target in this process, driven token by token with a KV cache: the target's side of decoding.

Owns the cache of one sequence: prefill, extension by a few rows, and taking rows back after a rejected draft. Owns
the hooks that keep the tapped blocks' outputs, and nothing of the other blocks'. Must never sample: it hands out
logits.

Taking rows back differs by layer. Attention layers crop their last keys (transformers counts rows to remove,
negatively); sliding layers must be told beforehand to keep what leaves the window. Recurrent layers (linear
attention, Mamba) can't undo a step at all, and transformers' own `crop` leaves their state wrong without an error:
they are copied before a block is run, put back, and the rows that stay are run again.

Shapes: R rows, L taps, D hidden, C = L*D, V vocab.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

__all__ = ["Rows", "TargetRunner", "decoder_blocks"]


@dataclass(frozen=True)
class Rows:
    """What one forward of the target gave.

    Attributes:
        logits_RV: Logits in the model's dtype; of the last row alone after `prefill`.
        features_RC: Outputs of the tapped blocks of every row, concatenated in tap order; None without taps.
    """

    logits_RV: Tensor
    features_RC: Tensor | None


def decoder_blocks(model: nn.Module) -> nn.ModuleList:
    """Return the decoder blocks of any transformers causal LM, text part of a multimodal one included."""
    return model.get_decoder().layers  # type: ignore[operator, no-any-return]


class TargetRunner:
    """One sequence at a time through a frozen transformers causal LM.

    Not thread-safe. `prefill` starts a new sequence and drops the previous one.

    Args:
        model: The target, in eval mode; used, never changed.
        target_layer_ids: Tapped blocks, 0-based: a tap is the block's output residual stream. Empty taps nothing.
    """

    def __init__(self, model: Any, *, target_layer_ids: Sequence[int] = ()) -> None:
        blocks = decoder_blocks(model)
        wrong = [i for i in target_layer_ids if not 0 <= i < len(blocks)]
        if wrong:
            raise ValueError(f"target_layer_ids {wrong} are not in a target of {len(blocks)} layers")
        self.model = model
        self.target_layer_ids = tuple(target_layer_ids)
        self._tapped = [blocks[i] for i in self.target_layer_ids]
        self._text_config = model.config.get_text_config(decoder=True)
        # transformers 5.24 renames the argument and warns about the old name; 5.20 knows the old one alone.
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._rollback = _Rollback(DynamicCache(config=self._text_config))

    @property
    def device(self) -> torch.device:
        """Where token ids are wanted."""
        return self.model.get_input_embeddings().weight.device  # type: ignore[no-any-return]

    def prefill(self, token_ids: Tensor) -> Rows:
        """Start a sequence with int64 ids [R], R >= 1: logits of the last row, features of all of them."""
        self._rollback = _Rollback(DynamicCache(config=self._text_config))
        rows = self._forward(token_ids, logits_to_keep=1)
        self._rollback.trim()
        return rows

    def extend(self, token_ids: Tensor) -> Rows:
        """Run the next int64 ids [R] of the sequence; `keep` must follow before the next call.

        Returns:
            Logits and features of all R rows.
        """
        self._rollback.before(token_ids)
        return self._forward(token_ids, logits_to_keep=0)

    def keep(self, count: int) -> None:
        """Keep the first `count` rows of the last `extend`, as if it had been called with them alone."""
        again = self._rollback.keep(count)
        if again is not None:
            self._trunk(again)
            self._rollback.trim()

    def _forward(self, token_ids: Tensor, *, logits_to_keep: int) -> Rows:
        with _taps(self._tapped) as tapped:
            output = self.model(
                token_ids[None],
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{self._cache_argument: self._rollback.cache},
            )
        features = torch.cat([tapped[i] for i in range(len(tapped))], dim=-1)[0] if tapped else None
        return Rows(output.logits[0], features)

    def _trunk(self, token_ids: Tensor) -> None:
        self.model.get_decoder()(token_ids[None], use_cache=True, **{self._cache_argument: self._rollback.cache})


@contextmanager
def _taps(blocks: Sequence[nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Collect what `blocks` put out during one forward, by their index."""
    kept: dict[int, Tensor] = {}

    def hook(index: int) -> Any:
        def collect(_module: nn.Module, _args: Any, output: Any) -> None:
            kept[index] = output if isinstance(output, Tensor) else output[0]

        return collect

    handles = [block.register_forward_hook(hook(i)) for i, block in enumerate(blocks)]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Rollback:
    """A cache that can forget the last rows it was given."""

    cache: DynamicCache
    _rows: Tensor | None = None
    _before: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for layer in self.cache.layers:
            if not _is_recurrent(layer) and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def before(self, token_ids: Tensor) -> None:
        """Remember what can't be undone, before `token_ids` are run."""
        self._rows = token_ids
        if token_ids.numel() > 1:  # a single row is always kept
            layers = enumerate(self.cache.layers)
            self._before = {i: copy.deepcopy(layer) for i, layer in layers if _is_recurrent(layer)}

    def keep(self, count: int) -> Tensor | None:
        """Forget all but the first `count` of the remembered rows; returns rows to run again, if any."""
        assert self._rows is not None, "keep() without a preceding extend()"
        rows, self._rows = self._rows, None
        before, self._before = self._before, {}
        surplus = rows.numel() - count
        assert 0 < count <= rows.numel(), "at least one row is kept"
        if not before or not surplus:
            self.trim(surplus)
            return None
        for index, layer in enumerate(self.cache.layers):
            if index in before:
                self.cache.layers[index] = before[index]
            else:
                layer.crop(-rows.numel())
        return rows[:count]

    def trim(self, surplus: int = 0) -> None:
        """Drop the last `surplus` rows of attention layers, and what sliding layers keep beyond their window."""
        for layer in self.cache.layers:
            if not _is_recurrent(layer):
                layer.crop(-surplus)


def _is_recurrent(layer: Any) -> bool:
    # `is_croppable` says so too, but only once the layer has run.
    return hasattr(layer, "recurrent_states") or not getattr(type(layer), "is_croppable", False)
