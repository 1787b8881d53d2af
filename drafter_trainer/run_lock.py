"""One run at a time in a run directory: two would overwrite each other's records and checkpoints.

The first rank holds a lock that the kernel gives back when it ends, however it ends, so that none is ever left over.
The file stays; only the lock counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator

from drafter_trainer.errors import UserError
from drafter_trainer.parallel import Ranks
from drafter_trainer.run_dir import RunDir

__all__ = ["lock_run_dir"]

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def lock_run_dir(run_dir: RunDir, ranks: Ranks) -> Iterator[None]:
    """Holds the run directory for these ranks; all of them must enter it.

    Raises:
        UserError: Another run holds it; on all ranks.
    """
    run_dir.root.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        refusals = ranks.gather_texts(list(_refusal(run_dir, stack)) if ranks.is_first else [])
        if refusals:
            raise UserError("run.dir", run_dir.root, refusals[0])
        yield


def _refusal(run_dir: RunDir, stack: contextlib.ExitStack) -> Iterator[str]:
    """Takes the lock until the stack ends, or says who holds it."""
    # Not inherited by programs that are started: the receiver must not hold it for a trainer that is gone.
    descriptor = os.open(run_dir.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        yield f"{holder} trains there; wait for it, stop it, or give another directory"
        return
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        logger.warning("%s can't be locked (%s): don't start a second run there", run_dir.root, error.strerror)
        return
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
