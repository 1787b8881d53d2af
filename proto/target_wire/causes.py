"""Why a server can't be reached, in a few words for people. gRPC's own text is a chain of layers. Needs no library."""

from __future__ import annotations

__all__ = ["short_cause"]

# A part of gRPC's text (lower case) to what it means; the first that is found counts.
_CAUSES = (
    ("connection refused", "connection refused"),
    ("no such file or directory", "no such socket"),
    ("lookup error", "unknown host name"),
    ("dns resolution failed", "unknown host name"),
    ("name or service not known", "unknown host name"),
    ("no route to host", "no route to the host"),
    ("network is unreachable", "network unreachable"),
    ("connection reset", "connection reset"),
    ("socket closed", "connection lost"),
    ("permission denied", "permission denied"),
    ("timed out", "no answer in time"),
    ("timeout", "no answer in time"),
    ("trying to connect", "no answer in time"),
    ("status: 404", "something else answers there"),
)
_MAX_CHARS = 80


def short_cause(code: str, details: str) -> str:
    """Returns the cause of a failed call.

    Args:
        code: name of the gRPC status, e.g. "UNAVAILABLE".
        details: the status's text.
    """
    text = " ".join(details.split())
    if code == "DEADLINE_EXCEEDED":
        return "no answer in time"
    if code == "UNIMPLEMENTED":
        return "something else answers there"
    for part, cause in _CAUSES:
        if part in text.lower():
            return cause
    said = text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 1]}…"
    return said or code.lower().replace("_", " ")
