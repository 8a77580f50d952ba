"""The front end of a fleet: a runtime over active schedulers, and a token stream from every worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import uuid4

from engines.types import EngineRequest
from service.core.types import Request
from service.fleet.membership import Lease, Member, MemberKind, Membership
from service.fleet.place import Place, join
from service.fleet.reign import election_of
from service.fleet.remote_runtime import RemoteHandle, RemoteRuntime, RemoteSettings
from service.fleet.scheduler_link import GrpcSchedulerLink, Welcome
from service.fleet.token_link import TokenLink
from service.runtime.contract import Observer


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
