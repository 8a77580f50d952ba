"""Several shards in one event loop, over real gRPC and membership in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
from test_processes import CAPABILITIES, COST, LINK, PROFILES, SCALE, until

from engines.blocks import chain_hashes
from engines.simulated import SimulatedModel
from engines.types import EngineRequest
from service.core.reconcile import MoveReason
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Outcome, Request, Role
from service.fleet.controller import ControllerSettings, RolesStay
from service.fleet.memory import MemoryFleet
from service.fleet.place import Place
from service.fleet.processes import ControllerProcess, FrontEndProcess, SchedulerProcess, WorkerProcess
from service.fleet.remote_runtime import RemoteHandle, RemoteSettings
from service.fleet.shard_controller import ShardSettings
from service.policies import make_scheduler
from service.runtime.worker import TimedRunner


@dataclass
class Fleet:
    """Members by name; the first letter of a worker or scheduler is its shard: a1 is of shard a."""

    store: MemoryFleet = field(default_factory=MemoryFleet)
    workers: dict[str, WorkerProcess] = field(default_factory=dict)
    schedulers: dict[str, SchedulerProcess] = field(default_factory=dict)
    front_ends: dict[str, FrontEndProcess] = field(default_factory=dict)
    controller: ControllerProcess | None = None
    memberships: list = field(default_factory=list)

    async def membership(self):
        made = self.store.membership()
        await made.open()
        self.memberships.append(made)
        return made

    def place(self, name: str) -> Place:
        return Place(name, name[0], "127.0.0.1:0", grpc.aio.insecure_channel)

    async def worker(self, name: str, drain_s: float = 30.0) -> WorkerProcess:
        spec = InstanceSpec(name, CAPABILITIES, PROFILES, COST.scaled(SCALE))
        runner = TimedRunner(SimulatedModel(CAPABILITIES, PROFILES, COST), SCALE)
        facts = {"model": "m", "backend": "simulated", "bundle_id": ""}
        made = WorkerProcess(
            self.place(name), await self.membership(), spec, runner, facts, LINK, drain_s=drain_s
        )
        await made.start()
        self.workers[name] = made
        return made

    async def scheduler(self, name: str, **knobs) -> SchedulerProcess:
        settings = SchedulerSettings(**knobs)
        made = SchedulerProcess(
            self.place(name),
            await self.membership(),
            lambda: make_scheduler("plaserve", settings),
            "plaserve",
            "simulated",
            link=LINK,
        )
        await made.start()
        self.schedulers[name] = made
        return made

    async def front_end(self, name: str, shards: Sequence[str]) -> FrontEndProcess:
        settings = RemoteSettings(failover_s=5.0, tokens_s=2.0)
        made = FrontEndProcess(self.place(name), await self.membership(), settings, shards=shards)
        await made.start("127.0.0.1:1")
        self.front_ends[name] = made
        return made

    async def control(self, shards: ShardSettings | None = None) -> None:
        settings = ControllerSettings(shards=shards or ShardSettings())
        self.controller = ControllerProcess(
            self.place("c"), await self.membership(), Quick, SchedulerSettings(), settings
        )
        await self.controller.start()

    @property
    def snapshot(self):
        return self.memberships[0].snapshot()

    def used(self) -> dict[str, set[str]]:
        """Workers in use by the active schedulers, by shard."""
        found: dict[str, set[str]] = {}
        for name, scheduler in self.schedulers.items():
            reign = scheduler.gate.reign
            if reign is not None:
                found.setdefault(name[0], set()).update(reign.instances)
        return {shard: names for shard, names in found.items() if names}

    async def want(self, worker: str, shard: str, reason: MoveReason = MoveReason.BALANCE) -> None:
        given = self.snapshot.assignments.get(worker)
        await self.memberships[0].assign(
            worker, Role.MIXED, expected=given.number if given else 0, reason=reason, by="me", shard=shard
        )


class Quick(RolesStay):
    period_s = 0.05


@asynccontextmanager
async def fleet(**workers: int) -> AsyncIterator[Fleet]:
    """fleet(a=2, b=1): two shards with so many workers, a scheduler each, one front end for all."""
    made = Fleet()
    try:
        for shard, count in workers.items():
            for n in range(count):
                await made.worker(f"{shard}{n}")
            await made.scheduler(f"{shard}-s0")
        front_end = await made.front_end("fe", ("*",))
        await until(lambda: sum(map(len, made.used().values())) == sum(workers.values()))
        await until(lambda: set(front_end.runtime.uplinks.shards) == {s for s, n in workers.items()})
        await until(lambda: len(front_end.runtime.uplinks.down) == sum(not n for n in workers.values()))
        yield made
    finally:
        for group in (made.front_ends, made.schedulers, made.workers):
            for process in group.values():
                await process.close()
        if made.controller is not None:
            await made.controller.close()


def submit(
    front_end: FrontEndProcess, name: str, tokens: int = 60, answer: int = 4, session: str = ""
) -> RemoteHandle:
    ids = tuple((sum(name.encode()) * 31 + position) % 40_000 for position in range(tokens))
    now_s = asyncio.get_running_loop().time()
    hashes = chain_hashes(ids, CAPABILITIES.block_tokens)
    request = Request(name, tokens, answer, now_s, hashes, session=session)
    return front_end.submit(request, EngineRequest(name, ids, answer))


def answered(ended) -> None:
    """Each whole: as many tokens as were asked for, and once."""
    for tokens, record in ended:
        assert record.outcome is Outcome.COMPLETED, record
        assert len(tokens) == record.output_tokens == record.request.max_new_tokens


def counts(made: Fleet) -> dict[str, int]:
    """Requests that each shard's present scheduler was given."""
    return {
        name[0]: s.gate.reign.pump.snapshot().submitted
        for name, s in made.schedulers.items()
        if s.gate.reign is not None
    }


def balanced(made: Fleet) -> None:
    for front_end in made.front_ends.values():
        now = front_end.runtime.snapshot()
        assert now.submitted == sum(now.outcomes.values()) + now.queued + now.running
        assert (
            all(u.load == 0 for u in front_end.runtime.uplinks._uplinks.values()) or now.queued + now.running
        )
    for scheduler in made.schedulers.values():
        if scheduler.gate.reign is not None:
            now = scheduler.gate.reign.pump.snapshot()
            assert now.submitted == sum(now.outcomes.values()) + now.queued + now.running
