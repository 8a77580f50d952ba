"""A whole fleet in one event loop, over real gRPC and membership in memory: requests, moves, deaths."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from zlib import crc32

import grpc.aio
import pytest

from engines.blocks import chain_hashes
from engines.simulated import SimulatedModel
from engines.simulated_settings import small_cpu_like
from engines.types import EngineRequest
from protos.plaserve.v1 import fleet_pb2 as pb
from protos.plaserve.v1.fleet_pb2_grpc import FleetServiceStub
from service.core.progress import HangRule
from service.core.reconcile import Controller, FleetView, RoleMove
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Outcome, Request
from service.fleet.health import LinkSettings
from service.fleet.membership import FleetSnapshot
from service.fleet.memory import MemoryFleet
from service.fleet.processes import (
    ControllerProcess,
    FrontEndProcess,
    Place,
    SchedulerProcess,
    WorkerProcess,
)
from service.fleet.reign import Reign
from service.fleet.remote_runtime import RemoteHandle, RemoteSettings
from service.fleet.shard_move import ShardMover
from service.policies import make_scheduler
from service.runtime.contract import Ended, RequestRecord
from service.runtime.worker import TimedRunner

CAPABILITIES, PROFILES, COST = small_cpu_like()
SCALE = 0.05
LINK = LinkSettings(heartbeat_s=0.1, silence_s=0.5, grace_s=0.6, orphan_s=2.0, hang=HangRule(hang_s_min=5.0))


class Wants:
    """A pure controller that wants what it is told."""

    period_s = 0.05

    def __init__(self) -> None:
        self.moves: tuple[RoleMove, ...] = ()

    def step(self, fleet: FleetView, now_s: float) -> tuple[RoleMove, ...]:
        return self.moves


@dataclass
class Fleet:
    store: MemoryFleet = field(default_factory=MemoryFleet)
    workers: dict[str, WorkerProcess] = field(default_factory=dict)
    schedulers: dict[str, SchedulerProcess] = field(default_factory=dict)
    front_ends: dict[str, FrontEndProcess] = field(default_factory=dict)
    wants: Wants = field(default_factory=Wants)
    controller: ControllerProcess | None = None

    def place(self, name: str) -> Place:
        return Place(name, "s", "127.0.0.1:0", grpc.aio.insecure_channel)

    async def membership(self):
        made = self.store.membership()
        await made.open()
        return made

    async def worker(self, name: str, scale: float = SCALE) -> WorkerProcess:
        spec = InstanceSpec(name, CAPABILITIES, PROFILES, COST.scaled(scale))
        runner = TimedRunner(SimulatedModel(CAPABILITIES, PROFILES, COST), scale)
        facts = {"model": "m", "backend": "simulated", "bundle_id": ""}
        made = WorkerProcess(self.place(name), await self.membership(), spec, runner, facts, LINK)
        await made.start()
        self.workers[name] = made
        return made

    async def scheduler(self, name: str) -> SchedulerProcess:
        made = SchedulerProcess(
            self.place(name),
            await self.membership(),
            lambda: make_scheduler("plaserve", SchedulerSettings()),
            "plaserve",
            "simulated",
            link=LINK,
        )
        await made.start()
        self.schedulers[name] = made
        return made

    async def front_end(self, name: str) -> FrontEndProcess:
        settings = RemoteSettings(failover_s=5.0, tokens_s=2.0)
        made = FrontEndProcess(self.place(name), await self.membership(), settings)
        await made.start("127.0.0.1:1")
        self.front_ends[name] = made
        return made

    @property
    def active(self) -> SchedulerProcess:
        (one,) = [s for s in self.schedulers.values() if s.gate.reign is not None]
        return one

    def used(self) -> set[str]:
        reigns = [s.gate.reign for s in self.schedulers.values() if s.gate.reign is not None]
        return {name for reign in reigns for name in reign.instances}


async def until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not what():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)


@asynccontextmanager
async def fleet(workers: int = 3, schedulers: int = 2, front_ends: int = 2) -> AsyncIterator[Fleet]:
    made = Fleet()
    for n in range(workers):
        await made.worker(f"w{n}")
    for n in range(schedulers):
        await made.scheduler(f"sched{n}")
    for n in range(front_ends):
        await made.front_end(f"fe{n}")

    def make() -> Controller:
        return made.wants

    made.controller = ControllerProcess(made.place("c"), await made.membership(), make, SchedulerSettings())
    await made.controller.start()
    await until(lambda: len(made.used()) == workers)
    await until(lambda: all(f.runtime.welcome is not None for f in made.front_ends.values()))
    try:
        yield made
    finally:
        for group in (made.front_ends, made.schedulers, made.workers):
            for process in group.values():
                await process.close()
        await made.controller.close()


def submit(front_end: FrontEndProcess, name: str, tokens: int = 60, answer: int = 6) -> RemoteHandle:
    ids = tuple((crc32(name.encode()) + position) % 40_000 for position in range(tokens))
    now_s = asyncio.get_running_loop().time()
    request = Request(name, tokens, answer, now_s, chain_hashes(ids, CAPABILITIES.block_tokens))
    return front_end.submit(request, EngineRequest(name, ids, answer))


async def read(handle: RemoteHandle) -> tuple[list[int], RequestRecord]:
    tokens: list[int] = []
    async with asyncio.timeout(40):
        async for item in handle:
            if isinstance(item, Ended):
                return tokens, item.record
            tokens.append(item.token_id)
    raise AssertionError("a handle ends with Ended")


async def ask_to_drain(made: Fleet, name: str, timeout_s: float) -> pb.DrainInstanceResponse:
    """By way of the controller, as `plaserve fleet drain` does it."""
    assert made.controller is not None
    async with grpc.aio.insecure_channel(made.controller.address) as channel:
        stub = FleetServiceStub(channel)  # type: ignore[no-untyped-call]
        asked = pb.DrainInstanceRequest(instance_id=name, by="me")
        asked.timeout.FromNanoseconds(round(timeout_s * 1e9))
        return await stub.DrainInstance(asked)


def books(made: Fleet) -> None:
    for front_end in made.front_ends.values():
        now = front_end.runtime.snapshot()
        assert now.submitted == sum(now.outcomes.values()) + now.queued + now.running


async def test_requests_of_two_front_ends_are_spread_and_answered() -> None:
    async with fleet() as made:
        handles = [
            submit(front_end, f"{name}-r{n}", 40 + 30 * n, n % 5 + 1)
            for n in range(20)
            for name, front_end in made.front_ends.items()
        ]
        ended = await asyncio.gather(*map(read, handles))
        assert Counter(record.outcome for _, record in ended) == {Outcome.COMPLETED: 40}
        for (tokens, record), handle in zip(ended, handles, strict=True):
            assert len(tokens) == handle.record.request.max_new_tokens == record.output_tokens
        passes = {name: worker.servicer.engine.held for name, worker in made.workers.items()}
        assert passes == {"w0": (), "w1": (), "w2": ()}  # nothing is left anywhere
        books(made)


async def test_the_same_prompt_gives_the_same_answer_wherever_it_runs() -> None:
    async with fleet(workers=2) as made:
        front_end = made.front_ends["fe0"]
        first, _ = await read(submit(front_end, "same", 90, 8))
        again = await asyncio.gather(*(read(submit(front_end, "same", 90, 8)) for _ in range(1)))
        assert again[0][0] == first


async def test_a_worker_that_dies_costs_only_what_it_had_begun_to_answer() -> None:
    async with fleet() as made:
        front_end = made.front_ends["fe0"]
        handles = [submit(front_end, f"r{n}", 300, 20) for n in range(12)]
        await until(lambda: any(worker.servicer.engine.held for worker in made.workers.values()))
        name = next(name for name, worker in made.workers.items() if worker.servicer.engine.held)
        dead = made.workers.pop(name)
        await dead._port.stop(0)
        await dead.servicer.close()  # its lease stays: nobody said goodbye
        ended = await asyncio.gather(*map(read, handles))
        outcomes = Counter(record.outcome for _, record in ended)
        assert set(outcomes) <= {Outcome.COMPLETED, Outcome.UNAVAILABLE}
        assert outcomes[Outcome.COMPLETED] >= 4
        for tokens, record in ended:
            assert len(tokens) == record.output_tokens
            if record.outcome is Outcome.COMPLETED:
                assert len(tokens) == 20
        books(made)
        reign = made.active.gate.reign
        assert reign is not None
        assert reign.pump.snapshot().outcomes == outcomes  # the scheduler books what clients are told
        await made.worker("late")
        await until(lambda: "late" in made.used())
        assert (await read(submit(front_end, "after")))[1].outcome is Outcome.COMPLETED
        await dead._port.stop()


async def test_a_standby_takes_over_and_unseen_requests_go_on() -> None:
    async with fleet() as made:
        front_end = made.front_ends["fe1"]
        assert (await read(submit(front_end, "before")))[1].outcome is Outcome.COMPLETED
        old = made.active
        epoch = old.gate.reign.epoch
        handles = [submit(front_end, f"r{n}", 800, 3) for n in range(10)]
        await asyncio.sleep(0.02)
        del made.schedulers[old._place.member_id]
        await old.close()
        ended = await asyncio.gather(*map(read, handles))
        outcomes = Counter(record.outcome for _, record in ended)
        assert set(outcomes) <= {Outcome.COMPLETED, Outcome.UNAVAILABLE}
        assert outcomes[Outcome.COMPLETED] >= 5
        assert made.active.gate.reign.epoch > epoch
        assert all(worker.servicer.epoch > epoch for worker in made.workers.values())
        assert (await read(submit(front_end, "after")))[1].outcome is Outcome.COMPLETED
        books(made)


async def test_a_scheduler_that_can_not_make_a_core_says_so_and_ends() -> None:
    """Its process ends then, for a supervisor to start a fresh one."""

    def broken() -> PrefillScheduler:
        raise RuntimeError("injected")

    made = Fleet()
    membership = await made.membership()
    process = SchedulerProcess(made.place("s0"), membership, broken, "plaserve", "simulated", link=LINK)
    await process.start()
    try:
        assert await asyncio.wait_for(process.failed, 20) == "RuntimeError: injected"
        assert not process.works
    finally:
        await process.close()


@pytest.mark.parametrize(
    ("of", "method", "make"),
    [
        (FrontEndProcess, "_follow_workers", Fleet.front_end),
        (SchedulerProcess, "_is_over", Fleet.scheduler),
        (ShardMover, "_look", Fleet.worker),
    ],
)
async def test_a_task_that_fails_beside_the_main_one_ends_its_process(monkeypatch, of, method, make) -> None:
    """Else it would follow no shard, no role or no retirement, and nobody would know."""

    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(of, method, broken)
    process = await make(Fleet(), "p")
    try:
        assert await asyncio.wait_for(process.failed, 20) == "RuntimeError: injected"
    finally:
        await process.close()


async def test_a_reign_that_can_not_follow_its_workers_ends_and_another_begins(monkeypatch) -> None:
    reconcile, calls = Reign._reconcile, []

    def broken_once(reign: Reign, snapshot: FleetSnapshot) -> None:
        calls.append(reign.epoch)
        if len(calls) == 2:
            raise RuntimeError("injected")
        reconcile(reign, snapshot)

    monkeypatch.setattr(Reign, "_reconcile", broken_once)
    made = Fleet()
    scheduler = await made.scheduler("p")
    await until(lambda: bool(calls))
    worker = await made.worker("w")
    try:
        await until(lambda: scheduler.reigns == 2 and made.used() == {"w"})
    finally:
        await worker.close()
        await scheduler.close()
