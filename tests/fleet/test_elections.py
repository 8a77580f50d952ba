"""Elections and what ends with them: the contract of membership, over both backends."""

from __future__ import annotations

import asyncio

import pytest
from membership_backends import TIMES, Backend, assign, worker

from service.core.types import Role
from service.fleet.membership import Fenced, Leader, LeaseState


async def test_one_leads_at_a_time_and_epochs_grow_from_leader_to_leader(backend: Backend) -> None:
    memberships = [await backend.connect() for _ in range(3)]
    watcher = await backend.connect()
    leading: list[str] = []
    epochs: list[int] = []

    async def contend(index: int) -> None:
        for _ in range(3):
            lead = await memberships[index].campaign("shard-1", f"c{index}")
            assert not leading, "two lead at once"
            leading.append(f"c{index}")
            epochs.append(lead.epoch)
            assert memberships[index].leader("shard-1") == lead.leader
            await asyncio.sleep(0)
            leading.clear()
            await lead.resign()

    seen: list[Leader | None] = []

    async def observe() -> None:
        async for leader in watcher.observe("shard-1"):
            seen.extend([leader])

    observer = asyncio.create_task(observe())
    contenders = [asyncio.create_task(contend(i)) for i in range(3)]
    await backend.until(lambda: all(c.done() for c in contenders))
    for contender in contenders:
        contender.result()
    assert len(epochs) == 9
    assert epochs == sorted(set(epochs))
    await backend.until(lambda: seen and seen[-1] is None and len(seen) > 1)
    observed = [leader.epoch for leader in seen if leader is not None]
    assert observed == sorted(set(observed))
    assert set(observed) <= set(epochs)
    observer.cancel()


async def test_elections_of_other_names_do_not_touch_each_other(backend: Backend) -> None:
    membership = await backend.connect()
    one = await membership.campaign("shard-1", "a")
    two = await membership.campaign("shard-2", "a")
    assert set(membership.snapshot().leaders) == {"shard-1", "shard-2"}
    await one.resign()
    assert membership.leader("shard-2") == two.leader
    assert two.state is LeaseState.LIVE


async def test_a_standby_takes_over_from_a_dead_leader_with_a_higher_epoch_that_fences(
    backend: Backend,
) -> None:
    dying, standby = await backend.connect(), await backend.connect()
    old = await dying.campaign("controller", "a")
    await assign(dying, "w1", Role.SP, fence=old)
    waiting = asyncio.create_task(standby.campaign("controller", "b"))
    await backend.pass_time(0.4 * TIMES.ttl_s)
    assert not waiting.done(), "a lead that is renewed is not taken"
    await old.abandon()  # stops renewing; its connection lives, as after a long pause of the process
    await backend.until(waiting.done)
    new = waiting.result()
    assert new.epoch > old.epoch
    number = standby.snapshot().assignments["w1"].number
    with pytest.raises(Fenced):
        await assign(dying, "w1", Role.LP, expected=number, fence=old)
    assert (await assign(standby, "w1", Role.LP, expected=number, fence=new)).role is Role.LP
    with pytest.raises(Fenced):
        await dying.pin("w1", True, by="a", fence=old)
    with pytest.raises(Fenced):
        await dying.forget("w1", expected=number + 1, fence=old)


async def test_a_leader_learns_that_it_lost_and_stays_lost(backend: Backend) -> None:
    first, second = await backend.connect(), await backend.connect()
    told: list[str] = []
    lead = await first.campaign("controller", "a", on_lost=told.append)
    waiting = asyncio.create_task(lead.lost())
    await backend.pass_time(0.0)
    await second._store.revoke(lead._keeper.lease_id)
    await backend.until(waiting.done)
    assert told == [waiting.result()] == [await lead.lost()]
    assert lead.state is LeaseState.LOST
    again = await second.campaign("controller", "b")
    assert again.epoch > lead.epoch
    await lead.resign()
    await backend.pass_time(0.1)
    assert second.leader("controller") == again.leader


async def test_a_campaign_that_is_given_up_leaves_nothing(backend: Backend) -> None:
    first, second = await backend.connect(), await backend.connect()
    lead = await first.campaign("controller", "a")
    waiting = asyncio.create_task(second.campaign("controller", "b"))
    await backend.pass_time(0.1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await lead.resign()
    await backend.pass_time(0.3)
    assert first.leader("controller") is None


async def test_close_gives_up_all_that_is_held(backend: Backend) -> None:
    closing, watcher = await backend.connect(), await backend.connect()
    await closing.join(worker())
    await closing.campaign("controller", "a")
    await backend.until(lambda: watcher.snapshot().members and watcher.snapshot().leaders)
    await closing.close()
    await backend.until(lambda: not watcher.snapshot().members and not watcher.snapshot().leaders)


async def test_clocks_a_year_apart_change_nothing(backend: Backend) -> None:
    year_s = 3.2e7
    ahead, behind = await backend.connect(skew_s=year_s), await backend.connect(skew_s=-year_s)
    lease = await ahead.join(worker("ahead"))
    await behind.join(worker("behind"))
    made = await assign(ahead, "w1", Role.SP)
    await backend.until(lambda: "w1" in behind.snapshot().assignments)
    later = await assign(behind, "w1", Role.LP, expected=made.number)
    assert later.number > made.number
    assert later.at_time_s < made.at_time_s - year_s
    assert [m.number for m in behind.snapshot().moves] == [later.number, made.number]
    old = await ahead.campaign("controller", "ahead")
    waiting = asyncio.create_task(behind.campaign("controller", "behind"))
    await backend.pass_time(0.4 * TIMES.ttl_s)
    assert not waiting.done()
    await old.resign()
    await backend.until(waiting.done)
    assert waiting.result().epoch > old.epoch
    assert lease.lapses == 0
    assert set(ahead.snapshot().members) == {"ahead", "behind"}
