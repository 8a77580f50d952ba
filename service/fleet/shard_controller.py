"""The controller's part in shards: which workers are to be in which, by `balance_shards`, once a round.

Level-triggered as for roles: a worker that is on its way counts where it is wanted. One that has not got
there in `overdue_s` is wanted back where it is, and left alone for `rest_s`, since what kept it may do so
again. Pinned workers are left alone.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from service.core.reconcile import FleetView, MoveReason
from service.core.types import Role
from service.fleet.balance import ShardMove, ShardState, WorkerPlace, balance_shards
from service.fleet.membership import (
    Conflict,
    Fenced,
    FleetSnapshot,
    Leadership,
    Member,
    MemberKind,
    Membership,
    MembershipError,
)
from service.fleet.shards import address_of, scheduled, served_by, wanted_shard, worker_capacities

log = logging.getLogger(__name__)

DECISIONS_KEPT = 200


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """Seconds. overdue_s: above what a worker may drain."""

    overdue_s: float = 90.0
    rest_s: float = 300.0


@dataclass(frozen=True, slots=True)
class ShardDecision:
    """written: False in a dry run, or where somebody else was faster."""

    move: ShardMove
    at_s: float
    written: bool


class ShardController:
    """moves: counts those that were written, by why."""

    def __init__(
        self,
        membership: Membership,
        controller_id: str,
        settings: ShardSettings | None = None,
        moves: Counter[MoveReason] | None = None,
        *,
        dry_run: bool = False,
    ) -> None:
        self._membership = membership
        self._id = controller_id
        self._settings = settings or ShardSettings()
        self._dry_run = dry_run
        self.moves = moves if moves is not None else Counter()
        self._since: dict[str, tuple[str, float]] = {}  # worker on its way -> (where to, seen first)
        self._resting: dict[str, float] = {}  # worker -> until when
        self.decisions: deque[ShardDecision] = deque(maxlen=DECISIONS_KEPT)

    def forget(self) -> None:
        """Since when workers are on their way: where somebody else led meanwhile that is not known."""
        self._since.clear()

    async def round(
        self,
        snapshot: FleetSnapshot,
        views: Mapping[str, FleetView],
        leadership: Leadership | None,
        now_s: float,
    ) -> None:
        """Look once and write what follows. views: of the shards that answer."""
        if snapshot.stale:
            return
        self._resting = {worker: until_s for worker, until_s in self._resting.items() if until_s > now_s}
        late = self._late(snapshot, now_s)
        places = [place for place in places_of(snapshot, self._resting) if place.worker_id not in late]
        for worker_id in late:
            worker = snapshot.members[worker_id]
            if worker.shard not in snapshot.retired:
                self._resting[worker_id] = now_s + self._settings.rest_s
            back = wanted_shard(snapshot, worker), worker.shard
            await self._write(
                ShardMove(worker_id, *back, MoveReason.OVERDUE, (0.0, 0.0)), snapshot, leadership, now_s
            )
        for move in balance_shards(states_of(snapshot, views), places):
            await self._write(move, snapshot, leadership, now_s)

    def _late(self, snapshot: FleetSnapshot, now_s: float) -> list[str]:
        """Who is on its way for too long. Counts on the observer's own clock."""
        seen: dict[str, tuple[str, float]] = {}
        for worker in snapshot.of(MemberKind.WORKER):
            target, wanted = wanted_shard(snapshot, worker), snapshot.assignments.get(worker.member_id)
            if target != worker.shard and wanted is not None and not wanted.pinned:
                known, since_s = self._since.get(worker.member_id, (target, now_s))
                seen[worker.member_id] = target, since_s if known == target else now_s
        self._since = seen
        return [name for name, (_, since_s) in seen.items() if now_s - since_s >= self._settings.overdue_s]

    async def _write(
        self, move: ShardMove, snapshot: FleetSnapshot, leadership: Leadership | None, now_s: float
    ) -> None:
        written = False
        if not self._dry_run:
            written = await self._assign(move, snapshot, leadership)
        elif all(known.move != move for known in self.decisions):
            log.info(
                "would move %s from shard %s to %s: %s",
                move.worker_id,
                move.from_shard,
                move.to_shard,
                move.reason,
            )
        self.moves[move.reason] += written
        self.decisions.appendleft(ShardDecision(move, now_s, written))

    async def _assign(self, move: ShardMove, snapshot: FleetSnapshot, leadership: Leadership | None) -> bool:
        wanted, worker = snapshot.assignments.get(move.worker_id), snapshot.members[move.worker_id]
        from_capacity, to_capacity = move.capacities
        try:
            await self._membership.assign(
                move.worker_id,
                wanted.role if wanted is not None else _role(worker),
                expected=wanted.number if wanted is not None else 0,
                reason=move.reason,
                by=self._id,
                facts={"capacity_from": round(from_capacity, 3), "capacity_to": round(to_capacity, 3)},
                fence=leadership,
                shard=move.to_shard,
            )
        except (Conflict, Fenced) as error:  # the next round starts from what is there then
            log.info("%s stays in its shard: %s", move.worker_id, error)
            return False
        except MembershipError as error:
            log.warning("%s stays in its shard: %s", move.worker_id, error)
            return False
        log.info("%s: from shard %s to %s, %s", move.worker_id, move.from_shard, move.to_shard, move.reason)
        return True


def places_of(snapshot: FleetSnapshot, resting: Mapping[str, float]) -> list[WorkerPlace]:
    """The workers that stay in the fleet, where they are wanted. One that rests counts as pinned."""
    found: list[WorkerPlace] = []
    for worker_id, capacity in worker_capacities(snapshot).items():
        worker, wanted = snapshot.members[worker_id], snapshot.assignments.get(worker_id)
        target = wanted_shard(snapshot, worker)
        found.append(
            WorkerPlace(
                worker_id,
                target,
                wanted.role if wanted is not None else _role(worker),
                " ".join(served_by(worker)),
                capacity,
                moving=target != worker.shard,
                pinned=(wanted is not None and wanted.pinned) or worker_id in resting,
            )
        )
    return found


def states_of(snapshot: FleetSnapshot, views: Mapping[str, FleetView]) -> list[ShardState]:
    """Every shard that has a scheduler or a worker, or is wanted for one. One that is led and does not
    answer, or has no worker in use, may hold requests: what waits is counted by worker."""
    workers = snapshot.of(MemberKind.WORKER)
    names = scheduled(snapshot) | {w.shard for w in workers} | {wanted_shard(snapshot, w) for w in workers}
    states: list[ShardState] = []
    for name in sorted(names):
        led, view = address_of(snapshot, name) is not None, views.get(name)
        waits = led
        if view is not None:
            waits = not view.instances or any(load.requests_waiting for load in view.instances)
        states.append(ShardState(name, takes=led, retired=name in snapshot.retired, holds=waits))
    return states


def _role(worker: Member) -> Role:
    return worker.report.role if worker.report is not None else Role.MIXED
