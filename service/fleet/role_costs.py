"""What a controller makes of moves that load an engine: they cost, they take a while, and they may fail.

The pure controller of the core is told of the cost by what it knows already: what an instance would lose by a
move (`InstanceLoad.cached_s`, seconds of work) includes the seconds to drain it and to load the other engine,
as they were measured last. So of a pool the cheapest instance goes, and a dear move must be worth more.

A worker that loads serves nobody, so its scheduler shows no load of it. It is shown here with the role that
it is to have, idle, so that a move under way is not made twice; and

* it is left alone until its move is over, unless it drains only and can still be called off at once;
* at most a quarter of a shard's workers are under way at a time; the others wait, or serve on meanwhile;
* one whose moves fail rests before the next, twice as long each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from service.core.reconcile import FleetView, InstanceLoad, MoveReason, RoleMove
from service.core.types import Role
from service.fleet.membership import Assignment, FleetSnapshot, Member, MemberKind
from service.fleet.role_facts import MoveEnd, MovePhase, engines_of, failures_of, move_of, moves_of

SHARE_MAX = 0.25  # of a shard's workers, under way at a time, but one may always
REST_S, REST_S_MAX = 30.0, 600.0  # after a move that failed, doubling
TAKEN_BACK = (MoveReason.OVERDUE, MoveReason.FAILED)


def failed(member: Member, wanted: Assignment) -> bool:
    """Whether the worker has said that it can't have this role."""
    ended = moves_of(member.facts)
    return any(move.number == wanted.number and move.at is MoveEnd.FAILED for move in ended)


def allowed_s(member: Member, wanted: Assignment, overdue_s: float) -> float:
    """How long a worker may take: longer where it is at it, since a move has a bound of its own."""
    move, engines = move_of(member.facts), engines_of(member.facts)
    under_way = move is not None and engines is not None and move.number == wanted.number
    return overdue_s + (engines.bound_s if under_way and engines is not None else 0.0)


class SlowMoves:
    """One a controller. `look` comes first in every round."""

    def __init__(self, rest_s: float = REST_S, rest_s_max: float = REST_S_MAX) -> None:
        self._rest_s, self._rest_s_max = rest_s, rest_s_max
        self._failures: dict[str, tuple[int, float]] = {}  # worker -> (failed in a row, until when it rests)
        self._snapshot: FleetSnapshot | None = None
        self._ordered: set[str] = set()  # in this round

    def look(self, snapshot: FleetSnapshot, now_s: float) -> None:
        self._snapshot = snapshot
        self._ordered.clear()
        before, self._failures = self._failures, {}
        for member in snapshot.of(MemberKind.WORKER):
            count = failures_of(member.facts)
            if count:
                known, until_s = before.get(member.member_id, (0, 0.0))
                if count != known:
                    until_s = now_s + min(self._rest_s * 2.0 ** (count - 1), self._rest_s_max)
                self._failures[member.member_id] = (count, until_s)

    def shown(self, view: FleetView, shard: str, now_s: float) -> FleetView:
        """With the cost of moves, and with the workers that are under way."""
        assert self._snapshot is not None
        members, wanted = self._snapshot.members, self._snapshot.assignments
        loads = [self._priced(load, members.get(load.instance_id), now_s) for load in view.instances]
        seen = {load.instance_id for load in loads}
        for member in self._snapshot.of(MemberKind.WORKER, shard):
            name = member.member_id
            move = move_of(member.facts)
            if move is not None and name not in seen:
                role = wanted[name].role if name in wanted else move.to_role
                loads.append(InstanceLoad(name, role, 0.0, 0.0, 0.0, 0, math.inf))
        return replace(view, instances=tuple(loads))

    def may(self, move: RoleMove, now_s: float) -> bool:
        """Whether this move may be ordered now. Raises KeyError for a worker that is not there."""
        assert self._snapshot is not None
        member = self._snapshot.members[move.instance_id]
        engines, under_way = engines_of(member.facts), move_of(member.facts)
        if engines is None or move.reason in TAKEN_BACK:
            return True
        if under_way is not None:
            return under_way.at is MovePhase.DRAINING
        if not engines.loads(move.role):
            return True
        if self._rests(move.instance_id, now_s) or not self._room(member.shard):
            return False
        self._ordered.add(move.instance_id)
        return True

    def _priced(self, load: InstanceLoad, member: Member | None, now_s: float) -> InstanceLoad:
        engines = engines_of(member.facts) if member is not None else None
        if engines is None or engines.engines.get(Role.SP) == engines.engines.get(Role.LP):
            return load
        lost_s = math.inf if self._rests(load.instance_id, now_s) else load.cached_s + engines.move_s
        return replace(load, cached_s=lost_s)

    def _rests(self, worker_id: str, now_s: float) -> bool:
        return now_s < self._failures.get(worker_id, (0, -math.inf))[1]

    def _room(self, shard: str) -> bool:
        assert self._snapshot is not None
        workers = self._snapshot.of(MemberKind.WORKER, shard)
        busy = sum(1 for member in workers if self._is_under_way(member))
        return busy < max(1, math.floor(SHARE_MAX * len(workers)))

    def _is_under_way(self, member: Member) -> bool:
        """It moves, or was told to."""
        assert self._snapshot is not None
        wanted, engines = self._snapshot.assignments.get(member.member_id), engines_of(member.facts)
        if member.member_id in self._ordered or move_of(member.facts) is not None:
            return True
        told = wanted is not None and engines is not None and engines.loads(wanted.role)
        return told and wanted is not None and not failed(member, wanted)


def taken_back(members: Mapping[str, Member], wanted: Iterable[Assignment]) -> list[RoleMove]:
    """Moves back to the role that each worker has which can't have the wanted one."""
    found = []
    for one in wanted:
        member = members.get(one.worker_id)
        if member is None or member.report is None:
            continue
        if member.report.role is not one.role and failed(member, one):
            found.append(RoleMove(one.worker_id, member.report.role, MoveReason.FAILED))
    return found
