"""Fixtures of the tests of drivers and of child processes."""

from __future__ import annotations

from child_rig import make, stub
from fake_trtllm import open_driver, packages, use

__all__ = ["make", "open_driver", "packages", "stub", "use"]
