"""Pools that move: the 4:4 -> 5:3 example of the talk, and static pools under a skewed burst."""

from __future__ import annotations

from service.core.types import Role

MODEL = "qwen2.5-32b"
HALVES = (Role.SP,) * 4 + (Role.LP,) * 4
MIX = (("lmsys_chat_1m", 0.9), ("rag", 0.1))
