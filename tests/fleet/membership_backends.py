"""Both backends of membership as the contract suite sees them: connections, and time that passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from etcd_server import EtcdServer

from service.core.reconcile import MoveReason
from service.core.types import Role
from service.fleet.clock import Clock, VirtualClock, WallClock, settle
from service.fleet.etcd import EtcdOptions, etcd_membership
from service.fleet.membership import Assignment, Member, MemberKind
from service.fleet.memory import MemoryFleet
from service.fleet.stored import MembershipTimes, StoreMembership

TIMES = MembershipTimes(ttl_s=1.0, stale_after_s=0.6, settle_s=1.0, open_timeout_s=5.0)
_names = count(1)


def skewed(base: Clock, by_s: float) -> Clock:
    """The same seconds, but another time of day and another zero."""

    class Skewed:
        def now_s(self) -> float:
            return base.now_s() + by_s

        def time_s(self) -> float:
            return base.time_s() + by_s

        def call_at(self, when_s: float, call: Callable[[], None]) -> object:
            return base.call_at(when_s - by_s, call)

    return Skewed()  # type: ignore[return-value]


class Backend:
    """One fleet of its own in one of the services."""

    name = ""

    def __init__(self) -> None:
        self.fleet = f"t{next(_names)}"
        self.opened: list[StoreMembership] = []
        self.clock: Clock

    def make(self, fleet: str | None = None, clock: Clock | None = None) -> StoreMembership:
        raise NotImplementedError

    async def connect(self, fleet: str | None = None, skew_s: float = 0.0) -> StoreMembership:
        membership = self.make(fleet, skewed(self.clock, skew_s) if skew_s else None)
        await membership.open()
        self.opened.append(membership)
        return membership

    async def pass_time(self, seconds: float) -> None:
        raise NotImplementedError

    async def until(self, condition: Callable[[], object], what: str = "", seconds: float = 10.0) -> None:
        """Let time pass until the condition holds; fails long after it should."""
        step_s = 0.02
        for _ in range(int(seconds / step_s)):
            if condition():
                return
            await self.pass_time(step_s)
        raise AssertionError(f"never came true: {what or condition}")

    async def close(self) -> None:
        for membership in self.opened:
            await membership.close()


class InMemory(Backend):
    name = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.clock = self.virtual = VirtualClock()
        self.service = MemoryFleet(self.virtual)

    def make(self, fleet: str | None = None, clock: Clock | None = None) -> StoreMembership:
        return StoreMembership(
            self.service.store(), fleet=fleet or self.fleet, times=TIMES, clock=clock or self.virtual
        )

    async def pass_time(self, seconds: float) -> None:
        await self.virtual.advance(seconds)
        await settle()


class InEtcd(Backend):
    name = "etcd"

    def __init__(self, server: EtcdServer, **options: object) -> None:
        super().__init__()
        self.clock = WallClock()
        self.fleet = f"{self.fleet}-{time.monotonic_ns()}"
        wanted = {"endpoints": (server.endpoint,), "call_timeout_s": 1.0, "silence_s": 0.6, **options}
        self.options = EtcdOptions(**wanted)  # type: ignore[arg-type]

    def make(self, fleet: str | None = None, clock: Clock | None = None) -> StoreMembership:
        return etcd_membership(self.options, fleet=fleet or self.fleet, times=TIMES, clock=clock)

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


WHY = {"reason": MoveReason.PRESSURE, "by": "controller-1"}


def worker(name: str = "w1", **changes: object) -> Member:
    return replace(Member(name, MemberKind.WORKER, "10.0.0.1:9000", shard="s1"), **changes)


async def assign(
    membership: StoreMembership, name: str, role: Role, expected: int = 0, **more: object
) -> Assignment:
    return await membership.assign(name, role, expected=expected, **(WHY | more))  # type: ignore[arg-type]
