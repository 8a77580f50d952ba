"""The contract suite of engines on the torch engine with CUDA: eager, and from graphs of its classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from factories import tiny_torch
from test_contract import *  # noqa: F403 - the suite itself, with the engines of this file

from engines.base import Engine
from engines.profiles import Profiles
from engines.types import Layout, Padding

pytestmark = pytest.mark.gpu

PROFILES = {
    "eager": Profiles(Layout.PACKED, Padding.NOTHING, (64,)),
    "graphs": Profiles(Layout.PACKED, Padding.CLASS, (8, 64), (0, 192, 768)),
}


@pytest.fixture(params=list(PROFILES))
def make(request: pytest.FixtureRequest, device: str) -> Callable[[], Engine]:
    """In f32: in bf16 a close call may go the other way in other company."""
    return partial(tiny_torch, PROFILES[request.param], device, "f32")


def test_nothing_leaks_whatever_happens(make: Callable[[], Engine]) -> None:
    pytest.importorskip("hypothesis")
    from hypothesis import HealthCheck, settings
    from hypothesis.stateful import run_state_machine_as_test
    from test_contract_random import EngineMachine

    limits = settings(
        max_examples=10, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(lambda: EngineMachine(make), settings=limits)
