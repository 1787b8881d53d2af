"""The one exception of the demo: something a person can act on, shown as one line without a traceback."""

from __future__ import annotations

__all__ = ["DemoError"]


class DemoError(Exception):
    """The demo cannot go on; the message says what failed and what to do."""
