"""Why a server can't be reached, in few words."""

from __future__ import annotations

import pytest
from target_wire.causes import short_cause

REFUSED = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: "
    "connect: Connection refused (111)"
)


@pytest.mark.parametrize(
    ("code", "details", "cause"),
    [
        ("UNAVAILABLE", REFUSED, "connection refused"),
        ("UNAVAILABLE", "last error: UNKNOWN: unix:/s: connect failed: No such file or directory", "no such socket"),
        (
            "UNAVAILABLE",
            "errors resolving h:1: [field:hostname lookup error:Domain name not found]",
            "unknown host name",
        ),
        ("UNAVAILABLE", "the target is being loaded; ask again", "the target is being loaded; ask again"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "no answer in time"),
        ("UNIMPLEMENTED", "Received http2 header with status: 404", "something else answers there"),
        ("RESOURCE_EXHAUSTED", "", "resource exhausted"),
    ],
)
def test_cause_is_a_few_words(code: str, details: str, cause: str) -> None:
    assert short_cause(code, details) == cause


def test_cause_is_bounded() -> None:
    assert len(short_cause("INTERNAL", "x" * 500)) == 80
