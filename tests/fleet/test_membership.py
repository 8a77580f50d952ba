"""The contract of membership, over both backends: `memory` in virtual time, `etcd` with a real etcd."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from membership_backends import TIMES, Backend, assign, worker

from service.core.reconcile import MoveReason
from service.core.types import Role
from service.fleet.membership import (
    Assignment,
    Conflict,
    Lease,
    LeaseState,
    MemberExists,
    MemberKind,
    WorkerPinned,
)
from service.fleet.store import Put
from service.fleet.stored import MOVES_KEPT

# --- members ----------------------------------------------------------------------------------------------


async def test_a_member_is_seen_by_all_with_what_it_says_until_it_leaves(backend: Backend) -> None:
    first, second = await backend.connect(), await backend.connect()
    facts = {"block_tokens": 32, "profiles": [64, 128], "bundle": {"id": "b", "ok": True, "none": None}}
    lease = await first.join(worker(facts=facts))
    assert first.snapshot().members["w1"] == lease.member, "its own write is seen at once"
    await backend.until(lambda: "w1" in second.snapshot().members)
    seen = second.snapshot().members["w1"]
    assert (seen.kind, seen.address, seen.shard, seen.facts) == (
        MemberKind.WORKER,
        "10.0.0.1:9000",
        "s1",
        facts,
    )
    assert seen.incarnation == lease.member.incarnation > 0
    assert second.snapshot().of(MemberKind.WORKER, "s1") == (seen,)
    assert second.snapshot().of(MemberKind.WORKER, "s2") == second.snapshot().of(MemberKind.FRONTEND) == ()

    await lease.leave()
    assert lease.state is LeaseState.ENDED
    assert await lease.lost()
    await backend.until(lambda: "w1" not in second.snapshot().members)


async def test_an_id_is_one_process_and_free_again_after_it_left(backend: Backend) -> None:
    first, second = await backend.connect(), await backend.connect()
    lease = await first.join(worker())
    with pytest.raises(MemberExists, match="w1"):
        await second.join(worker())
    await lease.leave()
    again = await second.join(worker(address="10.0.0.2:9000"))
    assert again.member.incarnation > lease.member.incarnation
    assert second.snapshot().members["w1"].address == "10.0.0.2:9000"


async def test_a_lease_is_kept_alive_and_lapses_when_its_process_dies(backend: Backend) -> None:
    dying, living, watcher = await backend.connect(), await backend.connect(), await backend.connect()
    kept = await living.join(worker("lives"))
    await dying.join(worker("dies"))
    await backend.until(lambda: len(watcher.snapshot().members) == 2)
    await backend.pass_time(1.8 * TIMES.ttl_s)
    assert set(watcher.snapshot().members) == {"lives", "dies"}
    await dying.abandon()
    backend.opened.remove(dying)
    await backend.until(lambda: set(watcher.snapshot().members) == {"lives"})
    assert kept.state is LeaseState.LIVE
    assert kept.lapses == 0
    assert watcher.mirror.resumes == 1, "a fleet in which nothing happens is followed without a break"


async def test_what_a_member_updates_and_reports_is_seen_in_the_same_life(backend: Backend) -> None:
    first, second = await backend.connect(), await backend.connect()
    lease = await first.join(worker(facts={"a": 1}))
    born = lease.member.incarnation
    await lease.update(facts={"a": 2})
    await lease.update(address="10.0.0.9:1")
    await lease.report(Role.SP, 7)
    await backend.until(lambda: (m := second.snapshot().members.get("w1")) and m.report)
    seen = second.snapshot().members["w1"]
    assert (seen.facts, seen.address, seen.shard, seen.incarnation) == ({"a": 2}, "10.0.0.9:1", "s1", born)
    assert seen.report is not None
    assert (seen.report.role, seen.report.number) == (Role.SP, 7)


async def test_a_lapsed_member_tells_its_owner_and_joins_again_with_its_newest_facts(
    backend: Backend,
) -> None:
    membership, watcher = await backend.connect(), await backend.connect()
    told: list[str] = []
    lease = await membership.join(worker(facts={"a": 1}), on_lost=told.append)
    await lease.update(facts={"a": 2})
    waiting = asyncio.create_task(lease.lost())
    await backend.pass_time(0.0)
    born = lease.member.incarnation
    await membership._store.revoke(lease._keeper.lease_id)
    await backend.until(lambda: lease.lapses == 1 and lease.state is LeaseState.LIVE)
    assert told == [await waiting]
    await backend.until(lambda: (m := watcher.snapshot().members.get("w1")) and m.incarnation > born)
    assert watcher.snapshot().members["w1"].facts == {"a": 2}
    await lease.update(facts={"a": 3})
    assert membership.snapshot().members["w1"].facts == {"a": 3}


async def test_names_and_facts_that_cannot_be_stored_are_refused(backend: Backend) -> None:
    membership = await backend.connect()
    for name in ("", "a/b", "ä", "..", "x" * 129):
        with pytest.raises(ValueError, match="member_id"):
            await membership.join(worker(name))
    for facts in ({"a": object()}, {"a": float("nan")}, {1: "a"}, {"a": "x" * 300_000}):
        with pytest.raises(ValueError, match="facts"):
            await membership.join(worker(facts=facts))
    with pytest.raises(ValueError, match="fleet"):
        backend.make("a/b")
    assert membership.snapshot().members == {}


async def test_fleets_in_one_service_do_not_see_each_other(backend: Backend) -> None:
    one, longer = await backend.connect(f"{backend.fleet}a"), await backend.connect(f"{backend.fleet}ab")
    await one.join(worker("w"))
    await longer.join(worker("w"))
    assert (await assign(one, "w", Role.SP)).number == (await assign(longer, "w", Role.LP)).number == 1
    assert [m.assignments["w"].role for m in (one.snapshot(), longer.snapshot())] == [Role.SP, Role.LP]


async def test_an_entry_that_cannot_be_read_is_left_out_and_named(backend: Backend) -> None:
    membership = await backend.connect()
    await membership.join(worker())
    junk = ["members/x", "roles/x", "moves/x", "elections/x", "other/x"]
    keys = [membership._keys.prefix + name for name in junk]
    texts = ["{", '{"role":"none"}', "[]", "3", "{}"]
    await membership._store.commit([], [Put(k, t) for k, t in zip(keys, texts, strict=True)])
    await backend.until(lambda: len(membership.snapshot().unreadable) == len(junk))
    assert membership.snapshot().unreadable == tuple(sorted(keys))
    assert set(membership.snapshot().members) == {"w1"}
    late = await backend.connect()
    assert replace(late.snapshot(), revision=0) == replace(membership.snapshot(), revision=0)


async def test_hundreds_of_members_are_seen_by_all_and_go_together(backend: Backend) -> None:
    owner, watcher = await backend.connect(), await backend.connect()
    names = {f"w{i:03}" for i in range(300)}
    facts = {"text": "x" * 1000}
    few = asyncio.Semaphore(16)

    async def join(name: str) -> Lease:
        async with few:
            return await owner.join(worker(name, facts=facts), ttl_s=20.0)

    leases = await asyncio.gather(*(join(name) for name in sorted(names)))
    await backend.until(lambda: set(watcher.snapshot().members) == names)
    late = await backend.connect()
    assert late.snapshot().members == watcher.snapshot().members
    await asyncio.gather(*(lease.leave() for lease in leases))
    await backend.until(lambda: not watcher.snapshot().members and not late.snapshot().members)


# --- watching ---------------------------------------------------------------------------------------------


async def test_a_watch_begins_with_the_present_and_ends_with_the_last_state(backend: Backend) -> None:
    membership, writer = await backend.connect(), await backend.connect()
    lease = await writer.join(worker())
    await backend.until(lambda: "w1" in membership.snapshot().members)
    seen = []

    async def read() -> None:
        async with aclosing(membership.watch()) as snapshots:
            async for snapshot in snapshots:
                seen.extend([snapshot])

    reader = asyncio.create_task(read())
    for number in range(50):
        await lease.update(facts={"n": number})
    await backend.until(lambda: seen and seen[-1].members["w1"].facts == {"n": 49})
    assert set(seen[0].members) == {"w1"}
    assert [s.revision for s in seen] == sorted({s.revision for s in seen})
    assert not any(s.stale for s in seen)
    await membership.close()
    backend.opened.remove(membership)
    await asyncio.wait_for(reader, 5.0)


# --- roles ------------------------------------------------------------------------------------------------


async def test_of_two_decisions_on_the_same_state_exactly_one_is_made(backend: Backend) -> None:
    one, two = await backend.connect(), await backend.connect()
    expected, roles = 0, [Role.SP, Role.LP]
    for turn in range(20):
        wanted = [roles[turn % 2], Role.MIXED] if turn % 3 else [Role.MIXED, roles[turn % 2]]
        present = one.snapshot().assignments.get("w1")
        wanted = [role for role in Role if present is None or role is not present.role][:2]
        outcomes = await asyncio.gather(
            *(assign(m, "w1", role, expected) for m, role in zip((one, two), wanted, strict=True)),
            return_exceptions=True,
        )
        won = [o for o in outcomes if isinstance(o, Assignment)]
        lost = [o for o in outcomes if isinstance(o, Conflict)]
        assert (len(won), len(lost)) == (1, 1), outcomes
        assert lost[0].current == won[0]
        assert won[0].number > expected
        expected = won[0].number
    await backend.until(lambda: two.snapshot().assignments["w1"].number == expected)
    assert len(two.snapshot().moves) == 20


async def test_moves_of_different_workers_at_once_are_all_made_and_numbered_apart(backend: Backend) -> None:
    memberships = [await backend.connect() for _ in range(3)]
    made = await asyncio.gather(
        *(assign(memberships[i % 3], f"w{i}", Role.SP) for i in range(12)),
    )
    assert sorted(m.number for m in made) == list(range(1, 13))


async def test_what_is_wanted_already_is_no_move(backend: Backend) -> None:
    membership = await backend.connect()
    first = await assign(membership, "w1", Role.SP)
    assert await assign(membership, "w1", Role.SP, expected=first.number) == first
    assert len(membership.snapshot().moves) == 1
    with pytest.raises(Conflict):
        await assign(membership, "w1", Role.SP, expected=0)


async def test_a_pinned_worker_is_moved_by_force_only(backend: Backend) -> None:
    membership = await backend.connect()
    with pytest.raises(ValueError, match="no role"):
        await membership.pin("w1", True, by="ann")
    lease = await membership.join(worker())
    await lease.report(Role.MIXED, 0)
    pinned = await membership.pin("w1", True, by="ann")
    assert (pinned.role, pinned.pinned, pinned.by) == (Role.MIXED, True, "ann")
    with pytest.raises(WorkerPinned) as caught:
        await assign(membership, "w1", Role.SP, expected=pinned.number)
    assert caught.value.current == pinned
    forced = await assign(membership, "w1", Role.LP, expected=pinned.number, force=True)
    assert (forced.role, forced.pinned) == (Role.LP, True)
    freed = await membership.pin("w1", False, by="ann")
    assert (freed.role, freed.pinned) == (Role.LP, False)
    moved = await assign(membership, "w1", Role.SP, expected=freed.number)
    assert pinned.number < forced.number < freed.number < moved.number
    repinned = await membership.pin("w1", True, by="ann", role=Role.LP)
    assert membership.snapshot().assignments["w1"] == repinned
    roles = [(m.from_role, m.to_role) for m in membership.snapshot().moves]
    assert roles == [(Role.SP, Role.LP), (Role.LP, Role.SP), (Role.MIXED, Role.LP), (None, Role.MIXED)]


async def test_history_is_bounded_newest_first_with_the_figures_and_the_writers_time(
    backend: Backend,
) -> None:
    membership = await backend.connect(skew_s=-5e8)
    number = 0
    for turn in range(MOVES_KEPT + 10):
        role = Role.SP if turn % 2 else Role.LP
        moved = await assign(membership, "w1", role, expected=number, facts={"pressure_difference": turn})
        number = moved.number
    moves = membership.snapshot().moves
    assert [m.number for m in moves] == list(range(number, number - MOVES_KEPT, -1))
    assert moves[0].facts == {"pressure_difference": MOVES_KEPT + 9}
    assert moves[0].by == "controller-1"
    assert moves[0].at_time_s == moved.at_time_s < backend.clock.time_s() - 4e8
    assert (await backend.connect()).snapshot().moves == moves


async def test_an_assignment_outlives_its_worker_until_it_is_forgotten(backend: Backend) -> None:
    membership = await backend.connect()
    lease = await membership.join(worker())
    made = await assign(membership, "w1", Role.SP)
    await lease.leave()
    with pytest.raises(Conflict):
        await membership.forget("w1", expected=made.number + 1)
    await membership.forget("w1", expected=made.number)
    assert membership.snapshot().assignments == {}
    assert (await assign(membership, "w1", Role.SP)).number > made.number, "numbers are not used twice"


async def test_a_wanted_shard_is_written_beside_the_role_and_kept_by_later_moves(backend: Backend) -> None:
    membership = await backend.connect()
    await membership.join(worker())
    first = await assign(membership, "w1", Role.SP)
    away = await assign(membership, "w1", Role.SP, first.number, shard="s2", reason=MoveReason.BALANCE)
    assert (away.role, away.shard, away.reason) == (Role.SP, "s2", MoveReason.BALANCE)
    other = await assign(membership, "w1", Role.LP, away.number)
    pinned = await membership.pin("w1", True, by="ann")
    assert [given.shard for given in (other, pinned)] == ["s2", "s2"]
    with pytest.raises(WorkerPinned):
        await assign(membership, "w1", Role.LP, pinned.number, shard="s1")
    with pytest.raises(Conflict):
        await assign(membership, "w1", Role.LP, 0, shard="s1", force=True)
    with pytest.raises(ValueError, match="shard"):
        await assign(membership, "w1", Role.LP, pinned.number, shard="a/b")
    assert membership.snapshot().assignments["w1"] == pinned
    shards = [(m.from_role, m.to_role, m.from_shard, m.to_shard) for m in membership.snapshot().moves]
    assert shards == [(Role.SP, Role.LP, "", ""), (Role.SP, Role.SP, "s1", "s2"), (None, Role.SP, "", "")]
    assert (await backend.connect()).snapshot().assignments["w1"] == pinned


async def test_a_shard_is_retired_and_back_for_all(backend: Backend) -> None:
    one, two = await backend.connect(), await backend.connect()
    for _ in range(2):
        await one.retire("s1", True, by="ann")
        await backend.until(lambda: "s1" in two.snapshot().retired)
        assert two.snapshot().retired["s1"].by == "ann"
    for _ in range(2):
        await two.retire("s1", False, by="ben")
        await backend.until(lambda: one.snapshot().retired == {})
