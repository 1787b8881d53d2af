"""Which version this server serves, as it survives restarts: one small JSON file, replaced whole or not at all.

The front owns it. Without `swap.state_file` it lies in the checkpoint root, is named after the configured checkpoint
and is only written by a first swap, so that a server that never swaps writes nothing. A server that is started again
goes on with the version that its file names; a user who configures another checkpoint by hand (which needs
`swap.state_file`, since the default's name follows the checkpoint) gets that one, under the next number. No torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from target_server.checkpoint import check_checkpoint
from target_server.config import ServerConfig
from target_server.errors import UserError
from target_server.versions import Version, VersionRecord

__all__ = ["FinishedSwap", "VersionStore", "check_swap_directories", "checkpoint_root"]

_log = logging.getLogger(__name__)

_FIELD = "swap.state_file"
_FORMAT = 1
_MAX_EARLIER = 32
_MAX_FINISHED = 64


@dataclass(frozen=True, slots=True)
class FinishedSwap:
    """A swap that ended well.

    Attributes:
        request_id: its caller's.
        checkpoint: its directory.
        version: what it led to.
    """

    request_id: str
    checkpoint: Path
    version: Version


@dataclass(frozen=True)
class _State:
    configured: Path
    current: VersionRecord
    earlier: tuple[VersionRecord, ...] = ()
    finished: tuple[FinishedSwap, ...] = field(default=())


def checkpoint_root(config: ServerConfig) -> Path:
    """Returns the directory that checkpoints must lie in, links resolved."""
    assert config.model.path is not None
    return (config.swap.checkpoint_root or config.model.path.resolve().parent).resolve()


def check_swap_directories(config: ServerConfig) -> None:
    """Refuses directories for swaps that aren't there.

    Raises:
        UserError: naming the one.
    """
    swap = config.swap
    for name, path in (("checkpoint_root", swap.checkpoint_root), ("watch_dir", swap.watch_dir)):
        if path is not None and not path.is_dir():
            raise UserError(f"swap.{name}", path, "no such directory; make it, or give another one")
    if swap.watch_dir is not None and config.model.path is not None:
        root = checkpoint_root(config)
        if not swap.watch_dir.resolve().is_relative_to(root):
            fix = f"lies outside of swap.checkpoint_root {root}; give one below it, or another root"
            raise UserError("swap.watch_dir", swap.watch_dir, fix)


class VersionStore:
    """The current version, the ones before, and their file."""

    def __init__(self, config: ServerConfig) -> None:
        """Reads the file, where there is one.

        Raises:
            UserError: the file is damaged, or the checkpoint that it names is gone.
        """
        assert config.model.path is not None
        configured = config.model.path.resolve()
        self._always_written = config.swap.state_file is not None
        self.file = config.swap.state_file or checkpoint_root(config) / f".{configured.name}.target-state.json"
        self._state = _State(configured, VersionRecord(1, "", configured))
        self._written = self._read_file()
        if self._written is not None:
            self._state = _follow(_parse(self._written, self.file), configured, self.file)

    @property
    def current(self) -> VersionRecord:
        """The version that every replica is to serve. Its digest is empty until a first replica has loaded it."""
        return self._state.current

    @property
    def earlier(self) -> tuple[VersionRecord, ...]:
        """Versions before, newest first."""
        return self._state.earlier

    def finished(self, request_id: str) -> FinishedSwap | None:
        """Returns how the swap of this id ended, if it ended well and not too long ago."""
        return next((swap for swap in self._state.finished if swap.request_id == request_id), None)

    def loaded(self, record: VersionRecord) -> None:
        """Notes what the first replica has found in the current checkpoint's files.

        Raises:
            UserError: the file can't be written.
        """
        before = self._state.current
        if record == before:
            return
        self._state = _next(self._state, record) if before.digest not in ("", record.digest) else self._state
        self._state = replace(self._state, current=record)
        if self._always_written or self._written is not None:
            try:
                self._write()
            except OSError as error:
                raise UserError(_FIELD, self.file, f"can't be written ({error.strerror}); give another one") from error

    def check_writable(self) -> None:
        """Refuses a swap that could not be remembered.

        Raises:
            UserError: the file can't be written, or another server writes it too.
        """
        if self._read_file() != self._written:
            raise UserError(_FIELD, self.file, "another server writes it too; give each server its own")
        probe = self.file.with_name(f".{self.file.name}.{os.getpid()}.probe")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"\n")
            probe.unlink()
        except OSError as error:
            raise UserError(_FIELD, self.file, f"can't be written ({error.strerror}); give another one") from error

    def commit(self, record: VersionRecord, request_id: str) -> None:
        """Makes another version the current one, on disk first: after this a restart serves it.

        Raises:
            OSError: the file can't be written; then nothing has changed.
        """
        before = self._state
        swap = FinishedSwap(request_id, record.checkpoint, record.version)
        self._state = replace(_next(before, record), finished=(swap, *before.finished)[:_MAX_FINISHED])
        try:
            self._write()
        except BaseException:
            self._state = before
            raise

    def _read_file(self) -> bytes | None:
        try:
            return self.file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(_FIELD, self.file, f"can't be read ({error.strerror}); give a file") from error

    def _write(self) -> None:
        content = json.dumps(_to_json(self._state), indent=1).encode() + b"\n"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(self.file)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._written = content
        # The new content is in place; only whether its name survives a power cut is still open.
        with contextlib.suppress(OSError):
            directory = os.open(self.file.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)


def _next(state: _State, record: VersionRecord) -> _State:
    return replace(state, current=record, earlier=(state.current, *state.earlier)[:_MAX_EARLIER])


def _follow(state: _State, configured: Path, file: Path) -> _State:
    """Returns what is to be served: what the file names, unless the user has configured something else since."""
    current = state.current
    if state.configured != configured:
        _log.info("model.path %s is new here: it becomes version %d", configured, current.number + 1)
        # The digest is that of another directory: `loaded` replaces it.
        return _next(replace(state, configured=configured), VersionRecord(current.number + 1, "", configured))
    try:
        check_checkpoint(current.checkpoint)
    except UserError as error:
        raise UserError(
            _FIELD, file, f"names version {current.number} in {error.value}: {error.fix}; or remove the file"
        ) from error
    if current.checkpoint != configured:
        _log.info("goes on with version %d in %s (%s)", current.number, current.checkpoint, file)
    return state


def _to_json(state: _State) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "configured": str(state.configured),
        "current": state.current.to_json(),
        "earlier": [record.to_json() for record in state.earlier],
        "finished": [
            {
                "request_id": swap.request_id,
                "checkpoint": str(swap.checkpoint),
                "number": swap.version.number,
                "digest": swap.version.digest,
            }
            for swap in state.finished
        ],
    }


def _parse(content: bytes, file: Path) -> _State:
    try:
        values = json.loads(content)
        if values["format"] != _FORMAT:
            raise ValueError("another format")
        return _State(
            Path(values["configured"]),
            VersionRecord.from_json(values["current"]),
            tuple(VersionRecord.from_json(record) for record in values["earlier"]),
            tuple(
                FinishedSwap(
                    str(swap["request_id"]), Path(swap["checkpoint"]), Version(int(swap["number"]), str(swap["digest"]))
                )
                for swap in values["finished"]
            ),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            _FIELD, file, "is no state of a target server; restore it, or remove it to start anew"
        ) from error
