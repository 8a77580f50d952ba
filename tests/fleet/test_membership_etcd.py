"""What only a real etcd does: it dies, restarts, stops, compacts, is slow, asks for TLS and passwords.

Between membership and etcd stands a TCP relay where one connection is to be cut and not the service.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from aetcd import rpc
from etcd_relay import Relay, relay_to
from etcd_server import MISSING, EtcdServer, find_etcd, free_ports, running_cluster
from membership_backends import TIMES, InEtcd

from service.core.reconcile import MoveReason
from service.core.types import Role
from service.fleet.etcd import EtcdOptions, etcd_membership
from service.fleet.membership import (
    Fenced,
    LeaseState,
    Member,
    MemberKind,
    MembershipUnavailable,
)
from service.fleet.stored import StoreMembership

ROOT = Path(__file__).parents[2]
WORKER = Member("w1", MemberKind.WORKER, "10.0.0.1:9000")
MEMBER_PROCESS = """
import asyncio, sys
from service.fleet.etcd import EtcdOptions, etcd_membership
from service.fleet.membership import Member, MemberKind
async def main():
    membership = etcd_membership(EtcdOptions((sys.argv[1],)), fleet=sys.argv[2])
    await membership.open()
    await membership.join(Member("child", MemberKind.WORKER, "a:1"), ttl_s=1.0)
    lead = await membership.campaign("shard", "child", ttl_s=1.0)
    print(lead.epoch, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def through(relay: Relay, backend: InEtcd) -> StoreMembership:
    """A connection to the backend's fleet by way of the relay."""
    membership = etcd_membership(
        replace(backend.options, endpoints=(relay.endpoint,)), fleet=backend.fleet, times=TIMES
    )
    await membership.open()
    backend.opened.append(membership)
    return membership


async def insistently(write: Callable[[], Awaitable[object]]) -> None:
    """Again while the service is away, as connections take a moment to come back."""
    for _ in range(100):
        try:
            await write()
            return
        except MembershipUnavailable:
            await asyncio.sleep(0.05)
    raise AssertionError("the service stays away")


async def compact(backend: InEtcd, revision: int) -> None:
    async with grpc.aio.insecure_channel(backend.options.endpoints[0]) as channel:
        await rpc.KVStub(channel).Compact(rpc.CompactionRequest(revision=revision, physical=True))


# --- processes that die ----------------------------------------------


async def test_a_killed_process_is_no_member_and_no_leader_after_its_lease(etcd: InEtcd) -> None:
    watcher = await etcd.connect()
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        MEMBER_PROCESS,
        etcd.options.endpoints[0],
        etcd.fleet,
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        epoch = int(await asyncio.wait_for(child.stdout.readline(), 20.0))
        await etcd.until(lambda: watcher.snapshot().leaders)
        assert watcher.leader("shard").epoch == epoch
        assert set(watcher.snapshot().members) == {"child"}
        os.kill(child.pid, signal.SIGKILL)
        await etcd.until(lambda: not watcher.snapshot().members and not watcher.snapshot().leaders)
        assert (await watcher.campaign("shard", "heir")).epoch > epoch
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def test_a_connection_that_reaches_nobody_any_more_is_replaced(
    etcd: InEtcd, shared_etcd: EtcdServer
) -> None:
    """As after a cut: TCP would send again only much later, and where a firewall forgot it, never."""
    async with relay_to(shared_etcd) as relay:
        options = replace(etcd.options, endpoints=(relay.endpoint,), alive_s=1.0, silence_s=1.0)
        membership = etcd_membership(options, fleet=etcd.fleet, times=TIMES)
        await membership.open()
        etcd.opened.append(membership)
        lease = await membership.join(WORKER)
        relay.swallow()
        await insistently(lambda: lease.update(facts={"said": "after"}))
        watcher = await etcd.connect()
        await etcd.until(lambda: watcher.snapshot().members["w1"].facts == {"said": "after"})


async def test_a_paused_leader_is_fenced_when_it_comes_back(etcd: InEtcd, shared_etcd: EtcdServer) -> None:
    """Its network is silent for longer than its lease: it doubts, the other leads, its writes fail."""
    async with relay_to(shared_etcd) as relay:
        first, second = await through(relay, etcd), await etcd.connect()
        old = await first.campaign("controller", "a")
        made = await first.assign("w1", Role.SP, expected=0, reason=MoveReason.PRESSURE, by="a", fence=old)
        waiting = asyncio.create_task(second.campaign("controller", "b"))
        relay.hold()
        await etcd.until(waiting.done)
        new = waiting.result()
        assert new.epoch > old.epoch
        assert old.state is LeaseState.DOUBTFUL, "it can't know, and must have begun to doubt before"
        relay.let_go()
        with pytest.raises(Fenced):
            await insistently(
                lambda: first.assign(
                    "w1", Role.LP, expected=made.number, reason=MoveReason.PRESSURE, by="a", fence=old
                )
            )
        await asyncio.wait_for(old.lost(), 10.0)
        assert old.state is LeaseState.LOST
        assert new.state is LeaseState.LIVE


# --- etcd away ----------------------------------------------


async def test_a_restart_of_etcd_loses_no_change_and_no_member(own: InEtcd, own_etcd: EtcdServer) -> None:
    membership, writer = await own.connect(), await own.connect()
    lease = await membership.join(WORKER, ttl_s=20.0)
    lead = await membership.campaign("controller", "a", ttl_s=20.0)
    await own.until(lambda: writer.snapshot().members)
    own_etcd.stop()
    await own.until(lambda: membership.snapshot().stale)
    await own.until(lambda: membership.snapshot().age_s > 0.3)
    assert membership.snapshot().members["w1"] == lease.member, "the last known state is still served"
    with pytest.raises(MembershipUnavailable):
        await membership.assign("w1", Role.SP, expected=0, reason=MoveReason.PRESSURE, by="a")
    with pytest.raises(MembershipUnavailable):
        await membership.join(replace(WORKER, member_id="w2"))
    with pytest.raises(MembershipUnavailable):
        await lease.update(facts={"written": "while away"})
    own_etcd.start()
    await own.until(lambda: not membership.snapshot().stale and not writer.snapshot().stale)
    await writer.assign("w1", Role.SP, expected=0, reason=MoveReason.PRESSURE, by="b")
    await own.until(lambda: membership.snapshot().assignments)
    await lease.update(address="10.0.0.3:9000")
    await own.until(lambda: writer.snapshot().members["w1"].address == "10.0.0.3:9000")
    assert writer.snapshot().members["w1"].facts == {"written": "while away"}
    assert membership.mirror.fresh_reads == writer.mirror.fresh_reads == 1, "resumed, not read again"
    assert membership.mirror.resumes > 1
    assert lease.lapses == 0
    assert lead.state is LeaseState.LIVE


async def test_a_stopped_etcd_is_noticed_and_all_is_well_after_it_goes_on(
    own: InEtcd, own_etcd: EtcdServer
) -> None:
    membership, watcher = await own.connect(), await own.connect()
    lease = await membership.join(WORKER)
    seen = []

    async def watch() -> None:
        async for snapshot in watcher.watch():
            seen.extend([snapshot.stale])

    watching = asyncio.create_task(watch())
    await own.until(lambda: seen)
    own_etcd.pause()
    try:
        await own.until(lambda: watcher.snapshot().stale and membership.snapshot().stale)
        assert set(watcher.snapshot().members) <= {"w1"}
        with pytest.raises(MembershipUnavailable):
            await membership.assign("w1", Role.SP, expected=0, reason=MoveReason.PRESSURE, by="a")
        await own.until(lambda: lease.state is LeaseState.DOUBTFUL)
        assert lease.lapses == 0, "nobody said that it is lost"
    finally:
        own_etcd.resume()
    await own.until(lambda: not watcher.snapshot().stale and lease.state is LeaseState.LIVE)
    # Whether etcd had let the lease lapse or not, the member is there.
    await own.until(lambda: watcher.snapshot().members.get("w1") == lease.member)
    await own.until(lambda: seen[-1] is False)
    assert True in seen, "a watch tells when it turns stale, and when it is fresh again"
    watching.cancel()


async def test_an_etcd_that_lost_its_data_is_read_afresh_and_joined_again(
    own: InEtcd, own_etcd: EtcdServer, tmp_path: Path
) -> None:
    membership, watcher = await own.connect(), await own.connect()
    lease = await membership.join(WORKER)
    for number in range(5):
        await lease.update(facts={"n": number})
    own_etcd.stop()
    shutil.rmtree(tmp_path / "etcd" / "data")
    own_etcd.start()
    await own.until(lambda: lease.lapses == 1 and lease.state is LeaseState.LIVE)
    await own.until(lambda: watcher.snapshot().members.get("w1") == lease.member)
    assert watcher.snapshot().members["w1"].facts == {"n": 4}
    assert watcher.mirror.fresh_reads > 1


async def test_changes_missed_and_compacted_are_made_up_by_a_fresh_read(
    etcd: InEtcd, shared_etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with relay_to(shared_etcd) as relay:
        reader, writer = await through(relay, etcd), await etcd.connect()
        gone = await writer.join(replace(WORKER, member_id="gone"))
        stays = await writer.join(WORKER)
        await etcd.until(lambda: len(reader.snapshot().members) == 2)
        await relay.cut()
        await gone.leave()
        for number in range(5):
            await stays.update(facts={"n": number})
        await compact(etcd, writer.snapshot().revision)
        await relay.open()
        await etcd.until(lambda: not reader.snapshot().stale)
        await etcd.until(lambda: reader.snapshot().members == writer.snapshot().members)
        assert set(reader.snapshot().members) == {"w1"}
        assert reader.mirror.fresh_reads == 2
        assert "following failed" not in caplog.text
        await stays.update(facts={"n": "after"})
        await etcd.until(lambda: reader.snapshot().members["w1"].facts == {"n": "after"})


async def test_changes_missed_and_kept_are_made_up_without_a_fresh_read(
    etcd: InEtcd, shared_etcd: EtcdServer
) -> None:
    async with relay_to(shared_etcd) as relay:
        reader, writer = await through(relay, etcd), await etcd.connect()
        lease = await writer.join(WORKER)
        await etcd.until(lambda: reader.snapshot().members)
        await relay.cut()
        number = 0
        for turn in range(5):
            role = Role.LP if turn % 2 else Role.SP
            made = await writer.assign("w1", role, expected=number, reason=MoveReason.PRESSURE, by="a")
            number = made.number
        await lease.leave()
        await relay.open()
        await etcd.until(lambda: not reader.snapshot().members)
        assert reader.snapshot().assignments == writer.snapshot().assignments
        assert reader.snapshot().moves == writer.snapshot().moves
        assert len(reader.snapshot().moves) == 5
        assert reader.mirror.fresh_reads == 1


async def test_a_slow_etcd_is_waited_for_and_one_that_is_too_slow_is_away(
    etcd: InEtcd, shared_etcd: EtcdServer
) -> None:
    async with relay_to(shared_etcd) as relay:
        membership = await through(relay, etcd)
        lease = await membership.join(WORKER, ttl_s=5.0)
        relay.delay_s = 0.1
        await lease.update(facts={"slow": True})
        assert not membership.snapshot().stale
        relay.delay_s = 1.5  # a call may take 1 s
        with pytest.raises(MembershipUnavailable):
            await lease.update(facts={"slow": "too"})
        await etcd.until(lambda: membership.snapshot().stale)
        relay.delay_s = 0.0
        await etcd.until(lambda: not membership.snapshot().stale)
        watcher = await etcd.connect()
        await etcd.until(lambda: watcher.snapshot().members["w1"].facts == {"slow": "too"})
        assert lease.lapses == 0


async def test_opening_without_an_etcd_fails_in_the_set_time(shared_etcd: EtcdServer) -> None:
    options = EtcdOptions((f"127.0.0.1:{free_ports(1)[0]}",))
    membership = etcd_membership(options, times=replace(TIMES, open_timeout_s=0.5))
    with pytest.raises(MembershipUnavailable, match="UNAVAILABLE"):
        await membership.open()


async def test_of_several_endpoints_one_that_lives_is_found(etcd: InEtcd, shared_etcd: EtcdServer) -> None:
    async with relay_to(shared_etcd) as relay:
        dead = f"127.0.0.1:{free_ports(1)[0]}"
        options = replace(etcd.options, endpoints=(dead, relay.endpoint, shared_etcd.endpoint))
        membership = etcd_membership(options, fleet=etcd.fleet, times=TIMES)
        await membership.open()
        etcd.opened.append(membership)
        lease = await membership.join(WORKER, ttl_s=5.0)
        await relay.cut()
        await etcd.until(lambda: not membership.snapshot().stale and membership.mirror.resumes > 1)
        await insistently(lambda: lease.update(facts={"endpoint": "another"}))
        assert lease.lapses == 0


async def test_a_cluster_survives_a_member_and_without_a_majority_is_away(tmp_path: Path) -> None:
    if find_etcd() is None:
        pytest.skip(MISSING)
    with running_cluster(tmp_path) as servers:
        backend = InEtcd(servers[0])
        backend.options = replace(backend.options, endpoints=tuple(s.endpoint for s in servers))
        membership = await backend.connect()
        backend.options = replace(backend.options, endpoints=(servers[2].endpoint,))
        other = await backend.connect()
        lease = await membership.join(WORKER, ttl_s=20.0)
        lead = await membership.campaign("controller", "a", ttl_s=20.0)
        servers[0].stop()
        await insistently(lambda: lease.update(facts={"members": 2}))
        await backend.until(lambda: other.snapshot().members["w1"].facts == {"members": 2})
        servers[1].pause()
        await backend.until(lambda: membership.snapshot().stale and other.snapshot().stale)
        await backend.until(lambda: other.snapshot().age_s > 1.2)  # its server lives, but without a leader
        with pytest.raises(MembershipUnavailable):
            await lease.update(facts={"members": 1})
        servers[1].resume()
        await backend.until(lambda: not membership.snapshot().stale and not other.snapshot().stale)
        await insistently(lambda: lease.update(facts={"members": "2 again"}))
        await backend.until(lambda: other.snapshot().members["w1"].facts == {"members": "2 again"})
        assert lease.lapses == 0
        assert lead.state is LeaseState.LIVE
        assert membership.mirror.fresh_reads == 1
        await backend.close()
