"""What a fleet under chaos says of itself, asked of every process that is up.

Books of a front end and of an active scheduler must balance at every look (submitted = outcomes + queued +
running). The last word of each life is kept, since a killed process says nothing at its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from protos.plaserve.v1 import fleet_pb2 as pb
from protos.plaserve.v1 import status_pb2
from protos.plaserve.v1.fleet_pb2_grpc import FleetServiceStub
from protos.plaserve.v1.status_pb2_grpc import StatusServiceStub
from service.bench.books import ServiceBooks
from service.bench.fleet_rig import FleetRig, Kind
from service.bench.fleet_watch import Life

EVERY_S = 0.5
TIMEOUT_S = 1.0


@dataclass(slots=True)
class ChaosWatch:
    """clock: seconds after the start of the load. open_channel: to processes of the fleet. active: the
    scheduler that answered last as such, with its status; leading: the controller."""

    rig: FleetRig
    clock: Callable[[], float]
    open_channel: Callable[[str], grpc.aio.Channel]
    active: str = ""
    leading: str = ""
    status: status_pb2.GetStatusResponse = field(default_factory=status_pb2.GetStatusResponse)
    lives: dict[tuple[str, int], Life] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    epochs: set[int] = field(default_factory=set)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """All books, and who leads."""
        front_ends = [
            self._book(p.name, p.address, grpc.aio.insecure_channel) for p in self._up(Kind.FRONTEND)
        ]
        schedulers = [self._scheduler(p.name, p.address) for p in self._up(Kind.SCHEDULER)]
        await asyncio.gather(self.fleet(), *front_ends, *schedulers)

    async def fleet(self) -> pb.GetFleetResponse:
        """By the first controller that answers; an empty one when none does."""
        for part in sorted(self._up(Kind.CONTROLLER), key=lambda part: part.name != self.leading):
            try:
                async with self.open_channel(part.address) as channel:
                    stub = FleetServiceStub(channel)  # type: ignore[no-untyped-call]
                    answer: pb.GetFleetResponse = await stub.GetFleet(pb.GetFleetRequest(), timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError:
                continue
            self.leading = answer.controller
            self.epochs.update(int(p.epoch) for p in answer.processes if p.epoch)
            return answer
        return pb.GetFleetResponse()

    async def move(self, worker: str, role: str) -> str:
        """Ask for a role; what was wrong, or empty."""
        wanted = f"ROLE_{role.upper()}"
        request = pb.MoveInstanceRequest(instance_id=worker, role=wanted, by="chaos")
        return await self._order(lambda stub: stub.MoveInstance(request, timeout=5.0))

    async def drain(self, worker: str, timeout_s: float) -> str:
        """Ask for a drain and wait for it; what was wrong, or empty."""
        timeout = Duration(seconds=round(timeout_s))
        request = pb.DrainInstanceRequest(instance_id=worker, timeout=timeout, by="chaos")
        return await self._order(lambda stub: stub.DrainInstance(request, timeout=timeout_s + 10.0))

    async def _order(self, call: Callable[[Any], Any]) -> str:
        why = "no controller is up"
        for part in self._up(Kind.CONTROLLER):
            try:
                async with self.open_channel(part.address) as channel:
                    await call(FleetServiceStub(channel))  # type: ignore[no-untyped-call]
                return ""
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
        return why

    def _up(self, kind: Kind) -> list[Any]:
        return [part for part in self.rig.of(kind) if part.up]

    async def _scheduler(self, name: str, address: str) -> None:
        status = await self._book(name, address, self.open_channel)
        if status is not None:
            self.active, self.status = name, status

    async def _book(
        self, name: str, address: str, open_channel: Callable[[str], grpc.aio.Channel]
    ) -> status_pb2.GetStatusResponse | None:
        """None: it is dead, starting, stopped, cut off or a standby."""
        at_s, number = self.clock(), self.rig.parts[name].lives
        try:
            async with open_channel(address) as channel:
                stub = StatusServiceStub(channel)  # type: ignore[no-untyped-call]
                status: status_pb2.GetStatusResponse = await stub.GetStatus(
                    status_pb2.GetStatusRequest(), timeout=TIMEOUT_S
                )
        except grpc.aio.AioRpcError:
            return None
        books = ServiceBooks.of(status)
        accounted = sum(books.outcomes.values()) + books.queued + books.running
        if books.submitted != accounted:
            self.faults.append(
                f"{name} at {at_s:.1f} s: submitted {books.submitted}, accounts for {accounted}"
            )
        self.lives[name, number] = Life(name, number, at_s, books)
        return status
