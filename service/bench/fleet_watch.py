"""What a fleet says of itself once a second: roles and pressures from a controller, books from the others.

The controller that leads is asked, and another one while it is away. Every status of a front end or of an
active scheduler must balance in itself (submitted = outcomes + queued + running); one that does not is
written down. The last status of every life is kept, since a killed process says nothing at its end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from math import nan
from typing import Any

import grpc
import grpc.aio

from protos.plaserve.v1 import fleet_pb2 as pb
from protos.plaserve.v1.fleet_pb2_grpc import FleetServiceStub
from service.bench.arms import status
from service.bench.books import ServiceBooks
from service.bench.fleet_rig import FleetRig, Kind, machine_cpu_s

EVERY_S = 1.0
TIMEOUT_S = 2.0
MOVES_MAX = 200
ROLES = {pb.ROLE_SP: "sp", pb.ROLE_LP: "lp", pb.ROLE_MIXED: "mixed"}


@dataclass(frozen=True, slots=True)
class Sample:
    """roles: of the workers whose process is up and that are members. Cores: mean since the last sample, by
    kind and of the whole machine. pressures: NaN while no controller knows the loads. controller, scheduler:
    empty while nobody leads that is up."""

    at_s: float
    roles: dict[str, str]
    pressures: dict[str, float]  # by role
    utilisation: dict[str, float]  # by worker
    controller: str
    scheduler: str
    cores: dict[str, float]
    machine_cores: float
    load_average: float


@dataclass(slots=True)
class Life:
    """The last books of one life of a process. at_s: when they were asked for."""

    name: str
    number: int
    at_s: float
    books: ServiceBooks


@dataclass(slots=True)
class FleetWatch:
    """clock: seconds since the start of the load. schedulers: addresses, as the controller knows them."""

    rig: FleetRig
    clock: Callable[[], float]
    samples: list[Sample] = field(default_factory=list)
    lives: dict[tuple[str, int], Life] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    epochs: set[int] = field(default_factory=set)
    schedulers: dict[str, str] = field(default_factory=dict)
    _cpu: tuple[float, dict[str, float], float] | None = None

    def restart(self) -> None:
        """Forget the samples so far: the clock has been set."""
        self.samples.clear()
        self._cpu = None

    async def run(self, on_sample: Callable[[Sample], None]) -> None:
        """Until cancelled."""
        while True:
            begin_s = self.clock()
            on_sample(await self.sample())
            await asyncio.sleep(max(0.05, EVERY_S - (self.clock() - begin_s)))

    async def sample(self) -> Sample:
        at_s = self.clock()
        answer = await self.fleet()
        await self.books()
        cores, machine = self._cores(at_s)
        up = {part.name for part in self.rig.parts.values() if part.up}
        active = [p for p in answer.processes if p.epoch and p.kind == Kind.SCHEDULER.value]
        self.epochs.update(int(p.epoch) for p in active)
        self.schedulers.update({p.member_id: p.address for p in active})
        known = answer.HasField("sp_pressure")
        made = Sample(
            at_s,
            {i.instance_id: ROLES.get(i.role, "mixed") for i in answer.instances if i.instance_id in up},
            {"sp": answer.sp_pressure if known else nan, "lp": answer.lp_pressure if known else nan},
            {i.instance_id: i.utilisation for i in answer.instances},
            answer.controller if answer.controller in up else "",
            next((p.member_id for p in active if p.member_id in up), ""),
            cores,
            machine,
            os.getloadavg()[0],
        )
        self.samples.append(made)
        return made

    async def fleet(self) -> pb.GetFleetResponse:
        """From the controller that leads; an empty one when no controller answers."""
        asked: pb.GetFleetResponse = await self._ask(
            lambda stub: stub.GetFleet(pb.GetFleetRequest(), timeout=TIMEOUT_S), pb.GetFleetResponse()
        )
        return asked

    async def moves(self) -> list[pb.RoleMove]:
        """The history, oldest first."""
        request = pb.ListMovesRequest(page_size=MOVES_MAX)
        answer = await self._ask(
            lambda stub: stub.ListMoves(request, timeout=TIMEOUT_S), pb.ListMovesResponse()
        )
        return list(reversed(answer.moves))

    async def books(self) -> None:
        """One look at the books of every front end and of the active scheduler."""
        servers = {part.name: part.address for part in self.rig.of(Kind.FRONTEND) if part.up}
        servers |= {name: address for name, address in self.schedulers.items() if self.rig.parts[name].up}
        await asyncio.gather(*(self._book(name, address) for name, address in servers.items()))

    async def _book(self, name: str, address: str) -> None:
        at_s, number = self.clock(), self.rig.parts[name].lives
        try:
            books = ServiceBooks.of(await status(address, TIMEOUT_S))
        except grpc.aio.AioRpcError:
            return  # dead, starting, or a standby
        accounted = sum(books.outcomes.values()) + books.queued + books.running
        if books.submitted != accounted:
            self.faults.append(
                f"{name} at {at_s:.0f} s: submitted {books.submitted}, accounts for {accounted}"
            )
        self.lives[name, number] = Life(name, number, at_s, books)

    async def _ask(self, call: Callable[[Any], Any], nothing: Any) -> Any:
        last = self.samples[-1].controller if self.samples else ""
        parts = sorted(self.rig.of(Kind.CONTROLLER), key=lambda part: part.name != last)
        for part in parts:
            if not part.up:
                continue
            try:
                async with grpc.aio.insecure_channel(part.address) as channel:
                    return await call(FleetServiceStub(channel))  # type: ignore[no-untyped-call]
            except grpc.aio.AioRpcError:
                continue
        return nothing

    def _cores(self, at_s: float) -> tuple[dict[str, float], float]:
        used, machine = self.rig.cpu_s(), machine_cpu_s()
        before_s, before, machine_before = self._cpu or (at_s, used, machine)
        self._cpu = at_s, used, machine
        seconds = max(1e-9, at_s - before_s)
        if at_s == before_s:
            return dict.fromkeys(used, 0.0), 0.0
        cores = {kind: (value - before[kind]) / seconds for kind, value in used.items()}
        return cores, (machine - machine_before) / seconds
