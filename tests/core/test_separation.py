"""Laws of the prediction whether two pools beat one."""

from __future__ import annotations

import math

import pytest
from fleet_model import FluidFleet, demand
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.pressure import PressureController, PressureSettings
from service.core.separation import Stream, all_busy, predict
from service.core.settings import Mode, SchedulerSettings
from service.core.types import Role

LOADS = st.floats(0.05, 0.98)


def streams(work: float, share: float, long_s: float, pass_s: float) -> tuple[Stream, Stream]:
    short = Stream(work * share, 0.025, 0.025, 0.4)
    return short, Stream(work * (1.0 - share), long_s, pass_s, max(0.4, 3.0 * long_s + 0.2))


@pytest.mark.parametrize(
    ("instances", "work", "expected"), [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (5, 4.0, 0.5541), (10, 8.0, 0.4092)]
)
def test_all_busy_is_erlangs_c(instances: int, work: float, expected: float) -> None:
    """Values of the tables; with one instance it is the load."""
    assert all_busy(instances, work) == pytest.approx(expected, abs=1e-4)


@given(instances=st.integers(1, 100), load=LOADS, more=LOADS)
def test_all_busy_rises_with_load_and_falls_with_instances(instances: int, load: float, more: float) -> None:
    low, high = sorted((load, more))
    assert 0.0 <= all_busy(instances, low * instances) <= all_busy(instances, high * instances) + 1e-12
    assert all_busy(instances + 1, low * instances) <= all_busy(instances, low * instances) + 1e-12
    assert all_busy(instances, 0.0) == 0.0
    assert all_busy(instances, instances * 1.5) == 1.0


@given(load=LOADS, share=st.floats(0.05, 0.95), long_s=st.floats(0.05, 5.0))
def test_one_instance_is_never_split(load: float, share: float, long_s: float) -> None:
    """There is nothing to split."""
    found = predict(1, *streams(load, share, long_s, long_s))
    assert found.short_instances == 0
    assert found.gain == -math.inf


@given(instances=st.integers(2, 64), load=LOADS, share=st.floats(0.05, 0.95))
def test_identical_lengths_are_pooled(instances: int, load: float, share: float) -> None:
    """Where shorts and longs take the same time two queues only lose: nobody is held up by longer passes."""
    work = load * instances
    short = Stream(work * share, 0.05, 0.05, 0.4)
    long = Stream(work * (1.0 - share), 0.05, 0.05, 0.4)
    assert predict(instances, short, long).gain <= 1e-9


@given(
    instances=st.integers(2, 64),
    load=st.floats(1.0, 3.0),
    share=st.floats(0.05, 0.95),
    long_s=st.floats(0.05, 5.0),
)
def test_what_does_not_fit_is_not_split(instances: int, load: float, share: float, long_s: float) -> None:
    """Any two pools would give a lane up, and demand above capacity is a guess: shorts share passes."""
    found = predict(instances, *streams(load * instances, share, long_s, long_s))
    assert (found.short_instances, found.gain) == (0, -math.inf)


@given(instances=st.integers(2, 64), load=st.floats(0.05, 0.9), share=st.floats(0.1, 0.5))
def test_chunks_take_the_reason_away(instances: int, load: float, share: float) -> None:
    """The shorter the longest pass, the better one pool; with passes as short as those of shorts it is never
    worth a change."""
    work = load * instances
    mixes = (streams(work, share, 2.0, pass_s) for pass_s in (0.025, 0.15, 0.6, 2.0))
    gains = [predict(instances, *mix).gain for mix in mixes]
    assert gains == sorted(gains)
    assert gains[0] < PressureSettings().separation_gain


@pytest.mark.parametrize("instances", [8, 12, 16])
@pytest.mark.parametrize("load", [0.6, 0.7])
def test_long_passes_on_many_instances_are_separated(instances: int, load: float) -> None:
    """Passes of 10 s that can't be cut cost shorts their target in one pool, and not in two."""
    found = predict(instances, *streams(load * instances, 0.2, 10.0, 10.0))
    assert found.gain > PressureSettings().separation_gain
    assert 1 <= found.short_instances < instances


@given(instances=st.integers(2, 30), load=LOADS, share=st.floats(0.05, 0.95), least=st.integers(1, 3))
def test_a_split_leaves_both_pools_their_least(instances: int, load: float, share: float, least: int) -> None:
    """No pool falls below its least, and none is given more than it can serve; where that is not possible
    there is no split."""
    work = load * instances
    found = predict(instances, *streams(work, share, 1.0, 0.15), least)
    if found.short_instances == 0:
        assert found.split_score == math.inf
        return
    assert least <= found.short_instances <= instances - least
    assert work * share < found.short_instances
    assert work * (1.0 - share) < instances - found.short_instances


def auto(**knobs: float) -> PressureController:
    settings = SchedulerSettings(long_chunk_s_max=1e9)
    return PressureController(settings, PressureSettings(**knobs), Mode.AUTO)  # type: ignore[arg-type]


def test_auto_changes_its_mind_only_after_a_while() -> None:
    """Pools are formed, and merged, after `separation_periods` of the same opinion."""
    fleet, controller = FluidFleet(12), auto(separation_periods=10)
    fleet.long_s = 10.0
    fleet.run(controller, lambda _: demand(7.8, 0.2), 9, 0.0)
    assert fleet.pool(Role.MIXED) == 12
    fleet.run(controller, lambda _: demand(7.8, 0.2), 1, 9.0)
    assert fleet.pool(Role.MIXED) == 0
    fleet.long_s = 0.05
    fleet.run(controller, lambda _: demand(11.0, 0.2), 9, 10.0)
    assert fleet.pool(Role.MIXED) == 0
    fleet.run(controller, lambda _: demand(11.0, 0.2), 30, 19.0)
    assert fleet.pool(Role.MIXED) == 12


@settings(max_examples=30)
@given(load=st.floats(0.1, 1.1), share=st.floats(0.05, 0.95))
def test_auto_does_not_flip_flop(load: float, share: float) -> None:
    """Under constant demand it forms or merges pools at most once."""
    fleet, controller = FluidFleet(8), auto()
    fleet.run(controller, lambda _: demand(8.0 * load, share), 80, 0.0)
    settled = len(fleet.moves)
    fleet.run(controller, lambda _: demand(8.0 * load, share), 120, 80.0)
    assert len(fleet.moves) == settled
