"""The trainer's exceptions, one tree.

Owns what can go wrong in words a user can act on. Standard library only: everything imports this, it imports nothing.

    TrainerError                        anything the trainer gives up on; exit code 1
    ├── UserError                       a mistake in what the user gave; exit code 2, one line
    ├── TargetUnavailableError          no server or replica answered within its deadline
    ├── TargetChangedError              the target now has another shape; the run can't go on with it
    ├── BatchFailedError                one batch failed on every attempt it was allowed
    ├── NonFiniteError                  too many steps in a row with something not finite
    └── CheckpointError                 no checkpoint could be written or read

Only `UserError` means that the user should change something they typed. Retries happen below these: whoever raises one
has already used up its attempts.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2

# A value longer than this says nothing more on a terminal line.
_MAX_VALUE_CHARS = 120


class TrainerError(Exception):
    """The run can't go on. The message says what failed and what to do."""


class UserError(TrainerError):
    """A mistake in what the user gave: one line, `<field>: <value>: <what is wrong; what to give>`.

    Args:
        field: Dotted name of the setting, or the flag or argument, as the user would type it.
        value: What was given. None reads "(not set)".
        fix: What is wrong with it and what to give instead.
    """

    def __init__(self, field: str, value: object, fix: str) -> None:
        self.field = field
        self.value = value
        self.fix = fix
        super().__init__(f"{field}: {_one_line(value)}: {fix}")

    def __reduce__(self) -> tuple[type[UserError], tuple[str, object, str]]:
        """Rebuilds from the parts, so that it crosses process borders."""
        return (UserError, (self.field, self.value, self.fix))


class TargetUnavailableError(TrainerError):
    """No server or replica answered within its deadline."""


class TargetChangedError(TrainerError):
    """The target now has another shape or vocabulary than the drafter was built for."""


class BatchFailedError(TrainerError):
    """One batch failed on every attempt it was allowed; names the batch and the reasons."""


class NonFiniteError(TrainerError):
    """Too many steps in a row had something that isn't finite."""


class CheckpointError(TrainerError):
    """No checkpoint could be written or read."""


def _one_line(value: object) -> str:
    text = "(not set)" if value is None else " ".join(str(value).split()) or "(empty)"
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[: _MAX_VALUE_CHARS - 1]}…"
