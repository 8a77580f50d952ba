"""`Membership` over any `Store`: reads from the mirror, writes by transactions, both backends alike.

A change of a role reads what is there now, decides, and commits on the condition that nothing of it has
changed since: the worker's entry, the fleet's counter of numbers and, for a write under a leadership, the
key of that election. If only the counter moved (another worker was moved at the same time) it tries again;
if the worker's entry moved, the number that the caller expected is no longer there, and that is a Conflict.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from service.core.reconcile import MoveReason
from service.core.types import Role
from service.fleet.clock import Clock, WallClock, sleep
from service.fleet.leases import HeldLead, Keeper, MemberLease
from service.fleet.membership import (
    Assignment,
    Conflict,
    Facts,
    Fenced,
    FleetSnapshot,
    Leader,
    Leadership,
    LeaseState,
    LostCallback,
    Member,
    MemberExists,
    MembershipError,
    MembershipRefused,
    MembershipUnavailable,
    Move,
    RetiredShard,
    WorkerPinned,
)
from service.fleet.mirror import Backoff, Mirror
from service.fleet.records import (
    Keys,
    check_facts,
    check_name,
    decode,
    encode_assignment,
    encode_leader,
    encode_member,
    encode_move,
    encode_retired,
)
from service.fleet.store import Aspect, Condition, Delete, Entry, LeaseGone, Put, Store

MOVES_KEPT = 256
_HELD = (LeaseState.LIVE, LeaseState.DOUBTFUL)
_ATTEMPTS = 30  # of one change, each lost to another writer of the fleet

Decide = Callable[[Assignment | None, int], Assignment | None]  # (present, next number) -> wanted; None: drop


@dataclass(frozen=True, slots=True)
class MembershipTimes:
    """ttl_s: length of a lease where none is named; whoever dies is noticed after it, so is a network cut.

    stale_after_s: without a sign of life for so long, snapshots are marked stale. settle_s: how long a write
    waits to be seen in the own snapshot. open_timeout_s: until the first state is read.
    """

    ttl_s: float = 10.0
    stale_after_s: float = 3.0
    settle_s: float = 1.0
    open_timeout_s: float = 10.0


class StoreMembership:
    """One process's membership. `fleet` and `root` name the keys."""

    def __init__(
        self,
        store: Store,
        *,
        fleet: str = "default",
        root: str = "/plaserve",
        times: MembershipTimes | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._store, self._keys = store, Keys(fleet, root)
        self._times = times or MembershipTimes()
        self._clock = clock or WallClock()
        self.mirror = Mirror(store, self._keys, self._clock, self._times.stale_after_s)
        self._leases: list[MemberLease] = []
        self._leads: list[HeldLead] = []

    async def open(self) -> None:
        self.mirror.start()
        end_s = self._clock.now_s() + self._times.open_timeout_s
        while self.mirror.fresh_reads == 0:
            seen = self.mirror.moved()
            if isinstance(self.mirror.error, MembershipRefused):
                await self.close()
                raise self.mirror.error
            left_s = end_s - self._clock.now_s()
            if left_s <= 0.0 or not await seen.wait(self._clock, left_s):
                await self.close()
                raise MembershipUnavailable(
                    f"membership can't be read: {self.mirror.error or 'no answer in time'}"
                )

    async def close(self) -> None:
        held = [lead.resign() for lead in self._leads] + [lease.leave() for lease in self._leases]
        await asyncio.gather(*held, return_exceptions=True)
        await self.mirror.close()
        await self._store.close()

    async def abandon(self) -> None:
        """End as a process that was killed: nothing is given up, leases are left to lapse. For tests."""
        leads, leases = [h.abandon() for h in self._leads], [h.abandon() for h in self._leases]
        await asyncio.gather(*leads, *leases)
        await self.mirror.close()
        await self._store.close()

    # --- reads --------------------------------------------------------------------------------------------

    def snapshot(self) -> FleetSnapshot:
        return self.mirror.snapshot()

    def watch(self) -> AsyncIterator[FleetSnapshot]:
        return self.mirror.snapshots()

    def leader(self, election: str) -> Leader | None:
        found = self.mirror.record(self._keys.election(election))
        return found if isinstance(found, Leader) else None

    async def observe(self, election: str) -> AsyncIterator[Leader | None]:
        last: Leader | None = None
        first = True
        async for snapshot in self.mirror.snapshots():
            leader = snapshot.leaders.get(election)
            if first or leader != last:
                first, last = False, leader
                yield leader

    # --- members ------------------------------------------------------------------------------------------

    async def join(
        self, member: Member, *, ttl_s: float | None = None, on_lost: LostCallback | None = None
    ) -> MemberLease:
        check_facts(member.facts)
        key = self._keys.member(member.member_id)
        member = replace(member, joined_time_s=self._clock.time_s())
        keeper = self._keeper()
        try:
            lease_id = await keeper.begin(self._times.ttl_s if ttl_s is None else ttl_s)
            put = Put(key, encode_member(member), lease_id)
            committed = await self._store.commit([Condition(key, 0)], [put])
        except LeaseGone:
            raise MembershipUnavailable("the lease lapsed while joining") from None
        except BaseException:
            await keeper.drop()
            raise
        if not committed.done:
            await keeper.drop()
            raise MemberExists(
                f"{member.member_id} is a member already; after a crash, until its lease is over"
            )
        lease = MemberLease(self._store, self.mirror, self._clock, keeper, on_lost)
        member = replace(member, incarnation=committed.revision)
        lease.start(key, member, self._times.settle_s)
        self._leases = [held for held in self._leases if held.state is not LeaseState.ENDED] + [lease]
        try:
            await self._seen(committed.revision)
        except asyncio.CancelledError:
            await lease.leave()
            raise
        return lease

    def _keeper(self) -> Keeper:
        return Keeper(self._store, self.mirror, self._clock)

    async def _seen(self, revision: int) -> None:
        """A write shows in the own snapshot when it returns, unless that takes too long."""
        await self.mirror.reach(revision, self._times.settle_s)

    # --- roles --------------------------------------------------------------------------------------------

    async def assign(
        self,
        worker_id: str,
        role: Role,
        *,
        expected: int,
        reason: MoveReason,
        by: str,
        facts: Facts | None = None,
        fence: Leadership | None = None,
        force: bool = False,
        shard: str = "",
    ) -> Assignment:
        facts = facts or {}
        check_facts(facts)
        if shard:
            check_name(shard, "shard")

        def decide(present: Assignment | None, number: int) -> Assignment:
            _expect(worker_id, present, expected)
            placed = shard or (present.shard if present is not None else "")
            if present is not None and (present.role, present.shard) == (role, placed):
                return present
            if present is not None and present.pinned and not force:
                raise WorkerPinned(f"{worker_id} is pinned to {present.role} by {present.by}", present)
            pinned = present is not None and present.pinned
            return Assignment(worker_id, role, reason, by, number, pinned, self._clock.time_s(), placed)

        changed = await self._change(worker_id, decide, fence, facts)
        assert changed is not None
        return changed

    async def pin(
        self,
        worker_id: str,
        pinned: bool,
        *,
        by: str,
        role: Role | None = None,
        fence: Leadership | None = None,
    ) -> Assignment:
        member = self.mirror.record(self._keys.member(worker_id))
        reported = member.report.role if isinstance(member, Member) and member.report else None

        def decide(present: Assignment | None, number: int) -> Assignment:
            wanted = role or (present.role if present else reported)
            if wanted is None:
                raise ValueError(f"{worker_id} has no role yet; name the role to pin it to")
            if present is not None and present.role is wanted and present.pinned == pinned:
                return present
            now_s = self._clock.time_s()
            placed = present.shard if present is not None else ""
            return Assignment(worker_id, wanted, MoveReason.PINNED, by, number, pinned, now_s, placed)

        changed = await self._change(worker_id, decide, fence, {})
        assert changed is not None
        return changed

    async def forget(self, worker_id: str, *, expected: int, fence: Leadership | None = None) -> None:
        def decide(present: Assignment | None, _number: int) -> None:
            _expect(worker_id, present, expected)

        await self._change(worker_id, decide, fence, {})

    async def _change(
        self, worker_id: str, decide: Decide, fence: Leadership | None, facts: Facts
    ) -> Assignment | None:
        role_key, number_key = self._keys.role(worker_id), self._keys.number
        keys = [role_key, number_key]
        fence_key = self._keys.election(fence.leader.election) if fence is not None else ""
        backoff = Backoff(first_s=0.002, most_s=0.1)
        for _ in range(_ATTEMPTS):
            found = await self._store.get([*keys, fence_key] if fence_key else keys)
            conditions = [_unchanged(key, found[key]) for key in keys]
            if fence is not None:
                conditions.append(Condition(fence_key, fence.epoch, Aspect.CREATED))
                entry = found[fence_key]
                if entry is None or entry.created != fence.epoch:
                    raise Fenced(f"{fence.leader.candidate} no longer leads {fence.leader.election}")
            present = self._read(role_key, found[role_key])
            number = self._number(found[number_key]) + 1
            wanted = decide(present, number)
            if wanted == present:
                return present
            committed = await self._store.commit(conditions, self._writes(present, wanted, worker_id, facts))
            if committed.done:
                await self._seen(committed.revision)
                return wanted
            await sleep(self._clock, backoff.next_s())
        raise MembershipUnavailable(f"{worker_id}: too many others write at the same time")

    def _read(self, key: str, entry: Entry | None) -> Assignment | None:
        if entry is None:
            return None
        try:
            found = decode(*self._keys.split(key), entry)
        except ValueError as error:
            raise MembershipError(f"an assignment can't be read, delete its key: {error}") from None
        assert isinstance(found, Assignment)
        return found

    def _number(self, entry: Entry | None) -> int:
        if entry is None:
            return 0
        found = decode("number", "", entry)
        assert isinstance(found, int)
        return found

    def _writes(
        self, present: Assignment | None, wanted: Assignment | None, worker_id: str, facts: Facts
    ) -> list[Put | Delete]:
        """What a decided change puts and deletes, history included."""
        if wanted is None:
            return [Delete(self._keys.role(worker_id))]
        number = wanted.number
        writes: list[Put | Delete] = [
            Put(self._keys.role(worker_id), encode_assignment(wanted)),
            Put(self._keys.number, str(number)),
        ]
        member = self.mirror.record(self._keys.member(worker_id))
        move = _move(present, wanted, member.shard if isinstance(member, Member) else "", facts)
        if move is not None:
            writes.append(Put(self._keys.move(number), encode_move(move)))
            if number > MOVES_KEPT:
                writes.append(Delete(self._keys.move(0), self._keys.move(number - MOVES_KEPT + 1)))
        return writes

    async def retire(self, shard: str, retired: bool, *, by: str) -> None:
        key = self._keys.retired(shard)
        write: Put | Delete = Delete(key)
        if retired:
            write = Put(key, encode_retired(RetiredShard(shard, by, self._clock.time_s())))
        committed = await self._store.commit([], [write])
        await self._seen(committed.revision)

    # --- elections ----------------------------------------------------------------------------------------

    async def campaign(
        self,
        election: str,
        candidate: str,
        *,
        ttl_s: float | None = None,
        on_lost: LostCallback | None = None,
    ) -> HeldLead:
        key = self._keys.election(election)
        wanted_s = self._times.ttl_s if ttl_s is None else ttl_s
        backoff = Backoff(most_s=max(0.1, wanted_s / 5.0))
        while not self.mirror.closed:
            seen = self.mirror.moved(key)
            if self.mirror.entry(key) is not None and not self.mirror.stale:
                await seen.wait(self._clock, wanted_s)
                continue
            lead = await self._try_to_lead(key, election, candidate, wanted_s, on_lost)
            if lead is not None:
                self._leads = [held for held in self._leads if held.state in _HELD] + [lead]
                try:
                    await self._seen(lead.epoch)
                except asyncio.CancelledError:
                    await lead.resign()
                    raise
                return lead
            await seen.wait(self._clock, backoff.next_s())
        raise MembershipUnavailable("membership is closed")

    async def _try_to_lead(
        self, key: str, election: str, candidate: str, ttl_s: float, on_lost: LostCallback | None
    ) -> HeldLead | None:
        """None: another leads, or the service is away."""
        keeper = self._keeper()
        now_s = self._clock.time_s()
        try:
            lease_id = await keeper.begin(ttl_s)
            put = Put(key, encode_leader(candidate, now_s), lease_id)
            committed = await self._store.commit([Condition(key, 0)], [put])
        except (MembershipUnavailable, LeaseGone):
            await keeper.drop()
            return None
        except BaseException:
            await keeper.drop()
            raise
        if not committed.done:
            await keeper.drop()
            return None
        return HeldLead(keeper, key, Leader(election, candidate, committed.revision, now_s), on_lost)


def _move(present: Assignment | None, wanted: Assignment, here: str, facts: Facts) -> Move | None:
    """What history keeps of a change; None where only the pin changed. here: the worker's present shard."""
    from_role = present.role if present is not None else None
    from_shard, to_shard = (present.shard if present is not None else "") or here, wanted.shard or here
    if from_shard == to_shard:
        from_shard = to_shard = ""
        if from_role is wanted.role:
            return None
    return Move(
        wanted.number, wanted.worker_id, from_role, wanted.role, wanted.reason, wanted.by, wanted.at_time_s,
        facts, from_shard, to_shard,
    )  # fmt: skip


def _expect(worker_id: str, present: Assignment | None, expected: int) -> None:
    number = present.number if present is not None else 0
    if number != expected:
        raise Conflict(f"{worker_id} has assignment {number}, the decision was made on {expected}", present)


def _unchanged(key: str, entry: Entry | None) -> Condition:
    return Condition(key, entry.changed if entry is not None else 0)
