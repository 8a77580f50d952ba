"""Fixtures of the drivers' tests, from `fake_trtllm`."""

from __future__ import annotations

from fake_trtllm import open_driver, packages, use

__all__ = ["open_driver", "packages", "use"]
