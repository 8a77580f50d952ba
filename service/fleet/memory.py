"""Membership inside one process: a small store with etcd's model (revisions, leases, transactions) in memory.

A `MemoryFleet` stands for the service, a `membership()` of it for one process's connection. With a virtual
clock leases lapse when the test moves it. The service can be `away` and each connection be `cut`: writes then
fail, snapshots turn stale, leases lapse on the service's clock, as they would with etcd.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from service.fleet.clock import Clock, Signal, Timer, WallClock
from service.fleet.membership import MembershipUnavailable
from service.fleet.store import (
    Aspect,
    Batch,
    Committed,
    Compacted,
    Condition,
    Delete,
    Entry,
    LeaseGone,
    Put,
)
from service.fleet.stored import MembershipTimes, StoreMembership

_ALIVE_S = 0.25  # a follower hears so often that the service is there


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    timer: Timer
    until_s: float
    keys: set[str] = field(default_factory=set)


class MemoryFleet:
    """The service. changes_kept: how far back a follower may resume, in changed keys."""

    def __init__(self, clock: Clock | None = None, changes_kept: int = 10_000) -> None:
        self.clock = clock or WallClock()
        self.entries: dict[str, Entry] = {}
        self.revision = 1
        self.compacted = 0  # changes up to this revision are no longer kept
        self._log: deque[tuple[int, str, Entry | None]] = deque()
        self._changes_kept = changes_kept
        self._leases: dict[int, _Lease] = {}
        self._ids = count(1)
        self._stores: list[MemoryStore] = []
        self._away = False

    def membership(
        self, fleet: str = "default", times: MembershipTimes | None = None, root: str = "/plaserve"
    ) -> StoreMembership:
        """A connection of its own, as each process of a fleet has one."""
        return StoreMembership(self.store(), fleet=fleet, root=root, times=times, clock=self.clock)

    def store(self) -> MemoryStore:
        store = MemoryStore(self)
        self._stores.append(store)
        return store

    @property
    def away(self) -> bool:
        return self._away

    @away.setter
    def away(self, value: bool) -> None:
        """Away: no call is answered, and time stands still for leases: on return each has its full length."""
        self._away = value
        for lease_id, lease in self._leases.items():
            lease.timer.cancel()
            if not value:
                self._set_timer(lease_id, lease)
        self._wake()

    def compact(self) -> None:
        """Forget all changes so far: whoever resumes from before must read afresh."""
        self._log.clear()
        self.compacted = self.revision

    def lose_data(self) -> None:
        """As a service that was set up anew: nothing is there, and revisions begin again."""
        for lease in self._leases.values():
            lease.timer.cancel()
        self._leases.clear()
        self.entries.clear()
        self._log.clear()
        self.revision, self.compacted = 1, 0
        self._wake()

    # --- for the stores -----------------------------------------------------------------------------------

    def changes(self, prefix: str, after: int) -> Batch:
        """Raises Compacted."""
        if after < self.compacted or after > self.revision:
            raise Compacted(f"revision {after} is not kept")
        found = []
        for revision, key, entry in reversed(self._log):
            if revision <= after:
                break
            if key.startswith(prefix):
                found.append((key, entry))
        return Batch(self.revision, tuple(reversed(found)))

    def commit(self, conditions: Sequence[Condition], writes: Sequence[Put | Delete]) -> Committed:
        if not all(self._holds(condition) for condition in conditions):
            return Committed(False, self.revision)
        for write in writes:
            if isinstance(write, Put) and write.lease_id and write.lease_id not in self._leases:
                raise LeaseGone
        self.revision += 1
        changed = False
        for write in writes:
            if isinstance(write, Put):
                self._put(write)
                changed = True
                continue
            end = write.end or f"{write.key}\0"
            for key in sorted(key for key in self.entries if write.key <= key < end):
                self._delete(key)
                changed = True
        if not changed:
            self.revision -= 1
        self._wake()
        return Committed(True, self.revision)

    def grant(self, ttl_s: float) -> int:
        lease_id = next(self._ids)
        lease = _Lease(ttl_s, self.clock.call_at(self.clock.now_s() + ttl_s, lambda: None), 0.0)
        self._leases[lease_id] = lease
        self._set_timer(lease_id, lease)
        return lease_id

    def renew(self, lease_id: int) -> float:
        lease = self._leases.get(lease_id)
        if lease is None:
            return 0.0
        self._set_timer(lease_id, lease)
        return lease.ttl_s

    def revoke(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        lease.timer.cancel()
        if lease.keys:
            self.revision += 1
            for key in sorted(lease.keys):
                self._delete(key)
            self._wake()

    def forget(self, store: MemoryStore) -> None:
        if store in self._stores:
            self._stores.remove(store)

    # --- inside -------------------------------------------------------------------------------------------

    def _set_timer(self, lease_id: int, lease: _Lease) -> None:
        lease.timer.cancel()
        lease.until_s = self.clock.now_s() + lease.ttl_s
        lease.timer = self.clock.call_at(lease.until_s, lambda: self.revoke(lease_id))

    def _holds(self, condition: Condition) -> bool:
        entry = self.entries.get(condition.key)
        if entry is None:
            return condition.revision == 0
        return condition.revision == (entry.created if condition.aspect is Aspect.CREATED else entry.changed)

    def _put(self, put: Put) -> None:
        old = self.entries.get(put.key)
        if old is not None and old.lease_id in self._leases:
            self._leases[old.lease_id].keys.discard(put.key)
        if put.lease_id:
            self._leases[put.lease_id].keys.add(put.key)
        created = old.created if old is not None else self.revision
        self._record(put.key, Entry(put.value, created, self.revision, put.lease_id))

    def _delete(self, key: str) -> None:
        old = self.entries[key]
        if old.lease_id in self._leases:
            self._leases[old.lease_id].keys.discard(key)
        self._record(key, None)

    def _record(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            del self.entries[key]
        else:
            self.entries[key] = entry
        self._log.append((self.revision, key, entry))
        while len(self._log) > self._changes_kept:
            self.compacted = max(self.compacted, self._log.popleft()[0])

    def _wake(self) -> None:
        for store in self._stores:
            store.wake()


class MemoryStore:
    """One connection: a `Store`."""

    def __init__(self, fleet: MemoryFleet) -> None:
        self._fleet = fleet
        self._moved = Signal()
        self._cut = False

    @property
    def cut(self) -> bool:
        """Whether this connection alone is broken."""
        return self._cut

    @cut.setter
    def cut(self, value: bool) -> None:
        self._cut = value
        self.wake()

    def wake(self) -> None:
        self._moved.set()

    def _check(self) -> None:
        if self._cut or self._fleet.away:
            raise MembershipUnavailable(
                "the service is away" if self._fleet.away else "the connection is cut"
            )

    async def read(self, prefix: str) -> tuple[int, Mapping[str, Entry]]:
        self._check()
        found = {key: entry for key, entry in self._fleet.entries.items() if key.startswith(prefix)}
        return self._fleet.revision, found

    async def get(self, keys: Sequence[str]) -> Mapping[str, Entry | None]:
        self._check()
        return {key: self._fleet.entries.get(key) for key in keys}

    async def follow(self, prefix: str, after: int) -> AsyncGenerator[Batch, None]:
        while True:
            self._check()
            self._moved.clear()
            batch = self._fleet.changes(prefix, after)
            after = batch.revision
            yield batch
            await self._moved.wait(self._fleet.clock, _ALIVE_S)

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Put | Delete]) -> Committed:
        self._check()
        return self._fleet.commit(conditions, writes)

    async def grant(self, ttl_s: float) -> tuple[int, float]:
        self._check()
        return self._fleet.grant(ttl_s), ttl_s

    async def renew(self, lease_id: int) -> float:
        self._check()
        return self._fleet.renew(lease_id)

    async def revoke(self, lease_id: int) -> None:
        self._check()
        self._fleet.revoke(lease_id)

    async def close(self) -> None:
        self._fleet.forget(self)
