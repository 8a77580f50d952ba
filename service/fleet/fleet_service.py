"""FleetService: what operators see of a fleet and may do to it.

Every controller serves it, leading or not: members, roles and history are membership's, and a change an
operator asks for is a write there, by compare and set. Pressures and loads are known to the one that leads;
another one says who that is. A move that an operator asks for moves a pinned worker too, and stays until the
controller sees cause to move it again: pin it to keep it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from protos.plaserve.v1 import fleet_pb2 as pb
from protos.plaserve.v1 import worker_pb2 as worker_pb
from service.core.pressure import PressureSettings, pool_pressure
from service.core.reconcile import InstanceLoad, MoveReason
from service.core.settings import SchedulerSettings
from service.core.types import Role
from service.fleet.controller import ELECTION, FleetController
from service.fleet.fleet_shards import other_takers, shards_of
from service.fleet.link import SERVICE as WORKER_SERVICE
from service.fleet.membership import (
    DRAINING,
    Assignment,
    Conflict,
    FleetSnapshot,
    Member,
    MemberKind,
    Membership,
    MembershipUnavailable,
    Move,
)
from service.fleet.pressures import Pressures
from service.fleet.role_view import describe_ends, describe_moves, load_in_words
from service.fleet.shards import in_words, served_by, shard_capacities, wanted_shard

NAME = "plaserve.v1.FleetService"
PAGE_MAX = 200
INTERVAL_S_MIN = 0.1
ANSWER_S = 5.0  # beyond the timeout of a drain
Context = grpc.aio.ServicerContext[Any, Any]

_ROLES = {Role.SP: pb.ROLE_SP, Role.LP: pb.ROLE_LP, Role.MIXED: pb.ROLE_MIXED}
_ROLE_OF = {number: role for role, number in _ROLES.items()}


class FleetServicer:
    """scheduler, knobs: of the controller, so that pressures are shown about as it sees them: it forecasts
    too and knows how much of a backlog shares passes. open_channel: to a worker that is to drain."""

    def __init__(
        self,
        membership: Membership,
        controller: FleetController,
        scheduler: SchedulerSettings,
        open_channel: Callable[[str], grpc.aio.Channel],
        knobs: PressureSettings | None = None,
        *,
        dry_run: bool = False,
    ) -> None:
        self._membership = membership
        self._controller = controller
        self.pressures = Pressures(scheduler, knobs)
        self._open_channel = open_channel
        self._dry_run = dry_run

    @property
    def handlers(self) -> grpc.GenericRpcHandler:
        unary = grpc.unary_unary_rpc_method_handler
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "GetFleet": unary(self.get_fleet, pb.GetFleetRequest.FromString, _bytes),
            "WatchFleet": grpc.unary_stream_rpc_method_handler(
                self.watch_fleet, pb.WatchFleetRequest.FromString, _bytes
            ),
            "MoveInstance": unary(self.move_instance, pb.MoveInstanceRequest.FromString, _bytes),
            "DrainInstance": unary(self.drain_instance, pb.DrainInstanceRequest.FromString, _bytes),
            "PinInstance": unary(self.pin_instance, pb.PinInstanceRequest.FromString, _bytes),
            "RetireShard": unary(self.retire_shard, pb.RetireShardRequest.FromString, _bytes),
            "ListMoves": unary(self.list_moves, pb.ListMovesRequest.FromString, _bytes),
        }
        return grpc.method_handlers_generic_handler(NAME, methods)

    # --- what is there ---

    async def get_fleet(self, request: pb.GetFleetRequest, context: Context) -> pb.GetFleetResponse:
        return self._fleet()

    async def watch_fleet(
        self, request: pb.WatchFleetRequest, context: Context
    ) -> AsyncIterator[pb.GetFleetResponse]:
        interval_s = request.interval.ToNanoseconds() / 1e9 if request.HasField("interval") else 1.0
        while True:
            yield self._fleet()
            await asyncio.sleep(max(INTERVAL_S_MIN, interval_s))

    async def list_moves(self, request: pb.ListMovesRequest, context: Context) -> pb.ListMovesResponse:
        moves = self._membership.snapshot().moves
        size = min(request.page_size or PAGE_MAX, PAGE_MAX)
        start = 0
        if request.page_token:  # the number of the last move of the page before
            older = [i for i, move in enumerate(moves) if str(move.number) == request.page_token]
            if not older:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"page_token: {request.page_token!r} is not of this history; begin anew without one",
                )
            start = older[0] + 1
        page = moves[start : start + size]
        more = start + size < len(moves)
        moves_made = [_move(move) for move in page]
        describe_ends(moves_made, page, self._membership.snapshot())
        return pb.ListMovesResponse(moves=moves_made, next_page_token=str(page[-1].number) if more else "")

    # --- what may be done ---

    async def move_instance(
        self, request: pb.MoveInstanceRequest, context: Context
    ) -> pb.MoveInstanceResponse:
        member = await self._worker(request.instance_id, context)
        snapshot = self._membership.snapshot()
        wanted = snapshot.assignments.get(member.member_id)
        from_role, from_shard = _present(member, wanted), wanted_shard(snapshot, member)
        to_shard = await self._target(request.shard_id, member, context) or from_shard
        stays = request.shard_id and request.role == pb.ROLE_UNSPECIFIED
        role = from_role if stays else await self._role(request.role, context)
        planned = pb.RoleMove(
            instance_id=member.member_id,
            from_role=_ROLES[from_role],
            to_role=_ROLES[role],
            reason=MoveReason.PINNED.value if wanted is not None and wanted.pinned else "operator",
            outcome="planned",
        )
        if from_shard != to_shard:
            planned.from_shard, planned.to_shard = from_shard, to_shard
        changes = (from_role, from_shard) != (role, to_shard)
        if request.dry_run or not changes:
            planned.outcome = f"planned{load_in_words(member.facts, role)}" if changes else "no change"
            return pb.MoveInstanceResponse(move=planned)
        try:
            given = await self._membership.assign(
                member.member_id,
                role,
                expected=wanted.number if wanted is not None else 0,
                reason=MoveReason.PINNED,
                by=request.by or "operator",
                force=True,
                shard=request.shard_id,
            )
        except Conflict as error:
            await context.abort(
                grpc.StatusCode.ABORTED, f"{member.member_id} was moved meanwhile: {error}; look again"
            )
            raise AssertionError("abort raises") from None
        except MembershipUnavailable as error:
            await _unavailable(context, error)
        planned.start_time.CopyFrom(_timestamp(given.at_time_s))
        planned.outcome = f"ordered{load_in_words(member.facts, role)}"
        return pb.MoveInstanceResponse(move=planned)

    async def pin_instance(self, request: pb.PinInstanceRequest, context: Context) -> pb.PinInstanceResponse:
        member = await self._worker(request.instance_id, context)
        role = None
        if request.role != pb.ROLE_UNSPECIFIED:
            role = await self._role(request.role, context)
        elif _wanted(self._membership.snapshot(), member) is None:
            role = _present(member, None)
        try:
            given = await self._membership.pin(
                member.member_id, request.pinned, by=request.by or "operator", role=role
            )
        except MembershipUnavailable as error:
            await _unavailable(context, error)
        snapshot = self._membership.snapshot()
        known = replace(snapshot, assignments={**snapshot.assignments, member.member_id: given})
        return pb.PinInstanceResponse(instance=self._instance(member, known, {}, {}))

    async def retire_shard(self, request: pb.RetireShardRequest, context: Context) -> pb.RetireShardResponse:
        """Refused where its requests and workers would have nowhere to go."""
        name, snapshot = request.shard_id, self._membership.snapshot()
        known = {shard.shard_id for shard in shards_of(snapshot, {})}
        if name not in known:
            what = (
                f"shard_id: no shard {name!r} in this fleet; there are {', '.join(sorted(known)) or 'none'}"
            )
            await context.abort(grpc.StatusCode.NOT_FOUND, what)
        capacities = shard_capacities(snapshot)
        if request.retired and not any(capacities[other] > 0.0 for other in other_takers(snapshot, name)):
            what = (
                f"shard_id: no other shard than {name} has a scheduler and a worker to take its requests; "
                "start another one first, or send it a worker with `plaserve fleet move`"
            )
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, what)
        try:
            await self._membership.retire(name, request.retired, by=request.by or "operator")
        except MembershipUnavailable as error:
            await _unavailable(context, error)
        shards = shards_of(self._membership.snapshot(), self._controller.views)
        return pb.RetireShardResponse(shard=next((s for s in shards if s.shard_id == name), None))

    async def drain_instance(
        self, request: pb.DrainInstanceRequest, context: Context
    ) -> pb.DrainInstanceResponse:
        """Answers when the worker has ended its work, or the timeout has passed; its process ends then."""
        member = await self._worker(request.instance_id, context)
        if not request.HasField("timeout") or request.timeout.ToNanoseconds() < 0:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "timeout: say how long its requests may go on, 0 or more"
            )
        asked = worker_pb.DrainRequest(timeout=request.timeout, by=request.by or "operator")
        async with self._open_channel(member.address) as channel:
            drain = channel.unary_unary(
                f"/{WORKER_SERVICE}/Drain", _bytes, worker_pb.DrainResponse.FromString
            )
            try:
                answer = await drain(asked, timeout=request.timeout.ToNanoseconds() / 1e9 + ANSWER_S)
            except grpc.aio.AioRpcError as error:
                await context.abort(
                    grpc.StatusCode.UNAVAILABLE,
                    f"worker {member.member_id} at {member.address} did not answer: {error.details()}; "
                    "it may have left, see `plaserve fleet status`",
                )
        return pb.DrainInstanceResponse(unfinished_count=answer.unfinished_count)

    # --- parts ---

    def _fleet(self) -> pb.GetFleetResponse:
        snapshot = self._membership.snapshot()
        views = self._controller.views
        loads = {load.instance_id: load for view in views.values() for load in view.instances}
        pressures = self.pressures.of(views)
        leader = self._membership.leader(ELECTION)
        answer = pb.GetFleetResponse(
            instances=[
                self._instance(member, snapshot, loads, pressures)
                for member in snapshot.of(MemberKind.WORKER)
            ],
            processes=[
                _process(member, snapshot)
                for kind in (MemberKind.SCHEDULER, MemberKind.FRONTEND)
                for member in snapshot.of(kind)
            ],
            controller=leader.candidate if leader is not None else "",
            stale=snapshot.stale,
            dry_run=self._dry_run,
            shards=shards_of(snapshot, views),
        )
        if pressures:
            of_role = {role: [pressures[n] for n in pressures if loads[n].role is role] for role in Role}
            answer.sp_pressure = pool_pressure(of_role[Role.SP])
            answer.lp_pressure = pool_pressure(of_role[Role.LP])
        answer.age.CopyFrom(_duration(snapshot.age_s))
        return answer

    def _instance(
        self,
        member: Member,
        snapshot: FleetSnapshot,
        loads: Mapping[str, InstanceLoad],
        pressures: Mapping[str, float],
    ) -> pb.FleetInstance:
        wanted, target_shard = _wanted(snapshot, member), wanted_shard(snapshot, member)
        load = loads.get(member.member_id)
        present = member.report.role if member.report is not None else Role.MIXED
        target = wanted.role if wanted is not None else present
        moves = (target, target_shard) != (present, member.shard)
        state = "moving" if moves else "up" if load is not None else "unseen"
        if DRAINING in member.facts:
            state = "draining"
        made = pb.FleetInstance(
            instance_id=member.member_id,
            shard_id=member.shard,
            role=_ROLES[present],
            target_role=_ROLES[target],
            target_shard=target_shard,
            state=state,
            pinned=wanted is not None and wanted.pinned,
            address=member.address,
            reason=wanted.reason.value if wanted is not None else "",
        )
        if load is not None:
            made.queued_count = load.requests_waiting
            made.backlog_s, made.utilisation = load.backlog_s, load.utilisation
            if load.instance_id in pressures:
                made.pressure = pressures[load.instance_id]
        describe_moves(made, member.facts, time.time())
        return made

    async def _worker(self, instance_id: str, context: Context) -> Member:
        member = self._membership.snapshot().members.get(instance_id)
        if member is None or member.kind is not MemberKind.WORKER:
            known = ", ".join(m.member_id for m in self._membership.snapshot().of(MemberKind.WORKER)[:20])
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"instance_id: no worker {instance_id!r} in this fleet; there are {known or 'none'}",
            )
            raise AssertionError("abort raises")
        return member

    async def _target(self, shard: str, worker: Member, context: Context) -> str:
        """A shard that a worker may be sent to; empty: none was named. What it serves is what its workers
        say; one without takes any."""
        snapshot = self._membership.snapshot()
        takers = other_takers(snapshot, "")
        if shard and shard not in takers:
            what = f"shard_id: no shard {shard!r} takes work; there are {', '.join(sorted(takers)) or 'none'}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, what)
        there = [served_by(w) for w in snapshot.of(MemberKind.WORKER, shard)] if shard != worker.shard else []
        if there and served_by(worker) not in there:
            what = (
                f"shard_id: {worker.member_id} serves {in_words(served_by(worker))}, shard {shard} "
                f"{in_words(there[0])}; send it to a shard of its own model and bundle"
            )
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, what)
        return shard

    async def _role(self, number: pb.Role, context: Context) -> Role:
        if number not in _ROLE_OF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "role: say ROLE_SP, ROLE_LP or ROLE_MIXED")
        return _ROLE_OF[number]


def _wanted(snapshot: FleetSnapshot, member: Member) -> Assignment | None:
    return snapshot.assignments.get(member.member_id)


def _present(member: Member, wanted: Assignment | None) -> Role:
    """The role that it is to have, or else has."""
    if wanted is not None:
        return wanted.role
    return member.report.role if member.report is not None else Role.MIXED


def _process(member: Member, snapshot: FleetSnapshot) -> pb.FleetProcess:
    epochs = [leader.epoch for leader in snapshot.leaders.values() if leader.candidate == member.member_id]
    return pb.FleetProcess(
        member_id=member.member_id,
        kind=member.kind.value,
        address=member.address,
        shard_id=member.shard,
        epoch=max(epochs, default=0),
    )


def _move(move: Move) -> pb.RoleMove:
    short, long = (float(move.facts.get(f"pressure_{lane}", 0.0)) for lane in ("short", "long"))
    made = pb.RoleMove(
        instance_id=move.worker_id,
        to_role=_ROLES[move.to_role],
        reason=move.reason.value,
        pressure_difference=short - long,
        outcome=f"by {move.by}",
        from_shard=move.from_shard,
        to_shard=move.to_shard,
    )
    if move.from_role is not None:
        made.from_role = _ROLES[move.from_role]
    made.start_time.CopyFrom(_timestamp(move.at_time_s))
    return made


async def _unavailable(context: Context, error: MembershipUnavailable) -> None:
    await context.abort(
        grpc.StatusCode.UNAVAILABLE,
        f"membership is away, so nothing can be written: {error}; serving goes on, try again later",
    )


def _timestamp(seconds: float) -> Timestamp:
    made = Timestamp()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


def _duration(seconds: float) -> Duration:
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


def _bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
