"""The controller of a fleet: one leads, looks once a period, and writes down which role each worker is to
have, and in which shard it is to be (`shard_controller`). Workers carry that out and report; nothing here
waits for them.

Level-triggered: every round starts from what is there now. What the pure controller of the core is shown as
an instance's role is the *wanted* one, so that a move which is under way is not ordered twice. One that the
worker has not carried out in `overdue_s`, or has said that it can't (`role_costs`), is taken back: the wanted
role becomes the one it reports.

Pinned workers are left out of what may move, but not out of the view: their load counts. All writes name the
leadership (`fence`), so a controller that has lost it without knowing changes nothing. With membership or a
shard away, or seen for the first time, a round decides nothing for it; serving goes on as it is.

`dry_run` only says what it would do: decisions are kept and logged, nothing is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from service.core.reconcile import Controller, FleetView, MoveReason, RoleMove
from service.core.types import Role
from service.fleet.load import LoadSource
from service.fleet.membership import (
    Assignment,
    Conflict,
    Fenced,
    FleetSnapshot,
    Leadership,
    LeaseState,
    Member,
    MemberKind,
    Membership,
    MembershipError,
)
from service.fleet.role_costs import SlowMoves, allowed_s, taken_back
from service.fleet.shard_controller import ShardController, ShardSettings

log = logging.getLogger(__name__)

ELECTION = "controller"
DECISIONS_KEPT = 200


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Seconds. overdue_s: after it a move that was not carried out is taken back. shards: the same for those
    between shards."""

    overdue_s: float = 30.0
    dry_run: bool = False
    shards: ShardSettings = field(default_factory=ShardSettings)


class RolesStay:
    """A `Controller` for policies that move no roles: shards are balanced all the same."""

    period_s = 1.0

    def step(self, fleet: FleetView, now_s: float) -> tuple[RoleMove, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Decision:
    """One move that was decided. written: False in a dry run, or where somebody else was faster."""

    shard: str
    move: RoleMove
    from_role: Role
    at_s: float
    written: bool


def shown(view: FleetView, assignments: Mapping[str, Assignment]) -> FleetView:
    """The view with wanted roles in place of present ones."""
    loads = tuple(
        replace(load, role=assignments[load.instance_id].role) if load.instance_id in assignments else load
        for load in view.instances
    )
    return replace(view, instances=loads)


class Overdue:
    """Which moves have not been carried out in time. Counts on the observer's own clock."""

    def __init__(self, overdue_s: float) -> None:
        self._overdue_s = overdue_s
        self._since: dict[str, tuple[int, float]] = {}  # worker -> (number of the assignment, seen first)

    def late(
        self, members: Mapping[str, Member], assignments: Mapping[str, Assignment], now_s: float
    ) -> list[RoleMove]:
        """Moves back to the role that each late worker reports."""
        found: list[RoleMove] = []
        seen: dict[str, tuple[int, float]] = {}
        for worker_id, wanted in assignments.items():
            member = members.get(worker_id)
            if member is None or member.report is None or member.report.role is wanted.role:
                continue
            number, since_s = self._since.get(worker_id, (wanted.number, now_s))
            if number != wanted.number:
                since_s = now_s
            seen[worker_id] = wanted.number, since_s
            if now_s - since_s >= allowed_s(member, wanted, self._overdue_s) and not wanted.pinned:
                found.append(RoleMove(worker_id, member.report.role, MoveReason.OVERDUE))
        self._since = seen
        return found


class FleetController:
    """See the module text. make: a fresh pure controller, one a shard."""

    def __init__(
        self,
        membership: Membership,
        controller_id: str,
        make: Callable[[], Controller],
        source: LoadSource,
        settings: ControllerSettings | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._membership = membership
        self._id = controller_id
        self._make = make
        self._source = source
        self._settings = settings or ControllerSettings()
        self._clock = clock or asyncio.get_running_loop().time
        self._controllers: dict[str, Controller] = {}
        self._overdue = Overdue(self._settings.overdue_s)
        self._slow = SlowMoves()
        self.moves = Counter(dict.fromkeys(MoveReason, 0))  # that were written, of roles and between shards
        self.shards = ShardController(
            membership, controller_id, self._settings.shards, self.moves, dry_run=self._settings.dry_run
        )
        self.leadership: Leadership | None = None  # while it leads
        self.views: dict[str, FleetView] = {}  # what was last seen of each shard
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS_KEPT)

    async def run(self) -> None:
        """Campaign, lead while it lasts, and again. Ends by cancellation only."""
        while True:
            leadership = await self._membership.campaign(ELECTION, self._id)
            log.info("controller %s leads, epoch %d", self._id, leadership.epoch)
            self.leadership = leadership
            # Afresh: what an earlier reign learnt of rates is old by now.
            self._controllers.clear()
            self.shards.forget()
            try:
                await self._lead(leadership)
            finally:
                self.leadership = None
                if leadership.state is not LeaseState.LOST:
                    await leadership.resign()

    async def _lead(self, leadership: Leadership) -> None:
        lost = asyncio.create_task(leadership.lost())
        try:
            while not lost.done():
                begin_s = self._clock()
                await self.round(leadership)
                left_s = max(0.0, self._period_s() - (self._clock() - begin_s))
                await asyncio.wait({lost}, timeout=left_s)
        finally:
            lost.cancel()

    async def round(self, leadership: Leadership | None) -> None:
        """Look at every shard once and write what follows. leadership: None writes unfenced (tests)."""
        snapshot = self._membership.snapshot()
        if snapshot.stale:
            return  # what it shows may be gone; nothing is decided on that
        shards = sorted({member.shard for member in snapshot.of(MemberKind.WORKER)})
        self._controllers = {s: c for s, c in self._controllers.items() if s in shards}
        views = await asyncio.gather(*(self._source.load(shard) for shard in shards))
        self.views = {shard: view for shard, view in zip(shards, views, strict=True) if view is not None}
        now_s = self._clock()
        self._slow.look(snapshot, now_s)
        late = self._overdue.late(snapshot.members, snapshot.assignments, now_s)
        failed = taken_back(snapshot.members, snapshot.assignments.values())
        for move in {move.instance_id: move for move in (*late, *failed)}.values():
            await self._write(snapshot.members[move.instance_id].shard, move, snapshot, leadership, now_s)
        known = {shard: view for shard, view in self.views.items() if not view.first_look}
        for shard, view in known.items():
            controller = self._controllers.setdefault(shard, self._make())
            seen = self._slow.shown(shown(view, snapshot.assignments), shard, now_s)
            for move in controller.step(seen, now_s):
                await self._write(shard, move, snapshot, leadership, now_s)
        await self.shards.round(self._membership.snapshot(), known, leadership, now_s)

    async def _write(
        self,
        shard: str,
        move: RoleMove,
        snapshot: FleetSnapshot,
        leadership: Leadership | None,
        now_s: float,
    ) -> None:
        wanted = snapshot.assignments.get(move.instance_id)
        if move.instance_id not in snapshot.members or (wanted is not None and wanted.pinned):
            return
        from_role = wanted.role if wanted is not None else Role.MIXED
        if from_role is move.role or not self._slow.may(move, now_s):
            return
        written = False
        if self._settings.dry_run:
            log.info("would move %s to %s: %s", move.instance_id, move.role, move.reason)
        else:
            written = await self._assign(move, wanted, leadership)
        self.moves[move.reason] += written
        self.decisions.appendleft(Decision(shard, move, from_role, now_s, written))

    async def _assign(self, move: RoleMove, wanted: Assignment | None, leadership: Leadership | None) -> bool:
        facts = {"pressure_short": move.pressure_short, "pressure_long": move.pressure_long}
        try:
            await self._membership.assign(
                move.instance_id,
                move.role,
                expected=wanted.number if wanted is not None else 0,
                reason=move.reason,
                by=self._id,
                facts=facts,
                fence=leadership,
            )
        except (Conflict, Fenced) as error:  # the next round starts from what is there then
            log.info("%s was not moved: %s", move.instance_id, error)
            return False
        except MembershipError as error:
            log.warning("%s was not moved: %s", move.instance_id, error)
            return False
        log.info("%s: %s, %s", move.instance_id, move.role, move.reason)
        return True

    def _period_s(self) -> float:
        periods = [controller.period_s for controller in self._controllers.values()]
        return min(periods) if periods else self._make().period_s
