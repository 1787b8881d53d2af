"""What can be seen to be wrong before data is prepared or a server asked: addresses, run directory, device.

Leaves nothing behind. Torch is loaded only where a CUDA device is asked for by name.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from drafter_trainer.client.addresses import check_address
from drafter_trainer.config import TrainerConfig
from drafter_trainer.errors import UserError

__all__ = ["check_addresses", "check_device", "check_run_dir"]


def check_addresses(config: TrainerConfig) -> None:
    """Refuses missing or malformed addresses.

    Raises:
        UserError: The first one.
    """
    if not config.target.addresses:
        raise UserError("target.addresses", None, "give the server's HOST:PORT")
    for address in config.target.addresses:
        try:
            check_address(address)
        except ValueError as error:
            raise UserError("target.addresses", address, str(error)) from error


def check_run_dir(config: TrainerConfig) -> Path:
    """Refuses a run directory that nothing could be written to; doesn't make it yet.

    Raises:
        UserError: It's a file, or neither it nor what it would lie in can be written.
    """
    run_dir = config.run.dir
    if run_dir is None:
        raise UserError("run.dir", None, "give a directory for checkpoints and metrics")
    nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not nearest.is_dir():
        wrong = "this" if nearest == run_dir else f"{nearest}"
        raise UserError("run.dir", run_dir, f"{wrong} is a file; give a directory")
    try:
        # Asking for permissions isn't enough: root has all of them, also where nothing can be written.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        reason = f"{nearest} can't be written ({error.strerror}); give another directory"
        raise UserError("run.dir", run_dir, reason) from error
    return run_dir


def check_device(config: TrainerConfig) -> None:
    """Refuses a CUDA device that isn't there.

    Raises:
        UserError: There's none of that number.
    """
    if not config.run.device.startswith("cuda"):
        return
    from drafter_trainer.devices import resolve_device  # noqa: PLC0415 - loads torch

    try:
        resolve_device(config.run.device)
    except ValueError as error:
        raise UserError("run.device", config.run.device, str(error)) from error
