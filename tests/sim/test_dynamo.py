"""FCFS of the simulator against that of Dynamo's mocker, where the mocker is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from dynamo_check import SCHEDULERS, TOLERANCE, check, table, worst

VARIABLE = "PLASERVE_DYNAMO_PYTHON"


@pytest.mark.slow
def test_fcfs_waits_as_long_as_in_dynamos_mocker() -> None:
    """The same cost, arrivals and token budget: P50 and P90 of the TTFT within 3 %."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no Python with ai-dynamo-runtime 1.6.1; see docs/outside-checks.md")
    version, rows = check(Path(python), requests=5000)
    assert len(rows) == 3 * len(SCHEDULERS)
    assert worst(rows) <= TOLERANCE, table(version, rows)
