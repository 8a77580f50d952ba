"""A pool of long prefills is shown under the pressure of its own target, not of a chat's."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import grpc.aio
import pytest
from rich.console import Console

from protos.plaserve.v1 import fleet_pb2 as pb
from service.cli.fleet import fleet_view
from service.core.reconcile import FleetView, InstanceLoad
from service.core.settings import SchedulerSettings
from service.core.types import Role
from service.fleet.clock import VirtualClock
from service.fleet.controller import FleetController
from service.fleet.fleet_service import FleetServicer
from service.fleet.load import LOOK_S_MAX, LoadReport, from_proto
from service.fleet.membership import Member, MemberKind
from service.fleet.memory import MemoryFleet
from service.policies import make_scheduler


class Still:
    period_s = 1.0

    def step(self, fleet: FleetView, now_s: float) -> tuple[()]:
        return ()


class Loads:
    """Each worker with a second of backlog; longs of two seconds each, or none."""

    longs = True

    async def load(self, shard: str) -> FleetView:
        loads = (InstanceLoad("s", Role.SP, 1.0, 0.0, 0.0, 1), InstanceLoad("l", Role.LP, 1.0, 0.0, 0.0, 1))
        rate, work = (0.5, 1.0) if self.longs else (0.0, 0.0)
        return FleetView(loads, 1.0, rate, 0.1, work, 1)


async def test_each_pool_is_measured_by_its_own_target() -> None:
    clock = VirtualClock()
    membership = MemoryFleet(clock).membership()
    await membership.open()
    for name, role in (("s", Role.SP), ("l", Role.LP)):
        lease = await membership.join(Member(name, MemberKind.WORKER, f"{name}:1", "s1"))
        await lease.report(role, 0)
    loads = Loads()
    controller = FleetController(membership, "c1", Still, loads, None, clock.now_s)
    settings = SchedulerSettings()
    servicer = FleetServicer(membership, controller, settings, grpc.aio.insecure_channel)
    long_target_s = settings.ttft_target_long_factor * 2.0 + settings.ttft_target_long_offset_s
    for loads.longs in (True, False):  # with none in the last second, the mean of before still holds
        await controller.round(None)
        told = await servicer.get_fleet(pb.GetFleetRequest(), None)
        shown = {instance.instance_id: instance.pressure for instance in told.instances}
        assert shown == pytest.approx({"s": 1.0, "l": 1.0 / long_target_s})
        assert (told.sp_pressure, told.lp_pressure) == pytest.approx((shown["s"], shown["l"]))


async def test_what_was_looked_at_once_has_no_pressure_yet_and_nothing_is_decided_on_it() -> None:
    """A new leader's first look: rates and utilisation would be zeros."""
    asked: list[FleetView] = []

    class Notes(Still):
        def step(self, fleet: FleetView, now_s: float) -> tuple[()]:
            asked.append(fleet)
            return ()

    clock = VirtualClock()
    membership = MemoryFleet(clock).membership()
    await membership.open()
    for name, role in (("s", Role.SP), ("l", Role.LP)):
        lease = await membership.join(Member(name, MemberKind.WORKER, f"{name}:1", "s1"))
        await lease.report(role, 0)
    report = LoadReport(make_scheduler("plaserve", SchedulerSettings()), 1, clock.now_s)

    class Looks(Loads):
        """As a scheduler answers its observers, with the loads of above."""

        async def load(self, shard: str) -> FleetView:
            return replace(await super().load(shard), first_look=from_proto(report.look("c1")).first_look)

    controller = FleetController(membership, "c1", Notes, Looks(), None, clock.now_s)
    servicer = FleetServicer(membership, controller, SchedulerSettings(), grpc.aio.insecure_channel)
    for wait_s, known in ((1.0, False), (1.0, True), (1.0, True), (LOOK_S_MAX + 1.0, False), (1.0, True)):
        asked.clear()
        await clock.advance(wait_s)
        await controller.round(None)
        told = await servicer.get_fleet(pb.GetFleetRequest(), None)
        assert bool(asked) is known
        assert {one.HasField("pressure") for one in told.instances} == {known}
        assert told.HasField("sp_pressure") == told.HasField("lp_pressure") == known
        text = Console(width=200, file=StringIO())
        text.print(fleet_view(told))
        assert ("not known yet" in text.file.getvalue()) is not known
