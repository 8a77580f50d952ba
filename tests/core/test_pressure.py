"""Laws of pressure and of the controller that acts on it."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from fleet_model import FluidFleet, demand
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.pressure import (
    SHARED_AT_FIRST,
    Demand,
    PressureController,
    PressureSettings,
    controller_for,
    instance_pressure,
    pool_pressure,
)
from service.core.reconcile import FleetView, InstanceLoad, MoveReason
from service.core.settings import Mode, SchedulerSettings
from service.core.types import Lane, Role

KNOBS = SchedulerSettings()
SP, LP, MIXED = Role.SP, Role.LP, Role.MIXED
LOADS = st.builds(
    InstanceLoad,
    st.just("i"),
    st.sampled_from([SP, LP]),
    st.floats(0.0, 10.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 9),
)


def spatial(**knobs: float) -> PressureController:
    return PressureController(KNOBS, PressureSettings(**knobs), Mode.SPATIAL)  # type: ignore[arg-type]


@given(load=LOADS, more=LOADS)
def test_pressure_rises_with_each_of_its_signals(load: InstanceLoad, more: InstanceLoad) -> None:
    """More backlog, risk or utilisation never lowers p; it lies within 0 and the sum of the weights."""
    knobs = PressureSettings()
    p = instance_pressure(load, 0.4, knobs)
    assert 0.0 <= p <= knobs.backlog_weight + knobs.at_risk_weight + knobs.utilisation_weight
    for name in ("backlog_s", "at_risk_ratio", "utilisation"):
        values = {n: getattr(load, n) for n in InstanceLoad.__slots__}
        values[name] = max(values[name], getattr(more, name))
        assert instance_pressure(InstanceLoad(**values), 0.4, knobs) >= p


@given(pressures=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=40))
def test_pool_pressure_is_the_nearest_rank(pressures: list[float]) -> None:
    """At least 90 % of the instances are at most that hard-pressed, and one of them is exactly."""
    p90 = pool_pressure(pressures)
    assert p90 in pressures
    assert sum(p <= p90 for p in pressures) >= 0.9 * len(pressures)
    assert sum(p < p90 for p in pressures) < 0.9 * len(pressures)


def test_example_of_the_talk() -> None:
    """Pools of 4 and 4 under an overload of shorts become 5 and 3."""
    crowded = [InstanceLoad(f"s{i}", SP, 0.6, 0.5, 1.0, 20) for i in range(4)]
    calm = [InstanceLoad(f"l{i}", LP, 0.05, 0.0, 0.4, 1) for i in range(4)]
    view = FleetView((*crowded, *calm), 400.0, 5.0, 9.0, 1.6, 405)
    (move,) = spatial().step(view, 0.0)
    assert (move.role, move.reason) == (SP, MoveReason.PRESSURE)
    assert move.instance_id.startswith("l")
    assert move.pressure_short > move.pressure_long + PressureSettings().hysteresis


@pytest.mark.parametrize(("cached_s", "moved"), [((0.0, 9.0), "l0"), ((9.0, 0.0), "l1")])
def test_the_instance_with_least_to_lose_moves(cached_s: tuple[float, float], moved: str) -> None:
    """Of the giving pool the one with the cheapest cache goes."""
    crowded = [InstanceLoad(f"s{i}", SP, 0.6, 0.5, 1.0, 20) for i in range(2)]
    calm = [InstanceLoad(f"l{i}", LP, 0.05, 0.0, 0.3, 1, held) for i, held in enumerate(cached_s)]
    (move,) = spatial().step(FleetView((*crowded, *calm), 200.0, 2.0, 6.0, 0.6, 200), 0.0)
    assert move.instance_id == moved


def test_a_costly_move_must_be_worth_more() -> None:
    """A difference just above h moves an instance that loses nothing, and not one with a large cache."""
    for held, expected in ((0.0, 1), (100.0, 0)):
        busy = [InstanceLoad(f"s{i}", SP, 0.0, 0.0, 0.9, 0, held) for i in range(2)]
        calm = [InstanceLoad(f"l{i}", LP, 0.0, 0.0, 0.4, 0, held) for i in range(2)]
        view = FleetView((*busy, *calm), 100.0, 3.0, 5.2, 0.8, 100)
        assert len(spatial().step(view, 0.0)) == expected


@settings(max_examples=25)
@given(
    instances=st.integers(2, 40),
    load=st.floats(0.1, 1.3),
    short_share=st.floats(0.05, 0.95),
    alone=st.floats(1.0, 5.0),
)
def test_constant_load_settles(instances: int, load: float, short_share: float, alone: float) -> None:
    """Under constant demand moves come to an end, whatever the demand, and each pool keeps an instance."""
    fleet, controller = FluidFleet(instances, alone=alone), spatial()
    wanted = demand(load * instances, short_share)
    fleet.run(controller, lambda _: wanted, 60, 0.0)
    settled = len(fleet.moves)
    fleet.run(controller, lambda _: wanted, 200, 60.0)
    assert len(fleet.moves) == settled
    assert fleet.pool(SP) >= 1
    assert fleet.pool(LP) >= 1
    assert fleet.pool(MIXED) == 0


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), short_share=st.floats(0.1, 0.9), load=st.floats(0.2, 0.9))
def test_noise_does_not_drive_it(seed: int, short_share: float, load: float) -> None:
    """Demand that jitters by 20 % a period moves hardly anybody: no more than once in 40 periods."""
    fleet, controller = FluidFleet(8, noise=seed), spatial()
    wanted = demand(load * 8, short_share)
    fleet.run(controller, lambda _: wanted, 40, 0.0)
    settled = len(fleet.moves)
    fleet.run(controller, lambda _: wanted, 200, 40.0)
    assert len(fleet.moves) - settled <= 5


def quiet(short: int, long: int, busy: float, long_busy: float = 0.9) -> FleetView:
    """Pools of 8 whose shorts mostly have a pass of their own: 2.75 predicted seconds a second come of them,
    and LP has as much as it can do."""
    loads = [InstanceLoad(f"s{n}", SP, 0.0, 0.0, busy, 1) for n in range(short)]
    loads += [InstanceLoad(f"l{n}", LP, 0.1, 0.0, long_busy, 1) for n in range(long)]
    return FleetView(tuple(loads), 125.0, 14.0, 2.75, 4.9, 139)


@given(busy=st.lists(st.floats(0.6, 0.84), min_size=80, max_size=80))
def test_a_pool_that_is_busy_with_small_passes_gets_nobody(busy: list[float]) -> None:
    """What a quiet pool seems to need is no reason to take an instance from a busier one."""
    controller = spatial()
    for period, used in enumerate(busy):
        assert not controller.step(quiet(2, 6, used), float(period))


@pytest.mark.parametrize(
    ("busy", "long_busy", "sign"),
    [(0.84, 0.97, 0), (0.95, 0.9, 1), (0.3, 0.8, -1)],
    ids=["quiet", "loaded", "less"],
)
def test_what_shorts_take_is_learnt_up_only_from_a_loaded_pool(
    busy: float, long_busy: float, sign: int
) -> None:
    """More than is known is believed of a loaded pool only; less is believed of any."""
    demand_seen = Demand()
    for _ in range(80):
        demand_seen.look(quiet(2, 6, busy, long_busy))
    change = demand_seen.of(Lane.SHORT) - SHARED_AT_FIRST * 2.75
    assert abs(change) < 1e-9 if sign == 0 else change * sign > 0.3


def test_a_pool_that_is_busy_for_a_moment_is_not_loaded() -> None:
    """One period in four near saturation, and less than LOADED in the mean."""
    demand_seen = Demand()
    for period in range(80):
        demand_seen.look(quiet(2, 6, 0.97 if period % 4 == 3 else 0.72))
    assert demand_seen.of(Lane.SHORT) <= SHARED_AT_FIRST * 2.75 + 1e-9


@pytest.mark.parametrize(("periods", "moved"), [(1, False), (6, True)])
def test_one_hard_period_moves_nobody(periods: int, moved: bool) -> None:
    """The only request of the short instance is a long one near its target: for once, or time and again."""
    controller, found = spatial(), False
    for period in range(40):
        hard = 20 <= period < 20 + periods
        short = InstanceLoad("s", SP, 4.0 if hard else 0.0, 1.0 if hard else 0.0, 1.0, 1)
        longs = [InstanceLoad(f"l{n}", LP, 0.6, 0.3, 1.0, 2) for n in range(3)]
        found |= bool(controller.step(FleetView((short, *longs), 100.0, 3.0, 3.6, 1.5, 103), float(period)))
    assert found == moved


@settings(max_examples=25)
@given(
    instances=st.integers(4, 40),
    short=st.floats(0.1, 0.5),
    long=st.floats(0.8, 2.0),
    alone=st.floats(1.0 / SHARED_AT_FIRST, 5.0),
)
def test_past_what_the_fleet_can_do_shorts_come_first(
    instances: int, short: float, long: float, alone: float
) -> None:
    """Too much long work takes nothing from shorts that need no more than was guessed: their pool is what
    they ask for, to the nearest instance."""
    fleet, controller = FluidFleet(instances, alone=alone), spatial()
    wanted = {Lane.SHORT: short * instances, Lane.LONG: max(long, 1.05 - short) * instances}
    fleet.run(controller, lambda _: wanted, 60, 0.0)
    assert fleet.pool(SP) >= min(round(wanted[Lane.SHORT]), instances - 1)
    assert fleet.pool(LP) >= 1


@pytest.mark.parametrize("instances", [4, 8, 16, 64, 200])
@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.1, 0.9)])
def test_a_flip_of_the_mix_is_followed(instances: int, before: float, after: float) -> None:
    """From 90/10 to 10/90: settled within 20 periods, with at most one overshoot, and fit for the demand."""
    fleet, controller = FluidFleet(instances), spatial()
    total = 0.7 * instances
    fleet.run(controller, lambda _: demand(total, before), 60, 0.0)
    count = len(fleet.moves)
    fleet.run(controller, lambda _: demand(total, after), 60, 60.0)
    moves = fleet.moves[count:]
    assert moves
    assert moves[-1][0] <= 60.0 + 20.0
    gaining = SP if after > before else LP
    back = [move for _, move in moves if move.role is not gaining]
    assert len(back) <= math.ceil(0.05 * instances), "more than one overshoot"
    short = fleet.pool(SP)
    assert total * after <= short
    assert total * (1.0 - after) <= instances - short


@settings(max_examples=30)
@given(instances=st.integers(2, 100), step=st.integers(0, 5))
def test_moves_are_few_a_period(instances: int, step: int) -> None:
    """At most ceil(5 %) of the fleet moves in a period once the pools are formed."""
    fleet, controller = FluidFleet(instances), spatial()
    fleet.run(controller, lambda _: demand(0.6 * instances, 0.9), 20, 0.0)
    count = len(fleet.moves)
    fleet.run(controller, lambda _: demand(0.6 * instances, 0.1), 1 + step, 20.0)
    by_period: dict[float, int] = {}
    for now_s, _ in fleet.moves[count:]:
        by_period[now_s] = by_period.get(now_s, 0) + 1
    assert all(moved <= math.ceil(0.05 * instances) for moved in by_period.values())


def test_the_cool_down_holds_back_the_way_back() -> None:
    """A move against the last one waits for the cool-down; the same instance never moves twice in it."""
    fleet, controller = FluidFleet(8), spatial(cool_down_s=5.0)
    fleet.run(controller, lambda now_s: demand(5.6, 0.9 if now_s % 8.0 < 4.0 else 0.1), 100, 0.0)
    moves = [(now_s, move) for now_s, move in fleet.moves if move.reason is MoveReason.PRESSURE]
    assert {move.role for _, move in moves} == {SP, LP}
    for (before_s, before), (now_s, move) in pairwise(moves):
        assert move.role is before.role or now_s - before_s >= 5.0
    last: dict[str, float] = {}
    for now_s, move in moves:
        assert now_s - last.get(move.instance_id, -math.inf) >= 5.0
        last[move.instance_id] = now_s


def test_a_pool_that_lost_its_last_instance_gets_one_at_once() -> None:
    """A lane without instances is served again in the next period, cool-down or not."""
    fleet, controller = FluidFleet(3, [SP, LP, LP]), spatial()
    fleet.run(controller, lambda _: demand(1.0, 0.3), 3, 0.0)
    fleet.roles = {name: role for name, role in fleet.roles.items() if role is LP}
    fleet.run(controller, lambda _: demand(1.0, 0.3), 1, 3.0)
    assert fleet.pool(SP) == 1
    assert fleet.moves[-1][1].reason is MoveReason.STARVED


def test_newcomers_get_a_role() -> None:
    """An instance that joins while there are pools goes where it is missing."""
    fleet, controller = FluidFleet(6), spatial()
    fleet.run(controller, lambda _: demand(4.0, 0.5), 10, 0.0)
    fleet.roles |= {f"new{i}": MIXED for i in range(4)}
    fleet.run(controller, lambda _: demand(4.0, 0.5), 1, 10.0)
    assert fleet.pool(MIXED) == 0
    assert abs(fleet.pool(SP) - fleet.pool(LP)) <= 2


@pytest.mark.parametrize("mode", list(Mode))
def test_modes(mode: Mode) -> None:
    """Temporal has no controller; one instance, or a fleet below two n_min, is never split."""
    controller = controller_for(mode, KNOBS, PressureSettings(instances_min=2))
    if mode is Mode.TEMPORAL:
        assert controller is None
        return
    assert controller is not None
    for instances in (1, 3):
        fleet = FluidFleet(instances, [SP, *[LP] * (instances - 1)])
        fleet.run(controller, lambda _: demand(0.5, 0.5), 30, 0.0)
        assert fleet.pool(MIXED) == instances


def test_nothing_is_formed_before_anything_arrives() -> None:
    """Without demand there is no proportion to form pools in."""
    fleet = FluidFleet(4)
    fleet.run(spatial(), lambda _: demand(0.0, 0.5), 20, 0.0)
    assert not fleet.moves


@pytest.mark.parametrize("field", ["period_s", "instances_min", "hysteresis"])
def test_bad_knobs_are_named(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        PressureSettings(**{field: -1})  # type: ignore[arg-type]
