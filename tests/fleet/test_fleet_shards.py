"""Shards as operators see and change them, and the controller's rounds over them, on membership in memory."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
from test_controller import Loads, Rig, load, rig, view
from test_fleet_service import Fleet, fleet

from protos.plaserve.v1 import fleet_pb2 as pb
from service.core.reconcile import MoveReason
from service.core.types import Role
from service.fleet.controller import ControllerSettings, RolesStay
from service.fleet.membership import DRAINING, Member, MemberKind
from service.fleet.shard_controller import ShardSettings, states_of


async def shards(made: Fleet | Rig, *names: str) -> None:
    """With a scheduler that leads, each."""
    for name in names:
        await made.membership.join(Member(f"sched-{name}", MemberKind.SCHEDULER, f"sched-{name}:1", name))
        await made.membership.campaign(f"shard-{name}", f"sched-{name}")


# --- operators ---


async def test_shards_are_shown_with_who_leads_and_what_is_there() -> None:
    async with fleet("a", "b") as made:
        await made.membership.join(Member("spare", MemberKind.SCHEDULER, "spare:1", "s1"))
        await shards(made, "s2")
        await made.stub.MoveInstance(pb.MoveInstanceRequest(instance_id="a", shard_id="s2"))
        one, two = (await made.stub.GetFleet(pb.GetFleetRequest())).shards
        assert (one.shard_id, one.leader, list(one.standbys), one.epoch > 0) == (
            "s1",
            "sched",
            ["spare"],
            True,
        )
        assert (one.mixed_count, one.leaving_count, one.coming_count, one.queued_count) == (2, 1, 0, 6)
        assert (two.leader, two.mixed_count, two.coming_count, two.retired) == ("sched-s2", 0, 1, False)
        (instance, other) = (await made.stub.GetFleet(pb.GetFleetRequest())).instances
        assert (instance.state, instance.shard_id, instance.target_shard) == ("moving", "s1", "s2")
        assert (other.state, other.target_shard) == ("up", "s1")


async def test_a_worker_is_sent_to_another_shard_by_hand_and_keeps_its_role() -> None:
    async with fleet("a") as made:
        await shards(made, "s2")
        await made.stub.MoveInstance(pb.MoveInstanceRequest(instance_id="a", role=pb.ROLE_SP))
        asked = pb.MoveInstanceRequest(instance_id="a", shard_id="s2", by="me", dry_run=True)
        planned = (await made.stub.MoveInstance(asked)).move
        assert (planned.outcome, planned.from_shard, planned.to_shard) == ("planned", "s1", "s2")
        asked.dry_run = False
        assert (await made.stub.MoveInstance(asked)).move.outcome == "ordered"
        assert (await made.stub.MoveInstance(asked)).move.outcome == "no change"
        given = made.membership.snapshot().assignments["a"]
        assert (given.role, given.shard, given.by) == (Role.SP, "s2", "me")
        (move, _) = (await made.stub.ListMoves(pb.ListMovesRequest())).moves
        assert (move.from_shard, move.to_shard, move.from_role, move.to_role) == (
            "s1",
            "s2",
            pb.ROLE_SP,
            pb.ROLE_SP,
        )


async def test_where_nobody_leads_no_worker_is_sent() -> None:
    async with fleet("a") as made:
        await shards(made, "s2")
        await made.membership.retire("s2", True, by="me")
        for shard in ("s2", "s3"):
            with pytest.raises(grpc.aio.AioRpcError, match="there are s1") as caught:
                await made.stub.MoveInstance(pb.MoveInstanceRequest(instance_id="a", shard_id=shard))
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert made.membership.snapshot().assignments == {}


@pytest.mark.parametrize("there", [{"model": "n", "bundle_id": "x"}, {"model": "m", "bundle_id": "y" * 64}])
async def test_a_worker_is_not_sent_to_a_shard_that_serves_something_else(there: dict[str, str]) -> None:
    async with fleet("a") as made:
        await shards(made, "s2", "s3")
        for name, shard, facts in (("m", "s1", {"model": "m", "bundle_id": "x"}), ("n", "s2", there)):
            await made.membership.join(Member(name, MemberKind.WORKER, f"{name}:1", shard, facts))
        asked = pb.MoveInstanceRequest(instance_id="m", shard_id="s2")
        shown = f"{there['model']} .bundle {there['bundle_id'][:12]}.;"
        with pytest.raises(grpc.aio.AioRpcError, match=f"m serves m .bundle x., shard s2 {shown}") as caught:
            await made.stub.MoveInstance(asked)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        asked.shard_id = "s3"  # an empty one serves what comes
        assert (await made.stub.MoveInstance(asked)).move.outcome == "ordered"
        asked.shard_id = "s1"
        assert (await made.stub.MoveInstance(asked)).move.outcome == "ordered"


async def test_a_shard_is_retired_only_where_another_takes_over() -> None:
    async with fleet("a") as made:
        asked = pb.RetireShardRequest(shard_id="s1", retired=True, by="me")
        with pytest.raises(grpc.aio.AioRpcError, match="no other shard") as caught:
            await made.stub.RetireShard(asked)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.aio.AioRpcError, match="there are s1") as caught:
            await made.stub.RetireShard(pb.RetireShardRequest(shard_id="x", retired=True))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await shards(made, "s2")
        with pytest.raises(grpc.aio.AioRpcError, match=r"no other shard than s1 has .* a worker") as caught:
            await made.stub.RetireShard(asked)  # it leads, and can serve nothing
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert made.membership.snapshot().retired == {}
        await made.membership.join(Member("z", MemberKind.WORKER, "z:1", "s2"))
        answer = await made.stub.RetireShard(asked)
        assert (answer.shard.retired, answer.shard.note) == (True, "retired by me")
        await made.membership.pin("a", True, by="me")
        (one, _) = (await made.stub.GetFleet(pb.GetFleetRequest())).shards
        assert one.note == "pinned workers stay: a"
        asked.retired = False
        assert not (await made.stub.RetireShard(asked)).shard.retired
        assert made.membership.snapshot().retired == {}


async def test_the_command_line_of_shards() -> None:
    async with fleet("a", "b", "c") as made:
        await shards(made, "s2")
        assert (await made.cli("move", "a", "--shard", "s2"))[1].strip() == "a: shard s1 -> s2, ordered"
        assert (await made.cli("move", "b", "lp", "--shard", "s2"))[
            1
        ].strip() == "b: mixed -> lp, shard s1 -> s2, ordered"
        code, said = await made.cli("move", "a")
        assert code == 1
        assert "--shard" in said
        assert (await made.cli("retire-shard", "s2"))[1].strip() == "shard s2: retired, 0 workers are to go"
        code, said = await made.cli("status")
        assert code == 0
        assert all(
            word in said for word in ("s1 -> s2", "sched-s2", "retired by", "0 / 0 / 3 -2", "0 / 0 / 0 +2")
        )
        assert "shard s1 -> s2" in (await made.cli("history"))[1]
        assert (await made.cli("retire-shard", "s2", "--off"))[1].strip() == "shard s2: in service, 0 workers"
        assert [s["shardId"] for s in json.loads((await made.cli("status", "--json"))[1])["shards"]] == [
            "s1",
            "s2",
        ]


# --- the controller ---


async def test_a_dry_run_of_shards_says_and_does_not() -> None:
    made = await rig("a", "b", "c", "d")
    await shards(made, "s", "t")
    controller = made.controller(RolesStay, settings=ControllerSettings(dry_run=True))
    for _ in range(3):
        await controller.round(None)
    assert made.wanted == {}
    assert {(d.move.from_shard, d.move.to_shard, d.written) for d in controller.shards.decisions} == {
        ("s", "t", False)
    }


async def test_shards_are_evened_out_with_reasons_one_at_a_time() -> None:
    made = await rig("a", "b", "c", "d")
    await shards(made, "s", "t")
    made.loads = Loads({"s": view(*(load(name) for name in "abcd"))})
    controller = made.controller(RolesStay)
    for _ in range(3):
        await controller.round(None)
        await made.settle()
    (move,) = made.membership.snapshot().moves
    assert (move.from_shard, move.to_shard, move.reason, move.by) == ("s", "t", MoveReason.BALANCE, "c1")
    assert move.facts == {"capacity_from": 4.0, "capacity_to": 0.0}
    for expected in (2, 2):
        for name, given in made.membership.snapshot().assignments.items():
            await made.leases[name].update(shard=given.shard)
        await controller.round(None)
        await made.settle()
        assert len(made.membership.snapshot().moves) == expected
        assert controller.moves[MoveReason.BALANCE] == expected


async def test_who_lost_the_lead_moves_no_worker_and_pinned_ones_stay() -> None:
    made = await rig("a", "b", "c", "d")
    await shards(made, "s", "t")
    first = await made.membership.campaign("controller", "c1")
    controller = made.controller(RolesStay)
    await first.resign()
    await controller.round(first)
    assert made.wanted == {}
    for name in "abcd":
        await made.membership.pin(name, True, by="me", role=Role.MIXED)
    await controller.round(None)
    assert {given.shard for given in made.membership.snapshot().assignments.values()} == {""}


async def test_who_leaves_the_fleet_is_no_capacity_and_a_silent_shard_may_hold_requests() -> None:
    made = await rig("a", "b", "c", "d")
    await shards(made, "s", "t")
    await made.membership.join(Member("e", MemberKind.WORKER, "e:1", "t"))
    await made.membership.join(Member("f", MemberKind.WORKER, "f:1", "t"))
    for name in "ab":
        await made.leases[name].update(facts={DRAINING: "it stops"})
    await made.settle()
    controller = made.controller(RolesStay)
    await controller.round(None)
    assert made.wanted == {}
    states = {state.name: state for state in states_of(made.membership.snapshot(), {"t": view(load("e"))})}
    assert (states["s"].takes, states["s"].holds, states["t"].holds) == (True, True, False)


async def test_the_last_worker_of_a_retired_shard_stays_while_its_link_is_down() -> None:
    """What waits is not seen then; it is not nothing."""
    made = await rig("a")
    await shards(made, "s", "t")
    await made.membership.join(Member("b", MemberKind.WORKER, "b:1", "t"))
    await made.membership.retire("s", True, by="me")
    await made.settle()
    made.loads = Loads({"s": view(), "t": view(load("b"))})
    controller = made.controller(RolesStay)
    await controller.round(None)
    assert made.wanted == {}
    made.loads.views["s"] = view(load("a"))
    await controller.round(None)
    await made.settle()
    assert made.membership.snapshot().assignments["a"].shard == "t"
    assert controller.moves[MoveReason.RETIRED] == 1


async def test_how_long_a_worker_is_on_its_way_counts_from_the_present_lead() -> None:
    """Before it others led: it may have gone there and be on its way for the second time."""
    made = await rig("a", "b")
    await shards(made, "s", "t")
    await made.membership.assign("a", Role.MIXED, expected=0, reason=MoveReason.BALANCE, by="me", shard="t")
    other = made.fleet.membership()
    await other.open()
    settings = ControllerSettings(shards=ShardSettings(overdue_s=50.0))
    controller = made.controller(RolesStay, settings=settings)
    running = asyncio.create_task(controller.run())
    try:
        await made.settle()
        assert controller.leadership is not None
        next_one = asyncio.create_task(other.campaign("controller", "c2"))
        await made.settle()
        await controller.leadership.resign()
        second = await asyncio.wait_for(next_one, 20)
        await made.settle()
        assert controller.leadership is None
        for _ in range(60):
            await made.clock.advance(1.0)
            await made.settle()
        await second.resign()
        await made.settle()
        assert controller.leadership is not None
        assert controller.shards._since.keys() == {"a"}  # it has looked
        assert controller.moves[MoveReason.OVERDUE] == 0
        assert made.membership.snapshot().assignments["a"].shard == "t"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_move_of_a_pinned_worker_is_not_taken_back() -> None:
    made = await rig("a", "b")
    await shards(made, "s", "t")
    await made.membership.assign("a", Role.MIXED, expected=0, reason=MoveReason.PINNED, by="me", shard="t")
    await made.membership.pin("a", True, by="me")
    settings = ControllerSettings(shards=ShardSettings(overdue_s=5.0))
    controller = made.controller(RolesStay, settings=settings)
    for _ in range(10):
        await controller.round(None)
        await made.clock.advance(1.0)
        await made.settle()
    assert made.membership.snapshot().assignments["a"].shard == "t"
    await made.membership.pin("a", False, by="me")
    for _ in range(8):
        await controller.round(None)
        await made.clock.advance(1.0)
        await made.settle()
    assert made.membership.snapshot().assignments["a"].shard == "s"
