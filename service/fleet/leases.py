"""What a process holds in a fleet for as long as it renews a lease: its membership, the lead of an election.

A lease is renewed three times in its length. By its own clock the holder knows until when it surely holds
(the last answered renewal was *sent* then, plus the length): after that it is DOUBTFUL, and goes on, because
with the service away nobody else can take over, and where somebody has, epochs fence. LOST is only what the
service has said: the lease is gone, or another's name is under the key.

A membership that lapsed joins again by itself with its newest facts. A lead that is lost stays lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from service.core.types import Role
from service.fleet.clock import Clock, sleep
from service.fleet.membership import (
    Facts,
    Leader,
    LeaseState,
    LostCallback,
    Member,
    MemberExists,
    MembershipError,
    MembershipRefused,
    MembershipUnavailable,
    RoleReport,
)
from service.fleet.mirror import Backoff, Mirror
from service.fleet.records import check_facts, encode_member
from service.fleet.store import Aspect, Condition, Entry, LeaseGone, Put, Store

_log = logging.getLogger(__name__)
_OWN = "given up by its owner"


class Keeper:
    """Renews one lease in the store. One after another may be kept by the same keeper."""

    def __init__(self, store: Store, mirror: Mirror, clock: Clock) -> None:
        self._store, self._mirror, self._clock = store, mirror, clock
        self.lease_id = 0
        self.ttl_s = 0.0
        self.sure_until_s = 0.0

    async def begin(self, ttl_s: float) -> int:
        sent_s = self._clock.now_s()
        self.lease_id, self.ttl_s = await self._store.grant(ttl_s)
        self.sure_until_s = sent_s + self.ttl_s
        return self.lease_id

    async def keep(
        self,
        key: str,
        wrong: Callable[[Entry | None], str | None],
        renewed: Callable[[], Awaitable[None]],
    ) -> str:
        """Renew until the lease has lapsed or the key is not ours; says why. `renewed` is run after each.

        `wrong` says what of an entry shows that the key is not ours. It is asked of the mirror whenever the
        key changes there, and as the mirror may lag (or show the time before a restore), then of the store.
        """
        due_s = self._clock.now_s() + self.ttl_s / 3.0
        while True:
            seen = self._mirror.moved(key)
            try:
                if wrong(self._mirror.entry(key)):
                    reason = wrong((await self._store.get([key]))[key])
                    if reason is not None:
                        return reason
                left_s = due_s - self._clock.now_s()
                if left_s > 0.0:
                    await seen.wait(self._clock, left_s)
                    continue
                sent_s = self._clock.now_s()
                lasts_s = await self._store.renew(self.lease_id)
                if lasts_s <= 0.0:
                    return "the lease has lapsed"
                self.sure_until_s = max(self.sure_until_s, sent_s + lasts_s)
                due_s = sent_s + lasts_s / 3.0
                await renewed()
            except (MembershipUnavailable, MembershipRefused):
                await sleep(self._clock, min(1.0, self.ttl_s / 10.0))

    @property
    def sure(self) -> bool:
        return self._clock.now_s() < self.sure_until_s

    async def drop(self) -> None:
        """End the lease; with the service away it ends by itself."""
        lease_id, self.lease_id = self.lease_id, 0
        if lease_id:
            try:
                await self._store.revoke(lease_id)
            except MembershipError as error:
                _log.info("membership: a lease is left to lapse: %s", error)


class _Losses:
    """Who waits to be told of a loss: callback and awaiters."""

    def __init__(self, what: str, call: LostCallback | None) -> None:
        self._what, self._call = what, call
        self._future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def tell(self, reason: str, *, last: bool, quiet: bool = False) -> None:
        """last: whoever asks later gets the same answer. quiet: the owner did it, no callback."""
        if self._future.done():
            return
        self._future.set_result(reason)
        if not last:
            self._future = asyncio.get_running_loop().create_future()
        if quiet:
            return
        _log.warning("membership: %s is lost: %s", self._what, reason)
        if self._call is not None:
            try:
                self._call(reason)
            except Exception:
                _log.exception("membership: the callback for %s failed", self._what)

    async def wait(self) -> str:
        return await asyncio.shield(self._future)


class MemberLease:
    """`membership.Lease` over a store. Made by `join`, which has put the key."""

    def __init__(
        self, store: Store, mirror: Mirror, clock: Clock, keeper: Keeper, on_lost: LostCallback | None
    ) -> None:
        self._store, self._mirror, self._clock, self._keeper = store, mirror, clock, keeper
        self._on_lost = on_lost
        self._lock = asyncio.Lock()  # one write at a time
        self._dirty = False  # a write whose fate is not known
        self._lapsed = False
        self._ended = False
        self._taken = False  # by another process: it does not join again
        self._task: asyncio.Task[None] | None = None
        self.lapses = 0

    def start(self, key: str, member: Member, call_timeout_s: float) -> None:
        self._key, self._member = key, member
        self._call_timeout_s = call_timeout_s
        self._losses = _Losses(f"member {member.member_id}", self._on_lost)
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"lease {member.member_id}")

    @property
    def member(self) -> Member:
        return self._member

    @property
    def state(self) -> LeaseState:
        if self._ended:
            return LeaseState.ENDED
        if self._lapsed:
            return LeaseState.LOST
        return LeaseState.LIVE if self._keeper.sure else LeaseState.DOUBTFUL

    async def lost(self) -> str:
        return await self._losses.wait()

    async def update(
        self, *, facts: Facts | None = None, address: str | None = None, shard: str | None = None
    ) -> Member:
        if facts is not None:
            check_facts(facts)
        old = self._member
        return await self._write(
            facts=old.facts if facts is None else facts,
            address=old.address if address is None else address,
            shard=old.shard if shard is None else shard,
        )

    async def report(self, role: Role, number: int) -> Member:
        return await self._write(report=RoleReport(role, number, self._clock.time_s()))

    async def leave(self) -> None:
        await self.abandon()
        self._losses.tell(_OWN, last=True, quiet=True)
        await self._keeper.drop()

    async def abandon(self) -> None:
        """Stop renewing and say nothing, as a process that was killed."""
        self._ended = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # --- inside -------------------------------------------------------------------------------------------

    async def _write(self, **changes: object) -> Member:
        if self._ended:
            raise MembershipError(f"{self._member.member_id} has left")
        self._member = replace(self._member, **changes)  # type: ignore[arg-type]
        self._dirty = True
        revision = await self._flush()
        await self._mirror.reach(revision, self._call_timeout_s)
        return self._member

    async def _flush(self) -> int:
        """Put the newest member under the key if it is still ours. Raises MembershipUnavailable."""
        async with self._lock:
            if self._taken:
                raise MemberExists(f"another process is {self._member.member_id} now")
            if self._lapsed:
                raise MembershipUnavailable("the lease has lapsed; the next join brings what was written")
            member = self._member
            ours = Condition(self._key, member.incarnation, Aspect.CREATED)
            put = Put(self._key, encode_member(member), self._keeper.lease_id)
            try:
                committed = await self._store.commit([ours], [put])
            except LeaseGone:
                raise MembershipUnavailable("the lease has lapsed; it is joining again") from None
            if not committed.done:
                raise MembershipUnavailable("the key is not ours any more; it is joining again")
            if member is self._member:
                self._dirty = False
            return committed.revision

    async def _renewed(self) -> None:
        if self._dirty:
            await self._flush()

    def _wrong(self, entry: Entry | None) -> str | None:
        if entry is None:
            return "the key is gone"
        return None if entry.lease_id == self._keeper.lease_id else "the lease has lapsed"

    async def _run(self) -> None:
        while True:
            reason = await self._keeper.keep(self._key, self._wrong, self._renewed)
            async with self._lock:
                self._lapsed = True
            self.lapses += 1
            self._losses.tell(reason, last=False)
            await self._keeper.drop()
            if not await self._join_again():
                self._taken = True
                self._losses.tell("another process took the id", last=True)
                return

    async def _join_again(self) -> bool:
        """False: another is there under this id."""
        backoff = Backoff(most_s=max(0.1, self._keeper.ttl_s / 3.0))
        while True:
            try:
                async with self._lock:
                    lease_id = await self._keeper.begin(self._keeper.ttl_s)
                    newest = self._member
                    member = replace(newest, joined_time_s=self._clock.time_s())
                    put = Put(self._key, encode_member(member), lease_id)
                    committed = await self._store.commit([Condition(self._key, 0)], [put])
                    if committed.done:
                        self._dirty = self._member is not newest
                        self._member = replace(
                            self._member,
                            joined_time_s=member.joined_time_s,
                            incarnation=committed.revision,
                        )
                        self._lapsed = False
                        return True
                await self._keeper.drop()
                # What is in the way may be our own earlier life, which lapses; or a write of unknown fate.
                if not await self._way_is_free():
                    return False
            except (MembershipUnavailable, MembershipRefused, LeaseGone):
                await self._keeper.drop()
                await sleep(self._clock, backoff.next_s())

    async def _way_is_free(self) -> bool:
        """Wait twice the lease's length for the key to go: whoever is there after that renews it."""
        end_s = self._clock.now_s() + 2.0 * self._keeper.ttl_s
        while self._clock.now_s() < end_s:
            if (await self._store.get([self._key]))[self._key] is None:
                return True
            await sleep(self._clock, self._keeper.ttl_s / 5.0)
        return False


class HeldLead:
    """`membership.Leadership` over a store. Made by `campaign`, which has put the key."""

    def __init__(self, keeper: Keeper, key: str, leader: Leader, on_lost: LostCallback | None) -> None:
        self._keeper, self._key, self._leader = keeper, key, leader
        self._losses = _Losses(f"the lead of {leader.election}", on_lost)
        self._lost = self._ended = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"lead {leader.election}")

    @property
    def leader(self) -> Leader:
        return self._leader

    @property
    def epoch(self) -> int:
        return self._leader.epoch

    @property
    def state(self) -> LeaseState:
        if self._ended:
            return LeaseState.ENDED
        if self._lost:
            return LeaseState.LOST
        return LeaseState.LIVE if self._keeper.sure else LeaseState.DOUBTFUL

    async def lost(self) -> str:
        return await self._losses.wait()

    async def resign(self) -> None:
        await self.abandon()
        self._losses.tell(_OWN, last=True, quiet=True)
        await self._keeper.drop()

    async def abandon(self) -> None:
        """Stop renewing and say nothing, as a process that was killed."""
        self._ended = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        reason = await self._keeper.keep(self._key, self._wrong, _nothing)
        self._lost = True
        self._losses.tell(reason, last=True)
        await self._keeper.drop()

    def _wrong(self, entry: Entry | None) -> str | None:
        if entry is None:
            return "the lead was taken away"
        return None if entry.created == self.epoch else "another leads"


async def _nothing() -> None:
    return None
