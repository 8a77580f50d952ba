"""Columns of prefill.csv: the first five are what `plaserve calibrate --csv` reads. No torch needed here."""

from __future__ import annotations

PREFILL = (
    "model",
    "batch",
    "new_tokens",
    "history",
    "prefill_ms",
    "passes",
    "fastest_ms",
    "slowest_ms",
    "wall_ms",
    "issue_ms",
)
