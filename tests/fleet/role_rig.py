"""A fleet whose workers have two engines: SP with passes of up to 1,024 tokens, LP with chunks of 8,192."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from test_processes import Fleet, until

from engines.catalog import LoadedEngine
from engines.gpu_catalog import LP, SP
from engines.simulated import SimulatedEngine, SimulatedModel
from engines.simulated_settings import Behaviour, h200_32b_like, h200_32b_sp_like
from service.core.reconcile import Controller, MoveReason
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Role
from service.fleet.health import LinkSettings
from service.fleet.membership import Assignment, Facts
from service.fleet.processes import ControllerProcess, WorkerProcess
from service.fleet.role_engines import OWN_ENGINES, RoleEngines
from service.fleet.role_facts import MoveEnd, MovePhase, MoveState
from service.fleet.role_move import MoveSettings
from service.fleet.role_worker import RolePlan
from service.runtime.worker import ThreadRunner

SCALE = 0.1
# With room for a busy machine: silence is not what these tests are about.
LINK = LinkSettings(heartbeat_s=0.1, silence_s=5.0, grace_s=5.0, orphan_s=10.0)
PAIR = {SP: h200_32b_sp_like, LP: h200_32b_like}
TOKENS_MAX = {SP: 1024, LP: 8192}


@dataclass
class Shelf:
    """Where engines come from. fails: names that can't be loaded. stuck: that can't be closed. odd: of other
    blocks than the rest. gate: loading waits for it."""

    load_s: float = 0.05
    fails: set[str] = field(default_factory=set)
    stuck: set[str] = field(default_factory=set)
    odd: set[str] = field(default_factory=set)
    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    loads: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    def load(self, name: str) -> LoadedEngine:
        self.loads.append(name)
        assert self.gate.wait(30)
        time.sleep(self.load_s)
        if name in self.fails:
            raise RuntimeError("no device memory")
        capabilities, profiles, cost = PAIR[name]()
        if name in self.odd:
            capabilities = replace(capabilities, block_tokens=16)
        model = SimulatedModel(capabilities, profiles, cost, self.behaviours.get(name))
        engine = SimulatedEngine(model, time_scale=SCALE)
        close, closed = engine.close, self.closed

        def close_and_tell() -> None:
            if name in self.stuck:
                raise RuntimeError("device error")
            close()
            closed.append(name)

        engine.close = close_and_tell  # type: ignore[method-assign]
        return LoadedEngine(engine, cost.scaled(SCALE), "m")


@dataclass
class RoleFleet(Fleet):
    shelves: dict[str, Shelf] = field(default_factory=dict)
    heard: dict[str, list[MoveState]] = field(default_factory=dict)
    times: MoveSettings = field(default_factory=lambda: MoveSettings(drain_s=20.0, load_s=20.0))

    async def worker(self, name: str, scale: float = SCALE) -> WorkerProcess:
        shelf, heard = self.shelves.setdefault(name, Shelf()), self.heard.setdefault(name, [])
        first = shelf.load(SP)
        engine = first.engine
        spec = InstanceSpec(name, engine.capabilities, engine.profiles, first.cost)
        facts = {"model": "m", "backend": "simulated", "bundle_id": ""}
        plan = RolePlan(RoleEngines(shelf.load, OWN_ENGINES, first, SP, 0.5), self.times, heard.append)
        made = WorkerProcess(
            self.place(name), await self.membership(), spec, ThreadRunner(engine), facts, LINK, roles=plan
        )
        await made.start()
        self.workers[name] = made
        return made

    async def order(self, name: str, role: Role) -> Assignment:
        """As an operator does."""
        membership = self.workers[name]._membership
        now = membership.snapshot().assignments.get(name)
        number = now.number if now is not None else 0
        return await membership.assign(
            name, role, expected=number, reason=MoveReason.PINNED, by="me", force=True
        )

    def at(self, name: str) -> list[str]:
        """Phases and ends of all moves so far."""
        return [state.at.value for state in self.heard[name]]

    def facts(self, name: str) -> Facts:
        return self.workers[name]._membership.snapshot().members[name].facts

    def reported(self, name: str) -> Role | None:
        report = self.workers[name]._membership.snapshot().members[name].report
        return report.role if report is not None else None

    async def until_end(self, name: str, end: MoveEnd, count: int = 1) -> MoveState:
        """The worker has ended so many moves like that."""
        await until(lambda: self.at(name).count(end.value) >= count)
        return [state for state in self.heard[name] if state.at is end][count - 1]

    async def until_phase(self, name: str, phase: MovePhase) -> None:
        await until(lambda: bool(self.heard[name]) and self.heard[name][-1].at is phase)

    async def until_used(self, name: str, engine: str) -> None:
        """The scheduler plans with that engine."""

        def used() -> bool:
            reigns = [s.gate.reign for s in self.schedulers.values() if s.gate.reign is not None]
            found = [r.scheduler.instances[name] for r in reigns if name in r.scheduler.instances]
            return any(one.spec.profiles.tokens_max == TOKENS_MAX[engine] for one in found)

        await until(used)


@asynccontextmanager
async def role_fleet(
    workers: int = 2, times: MoveSettings | None = None, *, controller: bool = False
) -> AsyncIterator[RoleFleet]:
    made = RoleFleet()
    made.times = times or made.times
    for n in range(workers):
        await made.worker(f"w{n}")
    await made.scheduler("sched0")
    await made.front_end("fe0")
    if controller:

        def make() -> Controller:
            return made.wants

        place = made.place("c")
        made.controller = ControllerProcess(place, await made.membership(), make, SchedulerSettings())
        await made.controller.start()
    await until(lambda: len(made.used()) == workers)
    await until(lambda: made.front_ends["fe0"].runtime.welcome is not None)
    try:
        yield made
    finally:
        for shelf in made.shelves.values():
            shelf.gate.set()
        closing = [p for group in (made.front_ends, made.schedulers, made.workers) for p in group.values()]
        for process in closing:
            await process.close()
        if made.controller is not None:
            await made.controller.close()
        await asyncio.sleep(0)
