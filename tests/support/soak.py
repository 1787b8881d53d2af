"""What takes longer than `make test` may, and runs in `make soak`."""

from __future__ import annotations

import os

import pytest

SOAKS = "SOAK" in os.environ

soak_only = pytest.mark.skipif(not SOAKS, reason="takes long; run by `make soak`")
