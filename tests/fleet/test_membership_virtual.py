"""Membership in virtual time: who doubts, knows and takes over when, to the moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from membership_backends import TIMES, InMemory, worker

from service.core.reconcile import MoveReason
from service.core.types import Role
from service.fleet.clock import VirtualClock, settle
from service.fleet.membership import Fenced, LeaseState, MemberExists, MembershipUnavailable
from service.fleet.memory import MemoryFleet
from service.fleet.store import Compacted, Put

WORKER = worker("w")


async def test_whoever_lapsed_finds_its_id_taken_and_does_not_fight() -> None:
    backend = InMemory()
    cut, other = await backend.connect(), await backend.connect()
    told: list[str] = []
    lease = await cut.join(WORKER, on_lost=told.append)
    cut._store.cut = True  # type: ignore[attr-defined]
    await backend.pass_time(1.1 * TIMES.ttl_s)
    assert lease.state is LeaseState.DOUBTFUL
    assert "w" not in other.snapshot().members
    taken = await other.join(WORKER)
    cut._store.cut = False  # type: ignore[attr-defined]
    await backend.until(lambda: "another process took the id" in told)
    assert lease.state is LeaseState.LOST
    with pytest.raises(MemberExists):
        await lease.update(facts={"mine": True})
    assert taken.state is LeaseState.LIVE
    assert cut.snapshot().members["w"] == taken.member
    await backend.close()


async def test_a_holder_doubts_before_anybody_else_can_hold() -> None:
    """By the holder's clock, without a word from the service: the time between is never doubly held."""
    backend = InMemory()
    first, second = await backend.connect(), await backend.connect()
    lead = await first.campaign("e", "a")
    waiting = asyncio.create_task(second.campaign("e", "b"))
    await backend.pass_time(0.37)
    first._store.cut = True  # type: ignore[attr-defined]
    for _ in range(300):
        await backend.pass_time(0.01)
        if waiting.done():
            break
        if lead.state is LeaseState.LIVE:
            assert second.leader("e") == lead.leader
    assert waiting.done()
    assert lead.state is LeaseState.DOUBTFUL
    await backend.close()


async def test_a_fence_holds_between_the_look_and_the_write_too() -> None:
    backend = InMemory()
    first, second = await backend.connect(), await backend.connect()
    old = await first.campaign("e", "a")
    commit = first._store.commit

    async def deposed_just_before(*arguments: Any) -> Any:
        if second.leader("e") == old.leader:
            backend.service.revoke(old._keeper.lease_id)
            await second.campaign("e", "b")
        return await commit(*arguments)

    first._store.commit = deposed_just_before  # type: ignore[method-assign]
    write = asyncio.create_task(
        first.assign("w", Role.SP, expected=0, reason=MoveReason.PRESSURE, by="a", fence=old)
    )
    await backend.until(write.done)
    with pytest.raises(Fenced):
        write.result()
    assert second.snapshot().assignments == {}
    await backend.close()


async def test_a_standby_leads_and_a_loser_knows_at_once() -> None:
    """By what they see, not by a timer: no time passes here."""
    backend = InMemory()
    first, second = await backend.connect(), await backend.connect()
    for turn in range(3):
        lead = await first.campaign("e", "a")
        waiting = asyncio.create_task(second.campaign("e", "b"))
        await settle()
        assert not waiting.done()
        if turn % 2:
            await lead.resign()
        else:
            backend.service.revoke(lead._keeper.lease_id)
        await settle()
        assert waiting.done()
        assert lead.state is (LeaseState.ENDED if turn % 2 else LeaseState.LOST)
        await waiting.result().resign()
    await backend.close()


async def test_a_service_set_up_anew_is_joined_once_however_late_it_is_read() -> None:
    backend = InMemory()
    membership = await backend.connect()
    lease = await membership.join(WORKER)
    for number in range(5):
        await lease.update(facts={"n": number})
    read = membership._store.read

    async def no_read(prefix: str) -> Any:
        raise MembershipUnavailable("not now")

    membership._store.read = no_read  # type: ignore[method-assign]
    backend.service.lose_data()
    await backend.pass_time(3.0 * TIMES.ttl_s)
    assert membership.snapshot().members["w"] != lease.member, "the time before is still shown"
    assert membership.snapshot().stale
    assert (lease.lapses, lease.state) == (1, LeaseState.LIVE)
    membership._store.read = read  # type: ignore[method-assign]
    await backend.until(lambda: membership.snapshot().members["w"] == lease.member)
    assert lease.lapses == 1
    assert lease.member.facts == {"n": 4}
    await backend.close()


async def test_a_service_that_was_away_for_long_has_lost_nobody() -> None:
    backend = InMemory()
    membership = await backend.connect()
    lease = await membership.join(WORKER)
    backend.service.away = True
    await backend.pass_time(100.0)
    snapshot = membership.snapshot()
    assert snapshot.stale
    assert snapshot.age_s == pytest.approx(100.0, abs=1.1)
    assert snapshot.members == {"w": lease.member}
    with pytest.raises(MembershipUnavailable):
        await membership.join(worker("v"))
    backend.service.away = False
    await backend.until(lambda: lease.state is LeaseState.LIVE)
    await backend.until(lambda: not membership.snapshot().stale)
    assert lease.lapses == 0
    await backend.close()


async def test_what_is_no_longer_kept_is_said() -> None:
    fleet = MemoryFleet(VirtualClock(), changes_kept=3)
    store = fleet.store()
    for number in range(5):
        await store.commit([], [Put("/k", str(number))])
    assert fleet.changes("/", fleet.revision - 3).changes[-1][1] == fleet.entries["/k"]
    with pytest.raises(Compacted):
        fleet.changes("/", fleet.revision - 4)
    with pytest.raises(Compacted):
        fleet.changes("/", fleet.revision + 1)
