"""Meets the served target before a run: waits for it, and checks that settings and data fit what it serves."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from target_wire.spec import PROTOCOL_VERSION, DType
from target_wire.v1 import target_pb2 as pb

from drafter_trainer.client.discovery import DescribedTarget, TargetAbsentError, TargetsDifferError, wait_for_target
from drafter_trainer.config import TrainerConfig
from drafter_trainer.dataset import TokenDataset
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.drafter_shape import read_model_config, resolve_drafter_config
from drafter_trainer.errors import TargetChangedError, TargetUnavailableError, UserError
from drafter_trainer.features import FeatureLayout
from drafter_trainer.head import final_norm_offset
from drafter_trainer.tokenizer import resolve_mask_token_id
from drafter_trainer.types import Version
from drafter_trainer.warm_start import read_start_config

__all__ = ["Target", "meet_target"]

logger = logging.getLogger(__name__)

WIRE_DTYPES = {"bf16": DType.BFLOAT16, "fp16": DType.FLOAT16, "fp32": DType.FLOAT32}


@dataclasses.dataclass(frozen=True)
class Target:
    """The served target as this run uses it."""

    described: DescribedTarget
    wire_dtype: DType
    drafter_config: DrafterConfig
    layout: FeatureLayout
    """Which of its states the run reads."""

    @property
    def version(self) -> Version:
        """What is served at the start."""
        version = self.described.response.version
        return Version(version.number, version.digest)

    def at(self, version: Version) -> Target:
        """The same target as it was when another version was served."""
        response = pb.DescribeTargetResponse()
        response.CopyFrom(self.described.response)
        response.version.number, response.version.digest = version.number, version.digest
        return dataclasses.replace(self, described=dataclasses.replace(self.described, response=response))

    @property
    def facts(self) -> dict[str, Any]:
        """For the record."""
        model = self.described.response.model
        return {
            "address": self.described.address,
            "name": model.name,
            "architecture": model.architecture,
            "version": self.version.number,
            "digest": self.version.digest,
            "tokenizer_digest": model.tokenizer_digest,
        }


def meet_target(config: TrainerConfig, dataset: TokenDataset) -> Target:
    """Waits for the server and checks that the settings fit what it serves.

    Raises:
        UserError: They don't.
        TargetUnavailableError: Nobody has answered in time.
        TargetChangedError: The server speaks another version of the contract.
    """
    try:
        described = wait_for_target(
            config.target.addresses,
            timeout_s=config.target.wait_timeout_s,
            say=logger.info,
            call_timeout_s=config.target.connect_timeout_s,
        )
    except TargetAbsentError as error:
        raise TargetUnavailableError(f"{error}; start it, or raise target.wait_timeout_s") from error
    except TargetsDifferError as error:
        addresses = ",".join(config.target.addresses)
        raise UserError("target.addresses", addresses, f"{error}; give servers of one target") from error
    response = described.response
    if response.protocol_version != PROTOCOL_VERSION:
        raise TargetChangedError(
            f"{described.address} speaks version {response.protocol_version} of the contract, "
            f"this trainer {PROTOCOL_VERSION}; install the same release on both sides"
        )
    check_expected(config, response.model)
    if config.batch.max_tokens > response.max_batch_token_count:
        fix = (
            f"the server takes {response.max_batch_token_count} tokens a batch; give at most that, or raise its limits"
        )
        raise UserError("batch.max_tokens", config.batch.max_tokens, fix)
    check_data_fits(config, dataset, response)
    drafter_config = resolve_drafter(config, described, dataset)
    layout = feature_layout(config, described, drafter_config)
    return Target(described, resolve_wire_dtype(config, described), drafter_config, layout)


def feature_layout(config: TrainerConfig, described: DescribedTarget, drafter: DrafterConfig) -> FeatureLayout:
    """The states to ask for: the drafter's taps, and the last block's where distillation reads it.

    Raises:
        UserError: Distillation from a target whose final norm isn't known.
    """
    model = described.response.model
    if config.loss.distill is None:
        return FeatureLayout(drafter.target_layer_ids, drafter.hidden_size)
    if final_norm_offset(model.architecture) is None:
        fix = f"the final norm of {model.architecture} isn't known, so what it predicts isn't either; leave it out"
        raise UserError("loss.distill", config.loss.distill, fix)
    return FeatureLayout(drafter.target_layer_ids, drafter.hidden_size, model.layer_count - 1)


def check_expected(config: TrainerConfig, model: pb.TargetModel) -> None:
    """Refuses another target than the settings say.

    Raises:
        UserError: A size differs.
    """
    served = {"hidden_size": model.hidden_size, "num_layers": model.layer_count, "vocab_size": model.vocab_size}
    for name, value in served.items():
        expected = getattr(config.target, name)
        if expected is not None and expected != value:
            raise UserError(f"target.{name}", expected, f"the served {model.name} has {value}; serve another target")


def check_data_fits(config: TrainerConfig, dataset: TokenDataset, response: pb.DescribeTargetResponse) -> None:
    """Refuses data that the server would refuse batch by batch.

    Raises:
        UserError: A sample is too long, or a token isn't in the target's vocabulary.
    """
    longest, limit = dataset.meta.longest_tokens, response.max_sequence_token_count
    if longest > limit:
        fix = (
            f"the longest sample has {longest} tokens and the server takes {limit} a sequence; give at most that "
            "(and prepare again), or raise the server's limits.max_sequence_token_count"
        )
        raise UserError("data.max_length_tokens", config.max_length_tokens, fix)
    largest, vocab_size = dataset.meta.largest_token_id, response.model.vocab_size
    if largest >= vocab_size:
        fix = (
            f"the data has token {largest}, the target's vocabulary {vocab_size} rows; give the target's own tokenizer"
        )
        raise UserError("data.tokenizer", config.data.tokenizer, fix)


def resolve_drafter(config: TrainerConfig, described: DescribedTarget, dataset: TokenDataset) -> DrafterConfig:
    """The drafter's shape for the served target."""
    model = described.response.model
    start = read_start_config(config.drafter.init_from) if config.drafter.init_from is not None else None
    mask_token_id = config.drafter.mask_token_id
    if mask_token_id is None and start is not None:
        mask_token_id = start.mask_token_id
    return resolve_drafter_config(
        config.drafter,
        model,
        mask_token_id=resolve_mask_token_id(mask_token_id, dataset.meta.tokenizer, vocab_size=model.vocab_size),
        model_config=read_model_config(config.data.tokenizer),
        start=start,
    )


def resolve_wire_dtype(config: TrainerConfig, described: DescribedTarget) -> DType:
    """The features' type: the target's own, which is also the only one a server gives.

    Raises:
        UserError: Another one was asked for.
    """
    served = DType.from_number(described.response.model.dtype)
    wanted = WIRE_DTYPES.get(config.target.wire_dtype, served)
    if wanted != served:
        raise UserError("target.wire_dtype", config.target.wire_dtype, f"the target is served in {served}; give auto")
    return served
