"""The four processes of a fleet, as what they do between start and stop.

    WorkerProcess       one engine: joins, obeys the scheduler of the highest epoch, follows its role
    SchedulerProcess    stands for election in its shard; leads with a `Reign`, or waits as a standby
    FrontEndProcess     a runtime over the active scheduler, and a token stream from every worker
    ControllerProcess   one leads: loads in, wanted roles out; every one answers operators

Each has `start` and `close`; a process that can't go on says so in `failed`. None needs another one to be
there first: all of them wait, look again, and go on with the last known state while membership is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

import grpc
import grpc.aio

from engines.types import EngineRequest
from service.core.reconcile import Controller
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Request, Role
from service.fleet.controller import ControllerSettings, FleetController
from service.fleet.fleet_service import FleetServicer
from service.fleet.gate import SchedulerGate
from service.fleet.health import LinkSettings
from service.fleet.load import GrpcLoadSource
from service.fleet.membership import (
    DRAINING,
    Facts,
    Lease,
    LeaseState,
    Member,
    MemberExists,
    MemberKind,
    Membership,
    MembershipError,
)
from service.fleet.reign import Observe, Reign, election_of
from service.fleet.remote_runtime import RemoteHandle, RemoteRuntime, RemoteSettings
from service.fleet.remote_worker import OpenChannel
from service.fleet.rest import Rest
from service.fleet.roles import follow_assignment
from service.fleet.scheduler_link import GrpcSchedulerLink, Welcome
from service.fleet.token_link import TokenLink
from service.fleet.tokens import TokenSettings
from service.fleet.worker_service import WorkerServicer
from service.rpc.tls import TlsFiles, listen
from service.runtime.contract import Observer, Snapshot
from service.runtime.worker import PassRunner

log = logging.getLogger(__name__)

SETTING = "fleet.tls"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is in its fleet. listen: host:port, port 0 for a free one. advertise: host that others
    reach it by; empty: that of `listen`. open_channel: how it reaches others."""

    member_id: str
    shard: str
    listen: str
    open_channel: OpenChannel
    advertise: str = ""
    tls: TlsFiles | None = None

    def address(self, port: int) -> str:
        host = self.advertise or self.listen.rpartition(":")[0]
        return f"{host}:{port}"


class _Port:
    """A gRPC server with some services, on the address of a place."""

    def __init__(self, place: Place, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._place = place
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        self._server.add_generic_rpc_handlers(tuple(handlers))
        self.address = ""

    async def start(self) -> None:
        port = listen(self._server, self._place.listen, self._place.tls, SETTING)
        self.address = self._place.address(port)
        await self._server.start()

    async def stop(self, grace_s: float | None = None) -> None:
        await self._server.stop(grace_s)


JOIN_TIMES_MAX = 60  # an earlier life of a member may hold its name until its lease is over
JOIN_EACH_S = 0.5
ANSWER_S = 1.0  # for the answer to whoever asked for a drain


async def join(membership: Membership, member: Member) -> Lease:
    """Join, after the lease of a process of this name that died. Raises MemberExists if that goes on."""
    for left in range(JOIN_TIMES_MAX, -1, -1):
        try:
            return await membership.join(member)
        except MemberExists as error:
            if not left:
                raise
            log.warning("%s; waiting for its lease to end", error)
            await asyncio.sleep(JOIN_EACH_S)
    raise AssertionError("it has returned or raised")


class WorkerProcess:
    """failed: set to the reason once the engine can't go on. drained: once it was asked for a drain and that
    is over. facts: told to the fleet."""

    def __init__(
        self,
        place: Place,
        membership: Membership,
        spec: InstanceSpec,
        runner: PassRunner,
        facts: Facts,
        link: LinkSettings | None = None,
        tokens: TokenSettings | None = None,
    ) -> None:
        self._place = place
        self._membership = membership
        self._facts = facts
        self._role = spec.role
        self.servicer = WorkerServicer(spec, runner, link, tokens)
        self.failed, self.drained = self.servicer.failed, self.servicer.drained
        self._port = _Port(place, [self.servicer.handler()])
        self._lease: Lease | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        return self._port.address

    async def start(self) -> None:
        await self._port.start()
        member = Member(
            self._place.member_id, MemberKind.WORKER, self.address, self._place.shard, self._facts
        )
        self._lease = await join(self._membership, member)
        await self._lease.report(self._role, 0)
        following = follow_assignment(self._membership, self._lease, self._role, self._take_role)
        self._tasks = [
            asyncio.create_task(following, name="role"),
            asyncio.create_task(self._tell_drain(self._lease), name="drain"),
        ]

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

    async def _tell_drain(self, lease: Lease) -> None:
        """Where people look (`plaserve fleet status`); the scheduler hears it over its link."""
        reason = await self.servicer.leaving
        with contextlib.suppress(MembershipError):
            await lease.update(facts={**self._facts, DRAINING: reason})

    async def _take_role(self, role: Role) -> None:
        """One engine serves both lanes: a role is what the scheduler prefers to send here."""
        self.servicer.set_role(role)


def _tell_failure(failed: asyncio.Future[str], task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None and not failed.done():
        log.error("the process can't go on", exc_info=error)
        failed.set_result(f"{type(error).__name__}: {error}")


class SchedulerProcess:
    """failed: set to the reason once its loop can't go on. make: a fresh scheduling core, one a reign.
    observe: who hears of a reign's requests and passes."""

    def __init__(
        self,
        place: Place,
        membership: Membership,
        make: Callable[[], PrefillScheduler],
        policy: str,
        backend: str,
        observe: Observe = lambda model, backend, t_classes: (),
        link: LinkSettings | None = None,
    ) -> None:
        self._place = place
        self._membership = membership
        self._make = make
        self._policy = policy
        self._backend = backend
        self._observe = observe
        self._link = link
        self.gate = SchedulerGate(place.member_id)
        self._port = _Port(place, [self.gate.handlers, self.gate.status_handlers])
        self._lease: Lease | None = None
        self._running: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.reigns = 0

    @property
    def address(self) -> str:
        return self._port.address

    async def start(self) -> None:
        await self._port.start()
        member = Member(self._place.member_id, MemberKind.SCHEDULER, self.address, self._place.shard)
        self._lease = await join(self._membership, member)
        self._running = asyncio.create_task(self._run(), name="election")
        self._running.add_done_callback(partial(_tell_failure, self.failed))

    def snapshot(self) -> Snapshot:
        """Of the present reign, counts begin with it; a standby has nothing."""
        return self.gate.reign.pump.snapshot() if self.gate.reign is not None else Snapshot.empty()

    @property
    def works(self) -> bool:
        """Whether its loop goes on; a standby's does too."""
        return self._running is not None and not self._running.done()

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._lease is not None:
            await self._lease.leave()
        await self._port.stop()

    async def _run(self) -> None:
        rest = Rest()
        while True:
            shard = self._place.shard
            leadership = await self._membership.campaign(election_of(shard), self._place.member_id)
            reign = Reign(
                shard,
                self._place.member_id,
                leadership.epoch,
                self._make(),
                self._membership,
                self._place.open_channel,
                self._backend,
                self._policy,
                self._observe,
                self._link,
            )
            log.info("%s leads shard %s, epoch %d", self._place.member_id, shard, leadership.epoch)
            self.reigns += 1
            lost = asyncio.ensure_future(leadership.lost())
            try:
                self.gate.reign = reign
                await reign.start()
                await asyncio.wait({lost, reign.ended}, return_when=asyncio.FIRST_COMPLETED)
                why = reign.ended.result() if reign.ended.done() else lost.result()
                log.warning("the reign over shard %s, epoch %d, is over: %s", shard, leadership.epoch, why)
            finally:
                lost.cancel()
                self.gate.reign = None
                await reign.close()
                if leadership.state is not LeaseState.LOST:
                    await leadership.resign()
            if not lost.done() or lost.cancelled():
                await asyncio.sleep(rest.after(asyncio.get_running_loop().time() - reign.start_s))


class FrontEndProcess:
    """runtime: a `contract.Runtime` for the surfaces, over the fleet; started and closed here."""

    def __init__(
        self,
        place: Place,
        membership: Membership,
        settings: RemoteSettings | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._place = place
        self._membership = membership
        # New with each life, so that no worker takes it for the one before.
        self.name = f"{place.member_id}-{uuid4().hex[:8]}"
        link = GrpcSchedulerLink(self._locate, open_channel=place.open_channel)
        self.runtime = RemoteRuntime(self.name, link, settings, observers)
        self._links: dict[str, TokenLink] = {}  # by worker
        self._lease: Lease | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, address: str) -> None:
        """address: of its surface for clients."""
        member = Member(self._place.member_id, MemberKind.FRONTEND, address, self._place.shard)
        self._lease = await join(self._membership, member)
        self._watching = asyncio.create_task(self._watch(), name="token links")
        await self.runtime.start()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._lease is not None:
            await self._lease.leave()
        await self.runtime.close()
        await asyncio.gather(*(link.close() for link in self._links.values()))

    async def welcome(self) -> Welcome:
        """What the fleet serves; waits for the first scheduler, however long that takes."""
        return await self.runtime.first_welcome

    async def tell_address(self, address: str) -> None:
        """Its surface listens there now."""
        if self._lease is not None:
            await self._lease.update(address=address)

    def submit(self, request: Request, engine_request: EngineRequest) -> RemoteHandle:
        return self.runtime.submit(request, engine_request)

    async def _locate(self) -> str | None:
        leader = self._membership.leader(election_of(self._place.shard))
        if leader is None:
            return None
        member = self._membership.snapshot().members.get(leader.candidate)
        return member.address if member is not None else None

    async def _watch(self) -> None:
        """A token stream to every worker that is there. A stale state takes none away."""
        async for snapshot in self._membership.watch():
            members = {m.member_id: m for m in snapshot.of(MemberKind.WORKER, self._place.shard)}
            for name, link in list(self._links.items()):
                gone = name not in members and not snapshot.stale
                moved = name in members and members[name].address != link.address
                if gone or moved:
                    await self._links.pop(name).close()
            for name, member in members.items():
                if name not in self._links:
                    link = TokenLink(member.address, self.name, self.runtime.tokens, self._place.open_channel)
                    self._links[name] = link
                    link.start()


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
        self._port = _Port(place, [servicer.handlers])
        self._running: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def address(self) -> str:
        return self._port.address

    async def start(self) -> None:
        await self._port.start()
        self._running = asyncio.create_task(self.controller.run(), name="controller")
        self._running.add_done_callback(partial(_tell_failure, self.failed))

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
        leader = self._membership.leader(election_of(shard))
        member = self._membership.snapshot().members.get(leader.candidate) if leader is not None else None
        return member.address if member is not None else None
