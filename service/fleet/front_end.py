"""The front end of a fleet: a runtime over active schedulers, and a token stream from every worker."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from uuid import uuid4

from engines.types import EngineRequest
from service.core.types import Request
from service.fleet.membership import FleetSnapshot, Lease, Member, MemberKind, Membership
from service.fleet.place import Place, join, tell_failure
from service.fleet.remote_handle import RemoteHandle
from service.fleet.remote_runtime import Hooks, RemoteRuntime, RemoteSettings
from service.fleet.scheduler_link import GrpcSchedulerLink, Welcome
from service.fleet.shards import EVERY_SHARD, address_of, led, scheduled, shard_capacities
from service.fleet.token_link import TokenLink
from service.runtime.contract import Observer


class FrontEndProcess:
    """runtime: a `contract.Runtime` for the surfaces, over the fleet; started and closed here.
    shards: whose schedulers it sends to, or EVERY_SHARD; None: that of its place. failed: set to the reason
    once it can't follow them any more."""

    def __init__(
        self,
        place: Place,
        membership: Membership,
        settings: RemoteSettings | None = None,
        observers: Sequence[Observer] = (),
        shards: Sequence[str] | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self._place = place
        self._membership = membership
        # New with each life, so that no worker takes it for the one before.
        self.name = f"{place.member_id}-{uuid4().hex[:8]}"
        self._shards = (place.shard,) if shards is None else tuple(shards)
        hooks = replace(hooks or Hooks(), over=self._over)
        self.runtime = RemoteRuntime(self.name, None, settings, observers, hooks=hooks)
        self._links: dict[str, TokenLink] = {}  # by worker
        self._lease: Lease | None = None
        self._watching: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self, address: str) -> None:
        """address: of its surface for clients."""
        member = Member(self._place.member_id, MemberKind.FRONTEND, address, self._place.shard)
        self._lease = await join(self._membership, member)
        self._watching = asyncio.create_task(self._watch(), name="shards and workers")
        self._watching.add_done_callback(partial(tell_failure, self.failed))
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

    @property
    def token_links(self) -> dict[str, bool]:
        """By worker, whether its tokens come."""
        return {name: link.connected for name, link in self._links.items()}

    def _over(self, wire_id: str) -> None:
        for link in self._links.values():
            link.forget(wire_id)

    async def _locate(self, shard: str) -> str | None:
        return address_of(self._membership.snapshot(), shard)

    async def _watch(self) -> None:
        """Follow shards and workers. A stale state takes none away."""
        async for snapshot in self._membership.watch():
            shards = scheduled(snapshot) if EVERY_SHARD in self._shards else set(self._shards)
            for shard in shards.difference(self.runtime.uplinks.shards):
                link = GrpcSchedulerLink(partial(self._locate, shard), self._place.open_channel)
                self.runtime.uplinks.add(shard, link)
            self.runtime.uplinks.tell(shard_capacities(snapshot), snapshot.retired, led(snapshot))
            self.runtime.look_again()
            await self._follow_workers(snapshot, shards)
            uplinks, known = self.runtime.uplinks, not snapshot.stale
            for shard in set(uplinks.shards) - shards if known else ():
                if shard in uplinks.down or shard in snapshot.retired:
                    await uplinks.drop(shard, "it has no scheduler any more")

    async def _follow_workers(self, snapshot: FleetSnapshot, shards: Collection[str]) -> None:
        """A token stream to every worker that is there; one that goes to another shard keeps it."""
        everywhere = EVERY_SHARD in self._shards
        members = {m.member_id: m for m in snapshot.of(MemberKind.WORKER) if everywhere or m.shard in shards}
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
