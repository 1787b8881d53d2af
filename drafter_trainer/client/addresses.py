"""What an address of a target-server looks like. Standard library only: mistakes are told before anything is loaded."""

from __future__ import annotations

import re

__all__ = ["check_address"]

_HOST_PORT = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})")


def check_address(address: str) -> None:
    """Refuses what is not HOST:PORT, [IPV6]:PORT or unix:/PATH.

    Raises:
        ValueError: With what to give instead.
    """
    if address.startswith("unix:/") and len(address) > len("unix:/"):
        return
    match = _HOST_PORT.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ValueError("give HOST:PORT, [IPV6]:PORT or unix:/PATH")
