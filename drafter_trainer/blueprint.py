"""Everything a run is decided by, worked out from its settings before anything is trained.

Finds what's wrong with what the user gave in the order of cost: settings, data, then the server. Changes nothing, and
builds no weights.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch

from drafter_trainer.client.shape import Shape, shape_of
from drafter_trainer.client.terms import Patience, StreamTerms
from drafter_trainer.config import TrainerConfig, default_gamma
from drafter_trainer.dataset import TokenDataset
from drafter_trainer.devices import resolve_compute_dtype, resolve_device, resolve_num_threads
from drafter_trainer.errors import UserError
from drafter_trainer.meeting import Target, meet_target
from drafter_trainer.parallel import Ranks, join_ranks
from drafter_trainer.plan import Plan, PlanSettings
from drafter_trainer.preflight import check_addresses, check_run_dir
from drafter_trainer.prepare import check_longest_sample, open_configured_dataset
from drafter_trainer.run_dir import RunDir
from drafter_trainer.trainer import LoopSettings
from drafter_trainer.types import Version

__all__ = ["Blueprint", "Machine", "check_settings", "draw_blueprint", "prepare_machine"]

logger = logging.getLogger(__name__)

# A server under one of these is on this machine and needs CPU too.
LOOPBACK_PREFIXES = ("127.", "localhost:", "[::1]:", "unix:")
# Settings of these sections that bound memory or patience and don't change what is learned.
HARMLESS_SETTINGS = frozenset({"chunk_rows", "max_skipped_steps", "spike_factor"})


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where a rank computes."""

    ranks: Ranks
    device: torch.device
    compute_dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """A run, decided."""

    config: TrainerConfig
    run_dir: RunDir
    machine: Machine
    dataset: TokenDataset
    plan: Plan
    loop: LoopSettings
    target: Target
    terms: StreamTerms

    @property
    def shape(self) -> Shape:
        """What the target must stay while the run goes on."""
        return shape_of(
            self.target.described.response,
            max_batch_tokens=self.config.batch.max_tokens,
            max_sequence_tokens=self.dataset.meta.longest_tokens,
        )

    @property
    def gamma(self) -> float:
        """The loss's decay: as given, or the paper's for the drafter's block size."""
        given = self.config.loss.gamma
        return given if given is not None else default_gamma(self.target.drafter_config.block_size)

    @property
    def identity(self) -> dict[str, Any]:
        """What would silently change the training if it changed on resume, by setting."""
        config, plan = self.config, self.plan.settings
        drafter = {f"drafter.{name}": value for name, value in dataclasses.asdict(self.target.drafter_config).items()}
        sections = {"anchors": config.anchors, "loss": config.loss, "optim": config.optim}
        settings = {
            f"{section}.{name}": value
            for section, values in sections.items()
            for name, value in values.model_dump(mode="json").items()
            if name not in HARMLESS_SETTINGS
        }
        return {
            **drafter,
            **settings,
            "data.fingerprint": self.plan.source.fingerprint,
            "batch.max_tokens": plan.max_tokens,
            "batch.max_sequences": plan.max_sequences,
            "batch.shuffle_window_samples": plan.shuffle_window_samples,
            "batch.micro_batches_per_step": self.loop.micro_batches_per_step,
            "run.seed": plan.seed,
            "run.steps": self.loop.total_steps,
            "run.dtype": str(self.machine.compute_dtype),
            "loss.gamma": self.gamma,
            "target.digest": self.target.version.digest,
            "target.tokenizer_digest": self.target.described.response.model.tokenizer_digest,
            "target.wire_dtype": str(self.target.wire_dtype),
        }


def check_settings(config: TrainerConfig) -> RunDir:
    """Refuses what can be seen to be wrong from the settings alone.

    Raises:
        UserError: The first thing found.
    """
    check_addresses(config)
    return RunDir(check_run_dir(config))


def prepare_machine(config: TrainerConfig) -> Machine:
    """Joins the ranks, takes a device, sets torch's threads.

    Raises:
        UserError: A device that isn't there.
    """
    wants_cuda = config.run.device != "cpu" and torch.cuda.is_available()
    ranks = join_ranks(device_type="cuda" if wants_cuda else "cpu")
    try:
        device = resolve_device(config.run.device, local_rank=ranks.local_rank)
    except ValueError as error:
        raise UserError("run.device", config.run.device, str(error)) from error
    if device.type == "cpu":
        local_servers = sum(address.startswith(LOOPBACK_PREFIXES) for address in config.target.addresses)
        processes = ranks.num_local_ranks + local_servers
        torch.set_num_threads(resolve_num_threads(config.run.num_threads, processes_here=processes))
    return Machine(ranks, device, resolve_compute_dtype(config.run.dtype, device))


def draw_blueprint(
    config: TrainerConfig, *, run_dir: RunDir, machine: Machine, dataset: TokenDataset | None = None
) -> Blueprint:
    """Opens the data (unless it's given), waits for the target, and decides the rest.

    Raises:
        UserError: Settings that don't fit the data or the target.
        TargetUnavailableError: Nobody has described the target in time.
    """
    dataset = open_data(config) if dataset is None else dataset
    check_longest_sample(dataset, max_tokens=config.batch.max_tokens)
    plan = Plan(
        dataset,
        PlanSettings(
            seed=config.run.seed,
            max_tokens=config.batch.max_tokens,
            max_sequences=config.batch.max_sequences,
            shuffle_window_samples=config.batch.shuffle_window_samples,
        ),
    )
    target = at_first_ranks_version(meet_target(config, dataset), machine.ranks)
    return Blueprint(
        config=config,
        run_dir=run_dir,
        machine=machine,
        dataset=dataset,
        plan=plan,
        loop=loop_settings(config, plan, machine.ranks),
        target=target,
        terms=stream_terms(config, target, client_name=f"{run_dir.root.name}/rank-{machine.ranks.rank}"[:128]),
    )


def at_first_ranks_version(target: Target, ranks: Ranks) -> Target:
    """The target at the version that the first rank was told: a swap may fall between two ranks' look at it.

    All ranks take part. What is served by now shows in the batches, and there all ranks see the same.
    """
    number, digest, *_ = ranks.gather_texts([str(target.version.number), target.version.digest])
    return target.at(Version(int(number), digest))


def open_data(config: TrainerConfig) -> TokenDataset:
    """The prepared dataset; prepared first where that's still to do."""
    return open_configured_dataset(config)


def loop_settings(config: TrainerConfig, plan: Plan, ranks: Ranks) -> LoopSettings:
    """How many steps, over which positions."""
    per_step = ranks.num_ranks * config.batch.accumulation
    if config.run.steps is not None:
        total_steps, stop = config.run.steps, config.run.steps * per_step
    else:
        assert config.epochs is not None, "a run has steps or epochs"
        stop = plan.micro_batches_in(config.epochs)
        total_steps = -(-stop // per_step)
    return LoopSettings(
        total_steps=total_steps,
        stop_position=stop,
        micro_batches_per_step=per_step,
        checkpoint_every_steps=config.run.checkpoint_every_steps,
        simulate_every_steps=config.evaluate.every_steps or config.run.log_every_steps,
        sharded=config.run.parallel == "fsdp" and ranks.num_ranks > 1,
    )


def stream_terms(config: TrainerConfig, target: Target, *, client_name: str) -> StreamTerms:
    """What the streams carry, and how many batches may be on the way.

    Raises:
        UserError: The window is smaller than the largest batch.
    """
    terms = StreamTerms(
        taps=target.layout.taps,
        hidden_size=target.drafter_config.hidden_size,
        dtype=target.wire_dtype,
        max_batch_tokens=config.batch.max_tokens,
        slot_count=1,
        client_name=client_name,
        shared_memory=config.target.shared_memory == "auto",
    )
    window, batch = config.target.window_bytes, terms.max_batch_bytes
    if window < batch:
        fix = f"the largest batch ({config.batch.max_tokens} tokens of {terms.row_bytes} bytes) has {batch} bytes; "
        raise UserError("target.window_bytes", window, fix + "give at least that, or lower batch.max_tokens")
    # One in training and those requested ahead of it.
    return dataclasses.replace(terms, slot_count=min(window // batch, config.target.requests_ahead + 1))


def patience_of(config: TrainerConfig) -> Patience:
    """The client's deadlines."""
    target = config.target
    return Patience(
        max_attempts=target.attempts_per_batch,
        backoff_initial_s=target.retry_backoff_s,
        backoff_max_s=target.retry_backoff_max_s,
        connect_timeout_s=target.connect_timeout_s,
        stall_timeout_s=target.request_timeout_s,
        absence_timeout_s=target.wait_timeout_s,
    )
