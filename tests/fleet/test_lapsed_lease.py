"""Two schedulers and one worker, over a real etcd and real gRPC: the lease of the active one lapses, the
standby leads, and the old one comes back and drives on. It is refused by its epoch, and nobody is answered
twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest
from etcd_relay import relay_to
from etcd_server import EtcdServer
from link_rig import Wire
from membership_backends import InEtcd
from test_processes import CAPABILITIES, COST, LINK, PROFILES, read, submit, until

from engines.simulated import SimulatedModel
from service.bench.fleet_rig import Kind, Part
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Outcome
from service.fleet.link import Caller, Claim
from service.fleet.place import Place
from service.fleet.processes import FrontEndProcess, SchedulerProcess, WorkerProcess
from service.fleet.remote_runtime import RemoteSettings
from service.fleet.remote_worker import RemoteWorker, WorkerUnavailable
from service.policies import make_scheduler
from service.runtime.worker import TimedRunner


@dataclass
class Claims:
    """Who called the worker, and what it was told."""

    seen: list[tuple[Caller, Claim]] = field(default_factory=list)

    def watch(self, worker: WorkerProcess) -> None:
        fence = worker.servicer.fence
        judged = fence.claim

        def claim(caller: Caller):
            answer = judged(caller)
            self.seen.append((caller, answer[0]))
            return answer

        fence.claim = claim

    def refused(self, epoch: int) -> int:
        return sum(c.epoch == epoch and claim is Claim.STALE for c, claim in self.seen)


class Load:
    """Requests without a pause until `stop`; each is read to its end."""

    def __init__(self, front_end: FrontEndProcess) -> None:
        self._front_end = front_end
        self._reading: list[asyncio.Task] = []
        self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        for number in range(10_000):
            self._reading.append(asyncio.create_task(read(submit(self._front_end, f"r{number}", 60, 6))))
            await asyncio.sleep(0.03)

    @property
    def completed(self) -> int:
        done = [task.result()[1] for task in self._reading if task.done()]
        return sum(record.outcome is Outcome.COMPLETED for record in done)

    async def stop(self) -> Counter[Outcome]:
        """Every answer is whole, the tokens are those that the prompt gives, and the books balance."""
        self._sending.cancel()
        ended = await asyncio.gather(*self._reading)
        for tokens, record in ended:
            assert len(tokens) == record.output_tokens
            if record.outcome is Outcome.COMPLETED:
                assert len(tokens) == 6
                name = record.request.request_id
                if int(name[1:]) % 20 == 0:
                    assert tokens == (await read(submit(self._front_end, name, 60, 6)))[0]
        now = self._front_end.runtime.snapshot()
        assert now.submitted == sum(now.outcomes.values())
        assert (now.queued, now.running) == (0, 0)
        return Counter(record.outcome for _, record in ended)


def place(name: str, opened=grpc.aio.insecure_channel) -> Place:
    return Place(name, "s", "127.0.0.1:0", opened)


@asynccontextmanager
async def worker_and_front_end(etcd: InEtcd) -> AsyncIterator[tuple[WorkerProcess, FrontEndProcess]]:
    spec = InstanceSpec("w0", CAPABILITIES, PROFILES, COST.scaled(0.2))
    runner = TimedRunner(SimulatedModel(CAPABILITIES, PROFILES, COST), 0.2)
    facts = {"model": "m", "backend": "simulated", "bundle_id": ""}
    worker = WorkerProcess(place("w0"), await etcd.connect(), spec, runner, facts, LINK)
    front_end = FrontEndProcess(place("fe"), await etcd.connect(), RemoteSettings(failover_s=20.0))
    await worker.start()
    await front_end.start("127.0.0.1:1")
    try:
        yield worker, front_end
    finally:
        await front_end.close()
        await worker.close()


def scheduler(name: str, membership, opened=grpc.aio.insecure_channel) -> SchedulerProcess:
    def make():
        return make_scheduler("plaserve", SchedulerSettings())

    return SchedulerProcess(place(name, opened), membership, make, "plaserve", "simulated", link=LINK)


async def test_a_scheduler_that_was_cut_off_and_comes_back_is_refused_by_its_epoch(
    etcd: InEtcd, shared_etcd: EtcdServer
) -> None:
    """Nothing reaches or leaves it for longer than its lease; it holds requests, and drives on."""
    claims = Claims()
    async with worker_and_front_end(etcd) as (worker, front_end), relay_to(shared_etcd) as relay:
        claims.watch(worker)
        cut_off = InEtcd(shared_etcd, endpoints=(relay.endpoint,))
        async with Wire(worker.address) as wire:
            membership = await cut_off.connect(etcd.fleet)
            old = scheduler("old", membership, lambda _: grpc.aio.insecure_channel(wire.address))
            new = scheduler("new", await etcd.connect())
            await old.start()
            await until(lambda: old.gate.reign is not None and bool(old.gate.reign.instances))
            await new.start()
            load = Load(front_end)
            await until(lambda: load.completed > 5)
            reign = old.gate.reign
            relay.hold()
            wire.hold()
            await until(lambda: new.gate.reign is not None and bool(new.gate.reign.instances))
            before = load.completed
            await until(lambda: load.completed > before + 5)
            assert new.gate.reign.epoch > reign.epoch
            assert old.gate.reign is reign  # it does not know, and has tried in vain
            wire.heal()
            await until(lambda: claims.refused(reign.epoch) > 0)
            assert await asyncio.wait_for(asyncio.shield(reign.ended), 10.0)
            assert str(new.gate.reign.epoch) in reign.ended.result()
            relay.let_go()
            await until(lambda: old.gate.reign is None)

            caller = Caller("old", reign.epoch, 1_000_000, 1, shard="s")  # insists
            insistent = RemoteWorker(worker.address, caller, grpc.aio.insecure_channel, LINK)
            with pytest.raises(WorkerUnavailable, match="stale"):
                await insistent.start()
            assert insistent.stale.result() == new.gate.reign.epoch == worker.servicer.epoch
            await insistent.close()

            before = load.completed
            await until(lambda: load.completed > before + 5)
            assert set(await load.stop()) <= {Outcome.COMPLETED, Outcome.UNAVAILABLE}
            for process in (old, new):
                await process.close()
            await cut_off.close()


@pytest.mark.slow
async def test_a_scheduler_that_was_stopped_and_goes_on_drives_nobody(
    etcd: InEtcd, shared_etcd: EtcdServer, tmp_path: Path
) -> None:
    """SIGSTOP for longer than its lease: its connections stay open and nobody answers on them."""
    claims = Claims()
    environment = {
        "PLASERVE_FLEET__MEMBERSHIP": "etcd",
        "PLASERVE_FLEET__ENDPOINTS": f'["{shared_etcd.endpoint}"]',
        "PLASERVE_FLEET__NAME": etcd.fleet,
        "PLASERVE_FLEET__LEASE_TTL_S": "2",
        "PLASERVE_FLEET__CALL_TIMEOUT_S": "1",
    }
    arguments = ("--shard", "s", "--backend", "simulated")
    parts = [Part(n, Kind.SCHEDULER, arguments, tmp_path / f"{n}.log") for n in ("one", "two")]
    async with worker_and_front_end(etcd) as (worker, front_end):
        claims.watch(worker)
        try:
            for part in parts:
                await part.start(environment)
            await until(lambda: front_end.runtime.welcome is not None, 60.0)
            load = Load(front_end)
            await until(lambda: load.completed > 5)
            epoch = worker.servicer.epoch
            name = next(c.scheduler_id for c, claim in claims.seen if claim is Claim.TAKEOVER)
            pid = next(part.process.pid for part in parts if part.name == name)
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: worker.servicer.epoch > epoch, 60.0)
            before = load.completed
            await until(lambda: load.completed > before + 5)
            claims.seen.clear()
            os.kill(pid, signal.SIGCONT)
            log = next(part.log for part in parts if part.name == name)
            await until(lambda: "is over" in log.read_text())  # by its lease or by the worker, as it comes
            before = load.completed
            await until(lambda: load.completed > before + 5)
            assert worker.servicer.epoch > epoch
            assert all(claim is Claim.STALE for caller, claim in claims.seen if caller.epoch <= epoch)
            assert set(await load.stop()) <= {Outcome.COMPLETED, Outcome.UNAVAILABLE}
        finally:
            for part in parts:
                await part.stop()
