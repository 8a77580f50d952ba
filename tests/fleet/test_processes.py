"""A whole fleet in one event loop, over real gRPC and membership in memory: requests, moves, deaths."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from zlib import crc32

import grpc.aio

from engines.blocks import chain_hashes
from engines.simulated import SimulatedModel
from engines.simulated_settings import small_cpu_like
from engines.types import EngineRequest
from protos.plaserve.v1 import fleet_pb2 as pb
from protos.plaserve.v1.fleet_pb2_grpc import FleetServiceStub
from service.core.progress import HangRule
from service.core.reconcile import Controller, FleetView, MoveReason, RoleMove
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Outcome, Request, Role
from service.fleet.health import LinkSettings
from service.fleet.memory import MemoryFleet
from service.fleet.processes import (
    ControllerProcess,
    FrontEndProcess,
    Place,
    SchedulerProcess,
    WorkerProcess,
)
from service.fleet.remote_runtime import RemoteHandle, RemoteSettings
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


async def test_a_role_is_carried_out_reported_and_known_to_the_core() -> None:
    async with fleet() as made:
        made.wants.moves = (RoleMove("w1", Role.SP, MoveReason.PRESSURE, 0.8, 0.2),)
        await until(lambda: made.active.gate.reign.scheduler.instances["w1"].role is Role.SP)
        snapshot = made.workers["w1"]._membership.snapshot()
        assert snapshot.members["w1"].report.role is Role.SP
        assert len(snapshot.moves) == 1
        made.wants.moves = ()
        assert (await read(submit(made.front_ends["fe0"], "r")))[1].outcome is Outcome.COMPLETED


async def test_a_worker_that_says_goodbye_is_missed_by_nobody() -> None:
    async with fleet() as made:
        leaving = made.workers.pop("w2")
        await leaving.close()
        await until(lambda: made.used() == {"w0", "w1"})
        ended = await asyncio.gather(*(read(submit(made.front_ends["fe0"], f"r{n}")) for n in range(8)))
        assert {record.outcome for _, record in ended} == {Outcome.COMPLETED}


async def test_a_worker_that_comes_back_takes_its_name_once_the_old_lease_is_over() -> None:
    async with fleet(workers=2) as made:
        dead = made.workers.pop("w1")
        await dead._port.stop(0)
        await dead.servicer.close()
        again = asyncio.create_task(made.worker("w1"))
        await asyncio.sleep(0.6)
        assert not again.done()  # the dead one is still a member
        await dead._lease.leave()
        await again
        await until(lambda: made.used() == {"w0", "w1"})
        ended = await asyncio.gather(*(read(submit(made.front_ends["fe0"], f"r{n}")) for n in range(6)))
        assert {record.outcome for _, record in ended} == {Outcome.COMPLETED}
        for task in dead._tasks:
            task.cancel()


async def test_a_worker_that_is_drained_under_load_ends_what_it_holds() -> None:
    """Nothing fails and nothing is done twice, whatever was on its way to it."""
    async with fleet() as made:
        front_end = made.front_ends["fe0"]
        reading = [asyncio.create_task(read(submit(front_end, f"r{n}", 300, 20))) for n in range(24)]
        await until(lambda: bool(made.workers["w1"].servicer.engine.held))
        drained = asyncio.create_task(ask_to_drain(made, "w1", 30.0))
        for n in range(24):
            reading.append(asyncio.create_task(read(submit(front_end, f"later{n}", 80, 4))))
            await asyncio.sleep(0.005)
        assert (await drained).unfinished_count == 0
        leaving = made.workers.pop("w1")
        assert leaving.drained.done()
        assert leaving.servicer.engine.held == ()
        shown = leaving._membership.snapshot().members["w1"].facts
        assert shown["draining"] == "me asked for a drain"
        await leaving.close()
        ended = await asyncio.gather(*reading)
        assert {record.outcome for _, record in ended} == {Outcome.COMPLETED}
        assert [len(tokens) for tokens, _ in ended] == [20] * 24 + [4] * 24
        assert made.used() == {"w0", "w2"}
        books(made)


async def test_a_drain_does_not_wait_for_a_front_end_that_is_gone() -> None:
    async with fleet(workers=1, front_ends=1) as made:
        reading = asyncio.create_task(read(submit(made.front_ends["fe0"], "long", 60, 400)))
        await until(lambda: made.workers["w0"].servicer.engine.book.kept(made.front_ends["fe0"].name) > 0)
        gone = made.front_ends.pop("fe0")
        await gone.close()
        for scheduler in list(made.schedulers.values()):
            await scheduler.close()
        made.schedulers.clear()
        await asyncio.gather(reading, return_exceptions=True)
        async with asyncio.timeout(20):
            await made.workers["w0"].drain(30.0)
        assert made.workers["w0"].servicer.engine.book.idle


async def test_a_drain_that_takes_too_long_says_how_many_requests_it_cut_off() -> None:
    async with fleet(workers=1) as made:
        reading = asyncio.create_task(read(submit(made.front_ends["fe0"], "long", 60, 4000)))
        await until(lambda: bool(made.workers["w0"].servicer.engine.held))
        assert (await ask_to_drain(made, "w0", 0.1)).unfinished_count == 1
        reading.cancel()


async def test_the_next_scheduler_hears_that_a_worker_drains() -> None:
    async with fleet() as made:
        reading = asyncio.create_task(read(submit(made.front_ends["fe0"], "long", 60, 400)))
        await until(lambda: any(worker.servicer.engine.held for worker in made.workers.values()))
        name = next(name for name, worker in made.workers.items() if worker.servicer.engine.held)
        draining = asyncio.create_task(made.workers[name].drain(20.0))
        await until(lambda: made.active.gate.reign.scheduler.instances[name].state == "draining")
        old = made.active
        del made.schedulers[old._place.member_id]
        await old.close()
        await draining
        await until(lambda: name in made.used())
        await until(lambda: made.active.gate.reign.scheduler.instances[name].state == "draining")
        await asyncio.gather(reading, return_exceptions=True)


async def test_serving_goes_on_while_membership_is_away() -> None:
    async with fleet() as made:
        made.store.away = True
        ended = await asyncio.gather(
            *(read(submit(front_end, f"{n}")) for n in range(6) for front_end in made.front_ends.values())
        )
        assert {record.outcome for _, record in ended} == {Outcome.COMPLETED}
        made.store.away = False
        await made.worker("w9")
        await until(lambda: "w9" in made.used())


async def test_the_controller_sees_the_load_of_the_shard() -> None:
    async with fleet() as made:
        assert made.controller is not None
        controller = made.controller.controller
        await until(lambda: "s" in controller.views)
        view = controller.views["s"]
        assert {load.instance_id for load in view.instances} == {"w0", "w1", "w2"}
        assert replace(view, instances=()).arrivals >= 0
