"""The four processes of a fleet, as what they do between start and stop.

    WorkerProcess       one engine: joins, obeys the highest epoch of its shard, follows its role and shard
    SchedulerProcess    stands for election in its shard; leads with a `Reign`, or waits as a standby
    FrontEndProcess     a runtime over active schedulers, and a token stream from every worker
    ControllerProcess   one leads: loads in, wanted roles and shards out; every one answers operators

Each has `start` and `close`; a process that can't go on says so in `failed`. None needs another one to be
there first: all of them wait, look again, and go on with the last known state while membership is away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from service.core.reconcile import Controller
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Role
from service.fleet.controller import ControllerSettings, FleetController
from service.fleet.fleet_service import FleetServicer
from service.fleet.front_end import FrontEndProcess
from service.fleet.health import LinkSettings
from service.fleet.load import GrpcLoadSource
from service.fleet.membership import DRAINING, Assignment, Facts, Lease, Member, MemberKind, Membership
from service.fleet.place import Place, Port, join, tell_failure
from service.fleet.role_worker import RolePlan, WorkerRoles
from service.fleet.roles import follow_assignment
from service.fleet.scheduler_process import SchedulerProcess
from service.fleet.shard_move import ShardMover
from service.fleet.shards import TOKENS_PER_S, address_of, knee_rate, leader_of, scheduled
from service.fleet.tokens import TokenSettings
from service.fleet.told import Told
from service.fleet.worker_service import WorkerServicer
from service.runtime.worker import PassRunner

__all__ = ["ControllerProcess", "FrontEndProcess", "Place", "SchedulerProcess", "WorkerProcess"]

ANSWER_S = 1.0  # for the answer to whoever asked for a drain


class WorkerProcess:
    """failed: set to the reason once the engine can't go on, or it can't follow what is wanted of it.
    drained: once it was asked for a drain and that is over. facts: told to the fleet. roles: where roles have
    engines of their own. drain_s: how long its requests may go on when it is to go to another shard."""

    def __init__(
        self,
        place: Place,
        membership: Membership,
        spec: InstanceSpec,
        runner: PassRunner,
        facts: Facts,
        link: LinkSettings | None = None,
        tokens: TokenSettings | None = None,
        roles: RolePlan | None = None,
        drain_s: float = 30.0,
    ) -> None:
        self._place = place
        self._membership = membership
        self._told = Told({**facts, TOKENS_PER_S: round(knee_rate(spec), 1)})
        self._drain_s = drain_s
        self._moving = asyncio.Lock()  # a change of engine or of shard
        self._role = spec.role
        self.servicer = WorkerServicer(spec, runner, link, tokens)
        self.failed, self.drained = self.servicer.failed, self.servicer.drained
        self._port = Port(place, [self.servicer.handler()])
        self._roles = WorkerRoles(self.servicer, roles, membership, self._told)
        self._lease: Lease | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        return self._port.address

    async def start(self) -> None:
        await self._port.start()
        name, shard = self._place.member_id, self._shard()
        leader = leader_of(self._membership.snapshot(), shard)
        self.servicer.join_shard(shard, leader.epoch if leader is not None else 0)
        member = Member(name, MemberKind.WORKER, self.address, shard, self._told.facts)
        self._lease = await join(self._membership, member)
        self._roles.joined(self._lease)
        await self._lease.report(self._role, 0)
        following = follow_assignment(self._membership, self._lease, self._role, self._take_role)
        mover = ShardMover(self._membership, self._lease, self.servicer, self._moving, self._drain_s)
        self._tasks = [
            asyncio.create_task(following, name="role"),
            asyncio.create_task(mover.run(), name="shard"),
            asyncio.create_task(self._tell_drain(), name="drain"),
            asyncio.create_task(self._told.keep(self._lease), name="told"),
        ]
        for task in self._tasks:
            task.add_done_callback(partial(tell_failure, self.failed))

    async def drain(self, timeout_s: float) -> int:
        """Take nothing new, end what is here. Returns how many requests have not ended after `timeout_s`."""
        return await self.servicer.drain(timeout_s, "the worker is stopping")

    async def close(self) -> None:
        """Leave first, so that no scheduler counts on it any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._lease is not None:
            await self._lease.leave()
        await self.servicer.close()
        await self._port.stop(ANSWER_S)

    def _shard(self) -> str:
        """Where it was wanted last, if that is still scheduled; else that of its settings."""
        snapshot = self._membership.snapshot()
        wanted = snapshot.assignments.get(self._place.member_id)
        known = wanted is not None and wanted.shard in scheduled(snapshot)
        return wanted.shard if wanted is not None and known else self._place.shard

    async def _take_role(self, wanted: Assignment) -> Role:
        async with self._moving if self._roles.load_engines else contextlib.nullcontext():
            return await self._roles.take(wanted)

    async def _tell_drain(self) -> None:
        """Where people look (`plaserve fleet status`); the scheduler hears it over its link."""
        self._told.tell(**{DRAINING: await self.servicer.leaving})


class ControllerProcess:
    """failed: set to the reason once its loop can't go on. make: a fresh pure controller, one a shard."""

    def __init__(
        self,
        place: Place,
        membership: Membership,
        make: Callable[[], Controller],
        scheduler: SchedulerSettings,
        settings: ControllerSettings | None = None,
    ) -> None:
        self._membership = membership
        settings = settings or ControllerSettings()
        self._source = GrpcLoadSource(place.member_id, self._locate, place.open_channel)
        self.controller = FleetController(membership, place.member_id, make, self._source, settings)
        servicer = FleetServicer(
            membership, self.controller, scheduler, place.open_channel, dry_run=settings.dry_run
        )
        self._port = Port(place, [servicer.handlers])
        self._running: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def address(self) -> str:
        return self._port.address

    async def start(self) -> None:
        await self._port.start()
        self._running = asyncio.create_task(self.controller.run(), name="controller")
        self._running.add_done_callback(partial(tell_failure, self.failed))

    @property
    def works(self) -> bool:
        """Whether its loop goes on; a standby's does too."""
        return self._running is not None and not self._running.done()

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._source.close()
        await self._port.stop()

    def _locate(self, shard: str) -> str | None:
        return address_of(self._membership.snapshot(), shard)
