"""A worker's roles, put together: its engines, the mover, and what is told of both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engines.catalog import LoadedEngine
from service.core.types import Role
from service.fleet.membership import Assignment, Lease, Membership, MembershipError
from service.fleet.role_engines import RoleEngines
from service.fleet.role_facts import ENGINES, FAILURES, MOVE, MOVES, MOVES_KEPT, MoveEnd, MovePhase, MoveState
from service.fleet.role_move import Hear, MoveSettings, RoleMover
from service.fleet.shards import TOKENS_PER_S, knee_rate
from service.fleet.told import Told
from service.fleet.worker_service import WorkerServicer
from service.runtime.worker import PassRunner, ThreadRunner


@dataclass(frozen=True, slots=True)
class RolePlan:
    """What a worker needs whose roles have engines of their own. hear: told of every phase and end of a move.
    runner: what runs passes on an engine."""

    engines: RoleEngines
    settings: MoveSettings = field(default_factory=MoveSettings)
    hear: Hear = lambda state: None
    runner: Callable[[LoadedEngine], PassRunner] = lambda loaded: ThreadRunner(loaded.engine)


class WorkerRoles:
    """plan None: one engine serves both lanes, so a role is a label."""

    def __init__(
        self, servicer: WorkerServicer, plan: RolePlan | None, membership: Membership, told: Told
    ) -> None:
        self._servicer = servicer
        self._membership = membership
        self._told = told
        self._lease: Lease | None = None
        self._mover: RoleMover | None = None
        if plan is not None:
            self._plan = plan
            self._ended: deque[MoveState] = deque(maxlen=MOVES_KEPT)
            self._failures = 0
            self._mover = RoleMover(
                servicer, plan.engines, plan.settings, self._wanted, self._report, self._hear, plan.runner
            )
            told.tell(**{ENGINES: self._mover.told.told()})

    def joined(self, lease: Lease) -> None:
        self._lease = lease

    @property
    def load_engines(self) -> bool:
        """Whether a move may take more than a label."""
        return self._mover is not None

    async def take(self, wanted: Assignment) -> Role:
        """For `follow_assignment`. Raises RoleRefused."""
        if self._mover is not None:
            return await self._mover.take(wanted)
        self._servicer.set_role(wanted.role)
        return wanted.role

    def _wanted(self) -> Role | None:
        wanted = self._membership.snapshot().assignments.get(self._servicer.spec.instance_id)
        return wanted.role if wanted is not None else None

    async def _report(self, role: Role, number: int) -> None:
        """With membership away the engine opens all the same; the report is written once it is back."""
        if self._lease is not None:
            try:
                await self._lease.report(role, number)
            except MembershipError:
                return

    def _hear(self, state: MoveState) -> None:
        assert self._mover is not None
        under_way = isinstance(state.at, MovePhase)
        if not under_way:
            self._ended.appendleft(state)
            if state.at is not MoveEnd.CALLED_OFF:
                self._failures = self._failures + 1 if state.at is MoveEnd.FAILED else 0
        self._told.tell(
            **{
                TOKENS_PER_S: round(knee_rate(self._servicer.spec), 1),
                ENGINES: self._mover.told.told(),
                MOVE: state.told() if under_way else None,
                MOVES: [one.told() for one in self._ended],
                FAILURES: self._failures,
            }
        )
        self._plan.hear(state)
