"""What operators see and may do, over real gRPC and through the command line, on membership in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from typer.testing import CliRunner

from protos.plaserve.v1 import fleet_pb2 as pb
from protos.plaserve.v1.fleet_pb2_grpc import FleetServiceStub
from service.cli import app
from service.core.reconcile import FleetView, InstanceLoad, MoveReason
from service.core.settings import SchedulerSettings
from service.core.types import Role
from service.fleet.clock import VirtualClock
from service.fleet.controller import FleetController
from service.fleet.fleet_service import FleetServicer
from service.fleet.membership import Member, MemberKind, Membership
from service.fleet.memory import MemoryFleet


class Still:
    """A pure controller that wants nothing."""

    period_s = 1.0

    def step(self, fleet: FleetView, now_s: float) -> tuple[()]:
        return ()


@dataclass
class Fleet:
    store: MemoryFleet
    clock: VirtualClock
    membership: Membership
    controller: FleetController
    stub: Any
    address: str

    def role(self, name: str) -> Role:
        return self.membership.snapshot().assignments[name].role

    async def cli(self, *words: str) -> tuple[int, str]:
        result = await asyncio.to_thread(
            CliRunner().invoke, app, ["fleet", *words, "--addr", self.address], env={"COLUMNS": "160"}
        )
        return result.exit_code, result.output


@asynccontextmanager
async def fleet(*workers: str) -> AsyncIterator[Fleet]:
    clock = VirtualClock()
    store = MemoryFleet(clock)
    membership = store.membership()
    await membership.open()
    for name in workers:
        lease = await membership.join(Member(name, MemberKind.WORKER, f"{name}:1", "s1"))
        await lease.report(Role.MIXED, 0)
    await membership.join(Member("sched", MemberKind.SCHEDULER, "sched:1", "s1"))
    await membership.campaign("shard-s1", "sched")

    class Loads:
        async def load(self, shard: str) -> FleetView:
            loads = tuple(InstanceLoad(name, Role.MIXED, 0.2, 0.5, 0.75, 3) for name in workers)
            return FleetView(loads, 1.0, 1.0, 0.1, 0.1, 2)

    controller = FleetController(membership, "c1", Still, Loads(), None, clock.now_s)
    await controller.round(None)
    servicer = FleetServicer(membership, controller, SchedulerSettings(), grpc.aio.insecure_channel)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((servicer.handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = f"127.0.0.1:{port}"
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = FleetServiceStub(channel)  # type: ignore[no-untyped-call]
            yield Fleet(store, clock, membership, controller, stub, address)
    finally:
        await server.stop(None)
        await membership.close()


async def test_who_is_there_with_roles_and_loads() -> None:
    async with fleet("a", "b") as made:
        answer = await made.stub.GetFleet(pb.GetFleetRequest())
        assert [one.instance_id for one in answer.instances] == ["a", "b"]
        one = answer.instances[0]
        assert (one.shard_id, one.role, one.state, one.queued_count) == ("s1", pb.ROLE_MIXED, "up", 3)
        assert one.pressure > 0
        (process,) = answer.processes
        assert (process.member_id, process.kind, process.epoch > 0) == ("sched", "scheduler", True)


async def test_a_move_by_hand_is_written_with_who_asked() -> None:
    async with fleet("a", "b") as made:
        request = pb.MoveInstanceRequest(instance_id="a", role=pb.ROLE_SP, by="me")
        planned = await made.stub.MoveInstance(
            pb.MoveInstanceRequest(instance_id="a", role=pb.ROLE_SP, dry_run=True)
        )
        assert planned.move.outcome == "planned"
        assert made.membership.snapshot().moves == ()
        ordered = await made.stub.MoveInstance(request)
        assert (ordered.move.outcome, ordered.move.from_role) == ("ordered", pb.ROLE_MIXED)
        assert made.role("a") is Role.SP
        again = await made.stub.MoveInstance(request)
        assert again.move.outcome == "no change"
        (move,) = made.membership.snapshot().moves
        assert (move.by, move.reason) == ("me", MoveReason.PINNED)
        answer = await made.stub.GetFleet(pb.GetFleetRequest())
        assert [one.state for one in answer.instances] == ["moving", "up"]


async def test_a_pinned_one_is_moved_by_operators_only() -> None:
    async with fleet("a") as made:
        pinned = await made.stub.PinInstance(
            pb.PinInstanceRequest(instance_id="a", pinned=True, role=pb.ROLE_LP, by="me")
        )
        assert (pinned.instance.pinned, pinned.instance.target_role) == (True, pb.ROLE_LP)
        await made.stub.MoveInstance(pb.MoveInstanceRequest(instance_id="a", role=pb.ROLE_SP))
        assert made.role("a") is Role.SP
        assert made.membership.snapshot().assignments["a"].pinned
        free = await made.stub.PinInstance(pb.PinInstanceRequest(instance_id="a", pinned=False))
        assert not free.instance.pinned


async def test_a_worker_that_was_never_assigned_can_be_pinned_as_it_is() -> None:
    async with fleet("a") as made:
        await made.stub.PinInstance(pb.PinInstanceRequest(instance_id="a", pinned=True))
        assert made.role("a") is Role.MIXED


@pytest.mark.parametrize(
    ("request_", "code", "named"),
    [
        (pb.MoveInstanceRequest(instance_id="x", role=pb.ROLE_SP), grpc.StatusCode.NOT_FOUND, "there are a"),
        (pb.MoveInstanceRequest(instance_id="sched", role=pb.ROLE_SP), grpc.StatusCode.NOT_FOUND, "sched"),
        (pb.MoveInstanceRequest(instance_id="a"), grpc.StatusCode.INVALID_ARGUMENT, "role"),
    ],
)
async def test_a_bad_wish_is_named(
    request_: pb.MoveInstanceRequest, code: grpc.StatusCode, named: str
) -> None:
    async with fleet("a") as made:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made.stub.MoveInstance(request_)
        assert caught.value.code() is code
        assert named in (caught.value.details() or "")


async def test_with_membership_away_reads_go_on_and_writes_say_so() -> None:
    async with fleet("a") as made:
        made.store.away = True
        await made.clock.advance(30.0)
        answer = await made.stub.GetFleet(pb.GetFleetRequest())
        assert answer.stale
        assert answer.age.ToNanoseconds() >= 25e9
        moving = asyncio.ensure_future(
            made.stub.MoveInstance(pb.MoveInstanceRequest(instance_id="a", role=pb.ROLE_SP))
        )
        while not moving.done():
            await asyncio.sleep(0.01)
            await made.clock.advance(1.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await moving
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        made.store.away = False
        await made.clock.advance(30.0)


async def test_history_comes_in_pages_without_gaps() -> None:
    async with fleet("a") as made:
        for role in (pb.ROLE_SP, pb.ROLE_LP) * 4:
            await made.stub.MoveInstance(pb.MoveInstanceRequest(instance_id="a", role=role))
        numbers, token = [], ""
        while True:
            page = await made.stub.ListMoves(pb.ListMovesRequest(page_size=3, page_token=token))
            numbers += [move.to_role for move in page.moves]
            token = page.next_page_token
            if not token:
                break
        assert numbers == [pb.ROLE_LP, pb.ROLE_SP] * 4
        with pytest.raises(grpc.aio.AioRpcError, match="page_token"):
            await made.stub.ListMoves(pb.ListMovesRequest(page_token="x"))


async def test_watching_shows_changes() -> None:
    async with fleet("a") as made:
        request = pb.WatchFleetRequest()
        request.interval.FromMilliseconds(100)
        call = made.stub.WatchFleet(request)
        first = await call.read()
        await made.stub.MoveInstance(pb.MoveInstanceRequest(instance_id="a", role=pb.ROLE_SP))
        second = await call.read()
        assert [a.instances[0].target_role for a in (first, second)] == [pb.ROLE_MIXED, pb.ROLE_SP]
        call.cancel()


async def test_the_command_line() -> None:
    async with fleet("a", "b") as made:
        code, said = await made.cli("status")
        assert code == 0
        assert all(word in said for word in ("a", "b", "mixed", "active, epoch", "no controller leads"))
        assert (await made.cli("move", "a", "sp", "--dry-run"))[1].strip() == "a: mixed -> sp, planned"
        assert (await made.cli("move", "a", "sp"))[1].strip() == "a: mixed -> sp, ordered"
        assert (await made.cli("pin", "b", "lp"))[1].strip() == "b: lp, pinned"
        assert (await made.cli("pin", "b", "--off"))[1].strip() == "b: lp, free to move"
        code, said = await made.cli("history")
        assert code == 0
        assert "- -> sp" in said
        assert "pinned" in said
        code, said = await made.cli("status", "--json")
        assert json.loads(said)["instances"][0]["targetRole"] == "ROLE_SP"
        code, said = await made.cli("move", "nobody", "sp")
        assert code == 1
        assert "nobody" in said
