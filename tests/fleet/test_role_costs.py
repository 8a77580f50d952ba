"""What the controller makes of moves that load an engine, and what operators see of them. No engines here:
workers are what they tell of themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_controller import Rig, Scripted, load, rig, view

from protos.plaserve.v1 import fleet_pb2 as pb
from service.cli.fleet import fleet_view, moves_view
from service.core.pressure import PressureController, PressureSettings
from service.core.reconcile import MoveReason, RoleMove
from service.core.settings import SchedulerSettings
from service.core.types import Role
from service.fleet.controller import ControllerSettings
from service.fleet.role_costs import REST_S, REST_S_MAX, SlowMoves
from service.fleet.role_engines import ONE_ENGINE, OWN_ENGINES
from service.fleet.role_facts import (
    ENGINES,
    FAILURES,
    MOVE,
    MOVES,
    EnginesTold,
    MoveEnd,
    MovePhase,
    MoveState,
    engines_of,
    failures_of,
    move_of,
    moves_of,
)
from service.fleet.role_view import describe_ends, describe_moves, load_in_words

P = MovePhase


def engines(loaded: str = "sp", move_s: float = 12.0, bound_s: float = 100.0) -> dict[str, Any]:
    return {ENGINES: EnginesTold(OWN_ENGINES, loaded, move_s, bound_s).told()}


def moving(number: int, at: MovePhase, role: Role = Role.LP, at_time_s: float = 5.0) -> dict[str, Any]:
    return {**engines(), MOVE: MoveState(number, Role.SP, role, at, at_time_s).told()}


def ended(number: int, end: MoveEnd, error: str = "") -> MoveState:
    return MoveState(number, Role.SP, Role.LP, end, 9.0, {P.DRAINING: 2.0, P.LOADING: 9.8}, 1, error)


async def slow_rig(*workers: str) -> Rig:
    """Every worker has two engines, runs SP, and is in the view."""
    made = await rig(*workers)
    for name in workers:
        await made.leases[name].report(Role.SP, 0)
        await tell(made, name, engines())
    made.loads.views["s"] = view(*(load(name, Role.SP) for name in workers))
    await made.settle()
    return made


async def tell(made: Rig, name: str, facts: Mapping[str, Any]) -> None:
    await made.leases[name].update(facts=facts)
    await made.settle()


def to_lp(*names: str) -> list[RoleMove]:
    return [RoleMove(name, Role.LP, MoveReason.PRESSURE) for name in names]


# --- the cost ---


async def test_a_move_costs_what_it_took_last() -> None:
    made = await slow_rig("a", "b")
    await tell(made, "b", engines(move_s=40.0))
    scripted = Scripted()
    await made.controller(lambda: scripted).round(None)
    assert [one.cached_s for one in scripted.seen[-1].instances] == [12.0, 40.0]


async def test_workers_with_one_engine_are_shown_as_they_are() -> None:
    made = await rig("a", "b")
    await tell(made, "b", {ENGINES: EnginesTold(ONE_ENGINE, "sp", 40.0, 100.0).told()})
    made.loads.views["s"] = view(load("a"), load("b"))
    scripted = Scripted()
    await made.controller(lambda: scripted).round(None)
    assert scripted.seen == [made.loads.views["s"]]


@pytest.mark.parametrize(("move_s", "moves"), [(0.0, 1), (60.0, 0)])
async def test_a_dear_move_must_gain_more(move_s: float, moves: int) -> None:
    """The core's own controller, with a difference of pressure just above its bar for a move that is free."""
    made = await slow_rig("a", "b", "c", "d")
    for name in "abcd":
        role = Role.LP if name == "d" else Role.SP
        await tell(made, name, engines(role.value, move_s))
        await made.membership.assign(name, role, expected=0, reason=MoveReason.SEPARATE, by="test")
    await made.settle()
    knobs = PressureSettings(hysteresis=0.2, utilisation_weight=1.0)
    loads = [load(name, Role.SP, busy=0.5) for name in "abc"]
    made.loads.views["s"] = view(*loads, load("d", Role.LP, busy=0.74), short=0.3, long=0.7)
    controller = made.controller(lambda: PressureController(SchedulerSettings(), knobs))
    await controller.round(None)
    assert len(controller.decisions) == moves


# --- under way ---


async def test_a_worker_that_loads_is_shown_idle_in_its_new_role() -> None:
    made = await slow_rig("a", "b")
    given_ = await made.membership.assign("b", Role.LP, expected=0, reason=MoveReason.PRESSURE, by="test")
    await tell(made, "b", moving(given_.number, P.LOADING))
    made.loads.views["s"] = view(load("a", Role.SP))
    scripted = Scripted()
    await made.controller(lambda: scripted).round(None)
    one = scripted.seen[-1].instances[-1]
    assert (one.instance_id, one.role, one.utilisation, one.cached_s) == ("b", Role.LP, 0.0, math.inf)


@pytest.mark.parametrize(("phase", "turned"), [(phase, phase is P.DRAINING) for phase in P])
async def test_only_a_drain_is_turned_back(phase: MovePhase, turned: bool) -> None:
    made = await slow_rig("a")
    given_ = await made.membership.assign("a", Role.LP, expected=0, reason=MoveReason.PRESSURE, by="test")
    await tell(made, "a", moving(given_.number, phase))
    scripted = Scripted([RoleMove("a", Role.SP, MoveReason.PRESSURE)])
    await made.controller(lambda: scripted).round(None)
    await made.settle()
    assert made.wanted == {"a": Role.SP if turned else Role.LP}


@pytest.mark.parametrize(("workers", "at_a_time"), [(1, 1), (4, 1), (8, 2), (11, 2)])
async def test_a_quarter_of_a_shard_moves_at_a_time(workers: int, at_a_time: int) -> None:
    names = [f"w{n:02}" for n in range(workers)]
    made = await slow_rig(*names)
    scripted = Scripted(to_lp(*names))
    controller = made.controller(lambda: scripted)
    for round_ in range(3):
        await controller.round(None)
        await made.settle()
        wanted = [name for name, role in made.wanted.items() if role is Role.LP]
        assert len(wanted) == min(workers, at_a_time * (round_ + 1))
        for name in wanted:  # they are through
            await tell(made, name, engines("lp"))
            await made.leases[name].report(Role.LP, 1)


async def test_moves_that_load_nothing_are_not_held_up() -> None:
    names = [f"w{n}" for n in range(6)]
    made = await slow_rig(*names)
    scripted = Scripted([RoleMove(name, Role.SP, MoveReason.SEPARATE) for name in names])
    await made.controller(lambda: scripted).round(None)
    await made.settle()
    assert set(made.wanted.values()) == {Role.SP}
    assert len(made.wanted) == 6


# --- failures ---


@pytest.mark.parametrize("at", [None, P.LOADING])
async def test_one_that_is_at_it_may_take_as_long_as_it_says(at: MovePhase | None) -> None:
    made = await slow_rig("a")
    given_ = await made.membership.assign("a", Role.LP, expected=0, reason=MoveReason.PRESSURE, by="test")
    await tell(made, "a", moving(given_.number, at) if at is not None else engines())
    controller = made.controller(Scripted, settings=ControllerSettings(overdue_s=10.0))
    seconds = 0
    while made.wanted == {"a": Role.LP} and seconds < 500:
        await controller.round(None)
        await made.clock.advance(1.0)
        await made.settle()
        seconds += 1
    assert seconds == (11 if at is None else 111)
    assert made.membership.snapshot().moves[0].reason is MoveReason.OVERDUE


async def test_a_failed_move_is_taken_back_at_once_and_the_next_one_rests() -> None:
    made = await slow_rig("a")
    scripted = Scripted(to_lp("a"))
    controller = made.controller(lambda: scripted)
    ordered_s: list[float] = []
    for failures in range(1, 4):
        while made.wanted.get("a") is not Role.LP:
            await controller.round(None)
            await made.settle()
            await made.clock.advance(1.0)
        ordered_s.append(made.clock.now_s())
        number = made.membership.snapshot().assignments["a"].number
        facts = {**engines(), MOVES: [ended(number, MoveEnd.FAILED, "no memory").told()], FAILURES: failures}
        await tell(made, "a", facts)
        await controller.round(None)
        await made.settle()
        assert made.wanted == {"a": Role.SP}
        assert made.membership.snapshot().moves[0].reason is MoveReason.FAILED
    rests = [after - before for before, after in pairwise(ordered_s)]
    for count, rest_s in enumerate(rests, start=1):
        least_s = REST_S * 2 ** (count - 1)
        assert least_s <= rest_s <= least_s + 3.0


async def test_a_pinned_worker_is_not_taken_back() -> None:
    made = await slow_rig("a")
    given_ = await made.membership.pin("a", True, by="me", role=Role.LP)
    await tell(made, "a", {**engines(), MOVES: [ended(given_.number, MoveEnd.FAILED).told()], FAILURES: 1})
    await made.controller(Scripted).round(None)
    await made.settle()
    assert made.wanted == {"a": Role.LP}


async def test_a_failure_of_before_says_nothing_of_an_order_of_now() -> None:
    made = await slow_rig("a")
    given_ = await made.membership.assign("a", Role.LP, expected=0, reason=MoveReason.PRESSURE, by="test")
    await tell(made, "a", {**engines(), MOVES: [ended(given_.number - 1, MoveEnd.FAILED).told()]})
    await made.controller(Scripted).round(None)
    await made.settle()
    assert made.wanted == {"a": Role.LP}


async def test_a_rest_has_a_longest() -> None:
    made = await slow_rig("a")
    await tell(made, "a", {**engines(), FAILURES: 1000})
    slow = SlowMoves()
    slow.look(made.membership.snapshot(), 0.0)
    (move,) = to_lp("a")
    assert not slow.may(move, REST_S_MAX - 1.0)
    assert slow.may(move, REST_S_MAX)


# --- what is told ---

_SECONDS = st.dictionaries(st.sampled_from(list(P)), st.integers(0, 10**6).map(lambda n: n / 1000))
_STATES = st.builds(
    MoveState,
    st.integers(1, 2**40),
    st.sampled_from(list(Role)),
    st.sampled_from(list(Role)),
    st.sampled_from([*P, *MoveEnd]),
    st.floats(0, 1e10),
    _SECONDS,
    st.integers(0, 10_000),
    st.text(max_size=40),
)


@settings(max_examples=40)
@given(_STATES, st.lists(_STATES, max_size=3))
def test_what_is_told_comes_back(state: MoveState, others: list[MoveState]) -> None:
    facts = json.loads(json.dumps({MOVE: state.told(), MOVES: [one.told() for one in others]}))
    assert move_of(facts) == state
    assert moves_of(facts) == tuple(others)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.fixed_dictionaries(dict.fromkeys((ENGINES, MOVE, MOVES, FAILURES), _JSON)))
def test_what_makes_no_sense_is_passed_over(facts: dict[str, Any]) -> None:
    """Of another version, or of nobody."""
    assert engines_of(facts) is None
    assert move_of(facts) is None
    assert moves_of(facts) == ()
    assert failures_of(facts) >= 0 or isinstance(facts[FAILURES], int)


async def test_operators_see_the_phase_the_cost_and_what_came_of_it() -> None:
    made = await slow_rig("a", "b")
    for name in "ab":
        given_ = await made.membership.assign(
            name, Role.LP, expected=0, reason=MoveReason.PRESSURE, by="c", facts={"pressure_short": 0.9}
        )
        told = moving(given_.number, P.LOADING, at_time_s=100.0)
        if name == "b":
            told = {**engines(), MOVES: [ended(given_.number, MoveEnd.FAILED, "no device memory").told()]}
        await tell(made, name, told)
    snapshot = made.membership.snapshot()
    shown = [pb.FleetInstance(instance_id=name, state="up") for name in "ab"]
    for one in shown:
        describe_moves(one, snapshot.members[one.instance_id].facts, 103.0)
    assert (shown[0].state, shown[0].move_phase, shown[0].move_duration.seconds) == ("moving", "loading", 3)
    assert [(one.engine, one.move_cost_s) for one in shown] == [("sp", 12.0)] * 2
    assert (shown[1].move_phase, shown[1].move_error) == ("", "no device memory")
    moves = [pb.RoleMove(instance_id=move.worker_id, outcome=f"by {move.by}") for move in snapshot.moves]
    describe_ends(moves, snapshot.moves, snapshot)
    came = {move.instance_id: move.outcome for move in moves}
    assert came["a"] == "by c: loading"
    assert came["b"] == (
        "by c: failed in 11.8 s (draining 2.0, loading 9.8), 1 requests cut off: no device memory"
    )
    text = printed(fleet_view(pb.GetFleetResponse(instances=shown)))
    assert "moving: loading 3 s" in text
    assert "last move failed: no device memory" in text
    assert "failed in 11.8 s" in printed(moves_view(pb.ListMovesResponse(moves=moves)))


def test_an_order_says_what_it_takes() -> None:
    assert load_in_words(engines(move_s=41.6), Role.LP).endswith("engine lp, drain and load took 42 s last")
    assert load_in_words(engines(), Role.MIXED) == ""
    assert load_in_words({}, Role.LP) == ""


def printed(what: Any) -> str:
    from rich.console import Console

    console = Console(width=400)
    with console.capture() as capture:
        console.print(what)
    return capture.get()
