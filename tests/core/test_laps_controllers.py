"""Laws of the controllers of the LAPS policies: pools are formed and kept, moves are few, as published."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.reconcile import FleetView, InstanceLoad, MoveReason, RoleMove
from service.core.types import Role
from service.policies.laps_controllers import (
    PendingController,
    PressureController,
    PressureKnobs,
    pool_moves,
)

ROLES = st.lists(st.sampled_from(list(Role)), min_size=1, max_size=9)
LOADS = st.lists(
    st.tuples(st.floats(0.0, 9.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(0, 99)),
    min_size=9,
    max_size=9,
)


Row = tuple[float, float, float, int]  # backlog, at risk, utilisation, waiting


def fleet(roles: list[Role], loads: list[Row] | None = None, arrivals: int = 1) -> FleetView:
    rows = (loads or [(0.0, 0.0, 0.0, 0)] * len(roles))[: len(roles)]
    pairs = enumerate(zip(roles, rows, strict=True))
    instances = tuple(InstanceLoad(f"i{n}", role, *row) for n, (role, row) in pairs)
    return FleetView(instances, 0.0, 0.0, 0.0, 0.0, arrivals)


def after(view: FleetView, moves: tuple[RoleMove, ...]) -> list[Role]:
    moved = {move.instance_id: move.role for move in moves}
    return [moved.get(i.instance_id, i.role) for i in view.instances]


def controllers() -> list[PressureController | PendingController]:
    knobs = PressureKnobs(cool_down_s=3.0)
    pressures = [PressureController(knobs, ratio_test=ratio) for ratio in (True, False)]
    return [*pressures, PendingController(3.0, 2.0)]


@given(roles=ROLES)
def test_every_instance_gets_a_pool_and_every_pool_an_instance(roles: list[Role]) -> None:
    """After the first step nobody is without a pool, no pool is without an instance, and all is still."""
    now = after(fleet(roles), pool_moves(fleet(roles)))
    if len(now) == 1:
        assert now == [Role.MIXED]
    else:
        assert Role.MIXED not in now
        assert {Role.SP, Role.LP} <= set(now)
    assert pool_moves(fleet(now)) == ()


@pytest.mark.parametrize("count", range(2, 10))
def test_the_start_is_half_and_half(count: int) -> None:
    """As in the artifact: the first half serves shorts, the rest longs."""
    moves = pool_moves(fleet([Role.MIXED] * count))
    half = count // 2
    assert after(fleet([Role.MIXED] * count), moves) == [Role.SP] * half + [Role.LP] * (count - half)
    assert {move.reason for move in moves} == {MoveReason.SEPARATE}


@given(loads=st.lists(LOADS, min_size=1, max_size=12), count=st.integers(2, 9))
def test_moves_are_one_at_a_time_and_pools_keep_one(loads: list[list[Row]], count: int) -> None:
    """Once there are pools: at most one move a step, none within the cool-down or the interval of another,
    and a pool never loses its last instance."""
    for controller in controllers():
        roles = [Role.SP] + [Role.LP] * (count - 1)
        moved_s = -math.inf
        for second, row in enumerate(loads):
            view = fleet(roles, row[:count])
            moves = controller.step(view, float(second))
            assert len(moves) <= 1
            if moves:
                assert second - moved_s >= 3.0
                moved_s = second
            roles = after(view, moves)
            assert {Role.SP, Role.LP} <= set(roles)


def test_the_printed_ratio_fires_the_wrong_way_below_zero() -> None:
    """Two busy pools without any queue: the ratio test moves an instance, the difference does not."""
    calm = fleet([Role.SP, Role.SP, Role.LP, Role.LP], [(0.0, 0.0, 0.5, 0)] * 4)
    printed, slides, _ = controllers()
    (move,) = printed.step(calm, 0.0)
    assert move.role is Role.SP
    assert move.pressure_short == move.pressure_long < 0.0
    assert slides.step(calm, 0.0) == ()


@pytest.mark.parametrize("ratio_test", [True, False])
def test_the_pool_under_pressure_gains_the_least_loaded_of_the_other(ratio_test: bool) -> None:
    loads = [(4.0, 0.5, 0.9, 40), (3.0, 0.5, 0.9, 30), (0.9, 0.0, 0.2, 3), (0.2, 0.0, 0.1, 1)]
    view = fleet([Role.SP, Role.SP, Role.LP, Role.LP], loads)
    (move,) = PressureController(PressureKnobs(), ratio_test=ratio_test).step(view, 0.0)
    assert (move.instance_id, move.role, move.reason) == ("i3", Role.SP, MoveReason.PRESSURE)


def test_pressure_is_that_of_nearly_the_worst_instance() -> None:
    """The 90th percentile of ten instances is the ninth: one bad one does not move anybody."""
    quiet = [(0.0, 0.0, 0.0, 0)]
    one_bad = [*quiet * 9, (9.0, 1.0, 0.0, 9), *quiet * 10]
    two_bad = [*quiet * 8, *[(9.0, 1.0, 0.0, 9)] * 2, *quiet * 10]
    roles = [Role.SP] * 10 + [Role.LP] * 10
    controller = PressureController(PressureKnobs(), ratio_test=False)
    assert controller.step(fleet(roles, one_bad), 0.0) == ()
    assert len(controller.step(fleet(roles, two_bad), 1.0)) == 1


def test_the_artifact_compares_counts_at_arrivals_only() -> None:
    """More than twice as many pending moves one; without an arrival nothing is even looked at."""
    roles = [Role.SP, Role.LP, Role.LP]
    loads = [(0.0, 0.0, 0.0, 5), (9.0, 1.0, 1.0, 2), (0.0, 0.0, 0.0, 0)]
    controller = PendingController(5.0, 2.0)
    assert controller.step(fleet(roles, loads, arrivals=0), 0.0) == ()
    (move,) = controller.step(fleet(roles, loads), 1.0)
    assert (move.instance_id, move.role, move.reason) == ("i2", Role.SP, MoveReason.PENDING_RATIO)
    exactly_twice = [(0.0, 0.0, 0.0, 4), (0.0, 0.0, 0.0, 2), (0.0, 0.0, 0.0, 0)]
    assert controller.step(fleet(roles, exactly_twice), 9.0) == ()
    nothing_pends = [(0.0, 0.0, 0.0, 0)] * 3
    assert controller.step(fleet(roles, nothing_pends), 20.0) == ()
