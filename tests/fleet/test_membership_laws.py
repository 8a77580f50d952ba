"""Laws of membership under random histories and faults.

- The store in memory answers as a real etcd does, so what is tested in virtual time holds for it.
- Whatever was cut, missed or compacted: once connections are back, every snapshot is what a fresh read gives.
- Epochs of an election, and numbers of assignments, strictly grow; nobody leads beside another.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from etcd_server import EtcdServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from membership_backends import TIMES, InEtcd, InMemory

from service.core.reconcile import MoveReason
from service.core.types import Role
from service.fleet.clock import VirtualClock, settle
from service.fleet.membership import (
    Assignment,
    Conflict,
    LeaseState,
    Member,
    MemberExists,
    MemberKind,
    MembershipUnavailable,
)
from service.fleet.memory import MemoryFleet
from service.fleet.store import Aspect, Condition, Delete, Entry, LeaseGone, Put, Store

WORKER = Member("w", MemberKind.WORKER, "a:1")

# --- memory is like etcd ----------------------------------------------------------------------------------

_NAMES = st.sampled_from("abc")


def _touched(writes: list[Any]) -> list[str]:
    return [name for write in writes for name in ("bc" if write[0].endswith("from b") else write[1])]


_WRITES = st.lists(
    st.one_of(
        st.tuples(st.just("put"), _NAMES, st.integers(0, 9), st.integers(0, 2)),
        st.tuples(st.just("delete"), _NAMES, st.just(0), st.just(0)),
        st.tuples(st.just("delete from b"), st.just("b"), st.just(0), st.just(0)),
    ),
    max_size=3,
).filter(lambda writes: len(_touched(writes)) == len(set(_touched(writes))))  # etcd refuses a key twice
_STEPS = st.one_of(
    st.tuples(st.just("commit"), _NAMES, st.sampled_from([-1, 0, 1]), st.sampled_from(Aspect), _WRITES),
    st.tuples(st.just("revoke"), st.integers(0, 2)),
    st.tuples(st.just("renew"), st.integers(0, 2)),
    st.tuples(st.just("read")),
)


class Played:
    """The history on one store; revisions are given as their order of appearance, so that stores compare."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.store, self.prefix = store, prefix
        self.leases: list[int] = []
        self.log: list[Any] = []
        self.ranks: dict[int, int] = {0: 0}

    def rank(self, revision: int) -> int:
        return self.ranks.setdefault(revision, len(self.ranks))

    def show(self, entry: Entry | None) -> object:
        if entry is None:
            return None
        lease = self.leases.index(entry.lease_id) + 1 if entry.lease_id else 0
        return entry.value, self.rank(entry.created), self.rank(entry.changed), lease

    async def play(self, steps: list[Any]) -> None:
        self.leases = [(await self.store.grant(60.0))[0] for _ in range(2)]
        start, _ = await self.store.read(self.prefix)
        for step in steps:
            self.log.append(await getattr(self, f"_{step[0]}")(*step[1:]))
        final = await self._read()
        self.log.append(final)
        # Whoever followed from the start has the same in the end.
        followed: dict[str, Entry] = {}
        seen = -1
        async for batch in self.store.follow(self.prefix, start):
            for key, entry in batch.changes:
                seen = max(seen, batch.revision)
                if entry is None:
                    followed.pop(key, None)
                else:
                    followed[key] = entry
            _, entries = await self.store.read(self.prefix)
            if followed == entries:
                break

    def _lease(self, index: int) -> int:
        return self.leases[index - 1] if index else 0

    async def _commit(self, name: str, state: int, aspect: Aspect, writes: list[Any]) -> object:
        """state: -1 the revision that the key has, 0 that there is none, 1 a wrong one."""
        key = self.prefix + name
        entry = (await self.store.get([key]))[key]
        has = 0 if entry is None else (entry.created if aspect is Aspect.CREATED else entry.changed)
        wanted = {-1: has, 0: 0, 1: has + 1_000_000}[state]
        ops: list[Put | Delete] = [
            Put(self.prefix + w[1], str(w[2]), self._lease(w[3]))
            if w[0] == "put"
            else Delete(self.prefix + w[1], self.prefix + "z" if w[0].endswith("from b") else "")
            for w in writes
        ]
        try:
            return (await self.store.commit([Condition(key, wanted, aspect)], ops)).done
        except LeaseGone:
            return "lease gone"

    async def _revoke(self, index: int) -> None:
        if index:
            await self.store.revoke(self._lease(index))

    async def _renew(self, index: int) -> object:
        return await self.store.renew(self._lease(index)) > 0.0 if index else None

    async def _read(self) -> object:
        _, entries = await self.store.read(self.prefix)
        return {key.removeprefix(self.prefix): self.show(entry) for key, entry in sorted(entries.items())}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(_STEPS, max_size=25))
def test_the_store_in_memory_answers_as_etcd_does(shared_etcd: EtcdServer, steps: list[Any]) -> None:
    async def main() -> None:
        real = InEtcd(shared_etcd)
        store = real.make()._store
        etcd = Played(store, f"/plaserve/{real.fleet}/")
        memory = Played(MemoryFleet(VirtualClock()).store(), "/plaserve/m/")
        try:
            await etcd.play(steps)
            await memory.play(steps)
        finally:
            await store.close()
        assert memory.log == etcd.log

    asyncio.run(main())


# --- faults in virtual time -------------------------------------------------------------------------------

_FAULTS = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, 2)),
    st.tuples(st.just("mend"), st.integers(0, 2)),
    st.tuples(st.just("away"), st.booleans()),
    st.tuples(st.just("compact"), st.just(0)),
    st.tuples(st.just("join"), st.integers(0, 2)),
    st.tuples(st.just("leave"), st.integers(0, 2)),
    st.tuples(st.just("update"), st.integers(0, 2)),
    st.tuples(st.just("assign"), st.integers(0, 2)),
    st.tuples(st.just("campaign"), st.integers(0, 2)),
    st.tuples(st.just("resign"), st.integers(0, 2)),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.3, 1.5])),
)


class Faulty:
    """Three processes of a fleet whose connections come and go."""

    def __init__(self) -> None:
        self.backend = InMemory()
        self.epochs: list[int] = []
        self.numbers: list[int] = []
        self.updates = 0

    async def play(self, steps: list[Any]) -> None:
        self.processes = [await self.backend.connect() for _ in range(3)]
        self.leases: dict[int, Any] = {}
        self.campaigns: dict[int, asyncio.Task[Any]] = {}
        for name, argument in steps:
            step = asyncio.create_task(getattr(self, f"_{name}")(argument))
            await settle()
            await self.backend.until(step.done, f"{name} ends")  # it may wait for time to pass
            with suppress(MembershipUnavailable, MemberExists, Conflict):
                step.result()
            self._check_leads()
        await self._heal()

    def _check_leads(self) -> None:
        leads = [c.result() for c in self.campaigns.values() if c.done() and not c.cancelled()]
        live = [lead for lead in leads if lead.state is LeaseState.LIVE]
        assert len(live) <= 1, "two are sure to lead"
        for lead in leads:
            if lead.epoch not in self.epochs:
                assert not self.epochs or lead.epoch > self.epochs[-1]
                self.epochs.append(lead.epoch)

    async def _heal(self) -> None:
        for index in range(3):
            await self._mend(index)
        await self._away(False)
        await self.backend.pass_time(6.0 * TIMES.ttl_s)
        self._check_leads()
        fresh = await self.backend.connect()
        for process in self.processes:
            assert process.snapshot() == fresh.snapshot()
            assert not process.snapshot().stale
        for index, lease in self.leases.items():
            if lease.state is LeaseState.LIVE:
                assert fresh.snapshot().members[f"w{index}"] == lease.member
            else:
                assert lease.state is LeaseState.ENDED
        if any(not c.done() for c in self.campaigns.values()):
            assert fresh.leader("e") is not None, "somebody wants to lead and nobody does"
        for campaign in self.campaigns.values():
            campaign.cancel()
        await self.backend.close()

    async def _cut(self, index: int) -> None:
        self.processes[index]._store.cut = True  # type: ignore[attr-defined]

    async def _mend(self, index: int) -> None:
        self.processes[index]._store.cut = False  # type: ignore[attr-defined]

    async def _away(self, away: bool) -> None:
        if self.backend.service.away != away:
            self.backend.service.away = away

    async def _compact(self, _: int) -> None:
        self.backend.service.compact()

    async def _wait(self, seconds: float) -> None:
        await self.backend.pass_time(seconds)

    async def _join(self, index: int) -> None:
        member = Member(f"w{index}", MemberKind.WORKER, f"a:{index}")
        if index not in self.leases or self.leases[index].state is LeaseState.ENDED:
            self.leases[index] = await self.processes[index].join(member)

    async def _leave(self, index: int) -> None:
        if index in self.leases:
            await self.leases[index].leave()

    async def _update(self, index: int) -> None:
        if index in self.leases and self.leases[index].state is not LeaseState.ENDED:
            self.updates += 1
            await self.leases[index].update(facts={"n": self.updates})

    async def _assign(self, index: int) -> None:
        present = self.processes[index].snapshot().assignments.get("w")
        role = Role.SP if present is None or present.role is not Role.SP else Role.LP
        expected = present.number if present else 0
        made = await self.processes[index].assign(
            "w", role, expected=expected, reason=MoveReason.PRESSURE, by=str(index)
        )
        assert isinstance(made, Assignment)
        assert not self.numbers or made.number > self.numbers[-1]
        self.numbers.append(made.number)

    async def _campaign(self, index: int) -> None:
        old = self.campaigns.get(index)
        if old is None or (old.done() and old.result().state in (LeaseState.LOST, LeaseState.ENDED)):
            campaign = self.processes[index].campaign("e", str(index))
            self.campaigns[index] = asyncio.create_task(campaign)

    async def _resign(self, index: int) -> None:
        campaign = self.campaigns.get(index)
        if campaign is not None and campaign.done():
            await campaign.result().resign()


@settings(max_examples=30)
@given(steps=st.lists(_FAULTS, max_size=30))
def test_after_any_faults_all_see_the_same_and_epochs_and_numbers_grew(steps: list[Any]) -> None:
    asyncio.run(Faulty().play(steps))
