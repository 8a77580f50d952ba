"""The controller's rounds over membership in memory: what it decides, writes, takes back and leaves alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.reconcile import Controller, FleetView, InstanceLoad, MoveReason, RoleMove
from service.core.settings import Mode, SchedulerSettings
from service.core.types import Role
from service.fleet.clock import VirtualClock
from service.fleet.controller import ControllerSettings, FleetController, shown
from service.fleet.load import from_proto, to_proto
from service.fleet.membership import Assignment, Lease, Member, MemberKind, Membership
from service.fleet.memory import MemoryFleet
from service.policies import make_controller


@dataclass
class Scripted:
    """A pure controller that wants what it is told, and keeps what it was shown."""

    wants: list[RoleMove] = field(default_factory=list)
    seen: list[FleetView] = field(default_factory=list)
    period_s: float = 1.0

    def step(self, fleet: FleetView, now_s: float) -> tuple[RoleMove, ...]:
        self.seen.append(fleet)
        return tuple(self.wants)


@dataclass
class Loads:
    views: dict[str, FleetView] = field(default_factory=dict)

    async def load(self, shard: str) -> FleetView | None:
        return self.views.get(shard)


def load(name: str, role: Role = Role.MIXED, backlog_s: float = 0.0, busy: float = 0.5) -> InstanceLoad:
    return InstanceLoad(name, role, backlog_s, 0.0, busy, int(backlog_s * 10))


def view(*loads: InstanceLoad, short: float = 0.0, long: float = 0.0) -> FleetView:
    return FleetView(tuple(loads), 10 * short, long, short, long, 10)


@dataclass
class Rig:
    fleet: MemoryFleet
    clock: VirtualClock
    membership: Membership
    loads: Loads
    leases: dict[str, Lease]

    def controller(
        self, make: Callable[[], Controller], name: str = "c1", settings: ControllerSettings | None = None
    ) -> FleetController:
        return FleetController(self.membership, name, make, self.loads, settings, self.clock.now_s)

    @property
    def wanted(self) -> dict[str, Role]:
        return {name: given.role for name, given in self.membership.snapshot().assignments.items()}

    async def settle(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)


async def rig(*workers: str, shard: str = "s") -> Rig:
    clock = VirtualClock()
    fleet = MemoryFleet(clock)
    membership = fleet.membership()
    await membership.open()
    leases = {}
    for name in workers:
        leases[name] = await membership.join(Member(name, MemberKind.WORKER, f"{name}:1", shard))
    made = Rig(fleet, clock, membership, Loads(), leases)
    await made.settle()
    return made


async def test_what_is_decided_is_written_with_its_reason_and_figures() -> None:
    made = await rig("a", "b")
    made.loads.views["s"] = view(load("a"), load("b"))
    scripted = Scripted([RoleMove("a", Role.SP, MoveReason.PRESSURE, 0.9, 0.1)])
    controller = made.controller(lambda: scripted)
    await controller.round(None)
    await made.settle()
    given = made.membership.snapshot().assignments["a"]
    assert (given.role, given.reason, given.by) == (Role.SP, MoveReason.PRESSURE, "c1")
    (move,) = made.membership.snapshot().moves
    assert move.facts == {"pressure_short": 0.9, "pressure_long": 0.1}
    assert [d.written for d in controller.decisions] == [True]


async def test_a_move_under_way_is_shown_as_made_and_not_ordered_twice() -> None:
    made = await rig("a", "b")
    made.loads.views["s"] = view(load("a"), load("b"))
    scripted = Scripted([RoleMove("a", Role.SP, MoveReason.PRESSURE)])
    controller = made.controller(lambda: scripted)
    for _ in range(3):
        await controller.round(None)
        await made.settle()
    assert [load.role for load in scripted.seen[-1].instances] == [Role.SP, Role.MIXED]
    assert len(made.membership.snapshot().moves) == 1


async def test_a_move_that_nobody_carries_out_is_taken_back() -> None:
    made = await rig("a", "b")
    made.loads.views["s"] = view(load("a"), load("b"))
    await made.leases["a"].report(Role.MIXED, 0)
    scripted = Scripted([RoleMove("a", Role.SP, MoveReason.PRESSURE)])
    controller = made.controller(lambda: scripted, settings=ControllerSettings(overdue_s=10.0))
    await controller.round(None)
    scripted.wants.clear()
    await made.settle()
    for _ in range(10):
        await controller.round(None)
        assert made.wanted == {"a": Role.SP}
        await made.clock.advance(1.0)
        await made.settle()
    await controller.round(None)
    await made.settle()
    assert made.wanted == {"a": Role.MIXED}
    assert made.membership.snapshot().moves[0].reason is MoveReason.OVERDUE


async def test_a_move_that_was_carried_out_stays() -> None:
    made = await rig("a")
    made.loads.views["s"] = view(load("a"))
    scripted = Scripted([RoleMove("a", Role.LP, MoveReason.PRESSURE)])
    controller = made.controller(lambda: scripted, settings=ControllerSettings(overdue_s=5.0))
    await controller.round(None)
    await made.settle()
    await made.leases["a"].report(Role.LP, made.membership.snapshot().assignments["a"].number)
    scripted.wants.clear()
    for _ in range(10):
        await made.clock.advance(1.0)
        await made.settle()
        await controller.round(None)
    assert made.wanted == {"a": Role.LP}


async def test_a_pinned_worker_counts_and_does_not_move() -> None:
    made = await rig("a", "b")
    made.loads.views["s"] = view(load("a"), load("b"))
    await made.membership.pin("a", True, by="operator", role=Role.LP)
    await made.settle()
    moves = [RoleMove(name, Role.SP, MoveReason.PRESSURE) for name in ("a", "b")]
    scripted = Scripted(moves)
    controller = made.controller(lambda: scripted)
    await controller.round(None)
    await made.settle()
    assert made.wanted == {"a": Role.LP, "b": Role.SP}
    assert [load.instance_id for load in scripted.seen[-1].instances] == ["a", "b"]


async def test_a_dry_run_says_and_does_not() -> None:
    made = await rig("a")
    made.loads.views["s"] = view(load("a"))
    scripted = Scripted([RoleMove("a", Role.SP, MoveReason.PRESSURE)])
    controller = made.controller(lambda: scripted, settings=ControllerSettings(dry_run=True))
    await controller.round(None)
    await made.settle()
    assert made.wanted == {}
    (decision,) = controller.decisions
    assert (decision.move.role, decision.from_role, decision.written) == (Role.SP, Role.MIXED, False)


async def test_a_shard_without_load_is_left_alone() -> None:
    made = await rig("a")
    scripted = Scripted([RoleMove("a", Role.SP, MoveReason.PRESSURE)])
    await made.controller(lambda: scripted).round(None)
    assert scripted.seen == []
    assert made.wanted == {}


async def test_membership_away_decides_nothing() -> None:
    made = await rig("a")
    made.loads.views["s"] = view(load("a"))
    scripted = Scripted([RoleMove("a", Role.SP, MoveReason.PRESSURE)])
    controller = made.controller(lambda: scripted)
    made.fleet.away = True
    await made.clock.advance(60.0)
    await made.settle()
    await controller.round(None)
    assert scripted.seen == []
    made.fleet.away = False
    await made.clock.advance(5.0)
    await made.settle()
    await controller.round(None)
    await made.settle()
    assert made.wanted == {"a": Role.SP}


async def test_who_has_lost_the_lead_without_knowing_changes_nothing() -> None:
    made = await rig("a")
    made.loads.views["s"] = view(load("a"))
    first = await made.membership.campaign("controller", "c1")
    scripted = Scripted([RoleMove("a", Role.SP, MoveReason.PRESSURE)])
    controller = made.controller(lambda: scripted)
    await first.resign()
    await made.membership.campaign("controller", "c2")
    await controller.round(first)
    await made.settle()
    assert made.wanted == {}
    assert [d.written for d in controller.decisions] == [False]


async def test_one_leads_at_a_time_and_the_next_takes_over() -> None:
    made = await rig("a")
    controllers = [made.controller(Scripted, name) for name in ("c1", "c2")]
    running = [asyncio.create_task(controller.run()) for controller in controllers]
    await made.settle()
    (leading,) = [c for c in controllers if c.leadership is not None]
    epoch = leading.leadership.epoch
    running[controllers.index(leading)].cancel()
    await made.settle()
    (other,) = [c for c in controllers if c.leadership is not None]
    assert other is not leading
    assert other.leadership.epoch > epoch
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_the_cores_controller_forms_pools_over_membership() -> None:
    """The same code as in the simulator: spatial mode, work in both lanes."""
    names = [f"w{n}" for n in range(8)]
    made = await rig(*names)
    settings = replace(SchedulerSettings(), mode=Mode.SPATIAL)

    def make() -> Controller:
        controller = make_controller("plaserve", settings)
        assert controller is not None
        return controller

    controller = made.controller(make)
    for _ in range(30):
        wanted = made.wanted
        loads = [load(name, wanted.get(name, Role.MIXED), 0.05) for name in names]
        made.loads.views["s"] = view(*loads, short=2.0, long=2.0)
        await controller.round(None)
        await made.clock.advance(1.0)
        await made.settle()
        for name, one in made.membership.snapshot().assignments.items():
            await made.leases[name].report(one.role, one.number)
    pools = sorted(made.wanted.values())
    assert set(pools) == {Role.SP, Role.LP}
    assert len(pools) == 8


_LOADS = st.lists(
    st.builds(
        InstanceLoad,
        st.text(min_size=1, max_size=8),
        st.sampled_from(Role),
        st.floats(0, 1e3),
        st.floats(0, 1),
        st.floats(0, 1),
        st.integers(0, 10_000),
        st.floats(0, 1e3),
    ),
    max_size=5,
).map(tuple)


@given(st.builds(FleetView, _LOADS, *[st.floats(0, 1e4)] * 4, st.integers(0, 2**40), st.booleans()))
def test_a_load_crosses_whole(given_view: FleetView) -> None:
    assert from_proto(to_proto(given_view, 3, active=True)) == given_view


def test_only_roles_are_shown_otherwise() -> None:
    given = Assignment("a", Role.LP, MoveReason.PRESSURE, "c", 1)
    before = view(load("a"), load("b", Role.SP))
    after = shown(before, {"a": given})
    assert [one.role for one in after.instances] == [Role.LP, Role.SP]
    assert replace(after, instances=before.instances) == before


def test_an_unknown_role_is_named() -> None:
    answer = to_proto(view(load("a")), 1, active=True)
    answer.instances[0].role = "xp"
    with pytest.raises(ValueError, match="role"):
        from_proto(answer)
