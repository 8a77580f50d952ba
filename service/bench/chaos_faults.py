"""Carries out the faults of a schedule on the processes of a rig.

One fault has a process at a time: another one that is due for it meanwhile is left out, and said so. The same
goes for what this machine can't do, such as a network of its own for a process without root.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from service.bench.chaos_net import Network
from service.bench.chaos_plan import RealFault
from service.bench.chaos_relay import Relay
from service.bench.chaos_watch import ChaosWatch
from service.bench.fleet_rig import FleetRig, Kind, Part

ETCD = "etcd"
TURN_S = 0.1  # of a slow process: it runs and stands once in it
DRAIN_S = 5.0  # what a drained worker gets for its requests
END_S_MAX = 15.0  # and its process after that

Span = tuple[float, float | None]  # of a life: start and end, after the start of the load


@dataclass(slots=True)
class Injector:
    """network, clocks: None and empty where there are none; why is in `missing`. relays: before etcd, one a
    process. clocks: files that say how far the clock of a process is off.

    happened: what was done to whom. left_out: what was not, and why. broken: laws.
    """

    rig: FleetRig
    watch: ChaosWatch
    relays: Mapping[str, Relay]
    network: Network | None
    clocks: Mapping[str, Path]
    missing: Mapping[str, str]  # kind of fault -> why it can't be had
    clock: Callable[[], float]
    note: Callable[[str], None] = lambda text: None
    happened: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    spans: dict[tuple[str, int], Span] = field(default_factory=dict)
    _held: set[str] = field(default_factory=set)

    async def run(self, faults: Sequence[RealFault]) -> None:
        """All of them, each at its time; returns when the last one is healed."""
        try:
            async with asyncio.TaskGroup() as group:
                for fault in faults:
                    group.create_task(self._one(fault))
        finally:
            self._resume_all()

    def begin(self) -> None:
        """The load starts: every process is in its first life."""
        self.spans = {(part.name, part.lives): (-1e9, None) for part in self.rig.parts.values()}

    async def _one(self, fault: RealFault) -> None:
        await asyncio.sleep(max(0.0, fault.at_s - self.clock()))
        why = self.missing.get(f"{fault.kind} {fault.how}".strip(), "")
        names = [] if why else self._names(fault.target)
        free = [name for name in names if name not in self._held]
        if not free:
            why = why or (f"{' '.join(names)} is in another one" if names else "none is up")
            self.left_out.append(f"{fault}: {why}")
            return
        with self._holding(free):
            told = str(fault) if fault.target in (*free, "all") else f"{fault} ({free[0]})"
            self.happened.append(told)
            self.note(told)
            await self._carry_out(fault, free)

    async def _carry_out(self, fault: RealFault, names: list[str]) -> None:
        name = names[0]
        match fault.kind:
            case "die" if name == ETCD:
                await asyncio.to_thread(self.rig.etcd.stop)
                await asyncio.sleep(fault.for_s)
                await asyncio.to_thread(self.rig.etcd.start)
            case "die":
                await self.rig.parts[name].kill()
                await self._back(name, fault.for_s)
            case "hang" | "stall":
                self._signal(names, signal.SIGSTOP)
                await asyncio.sleep(fault.for_s)
                self._signal(names, signal.SIGCONT)
            case "slow":
                await self._slow(names, fault)
            case "drain":
                await self._drain(name, fault)
            case "role":
                why = await self.watch.move(name, fault.how)
                if why:
                    self.left_out.append(f"{fault}: {why}")
            case "cut":
                await self._cut(name, fault)
            case "delay":
                await self._delay(fault)
            case "clock":
                self.clocks[name].write_text(f"{fault.factor:+g}", encoding="ascii")
                await asyncio.sleep(fault.for_s)
                self.clocks[name].write_text("+0", encoding="ascii")
            case other:
                raise AssertionError(f"{other} is not done anywhere")

    # --- one kind each ---

    async def _back(self, name: str, after_s: float) -> None:
        """Its life is over; it gets another one."""
        part = self.rig.parts[name]
        life = name, part.lives
        self.spans[life] = (self.spans[life][0], self.clock())
        await asyncio.sleep(after_s)
        await self.rig.restart(name)
        self.spans[name, part.lives] = (self.clock(), None)
        await self.rig.ready(name)

    async def _slow(self, names: list[str], fault: RealFault) -> None:
        end_s = self.clock() + fault.for_s
        while self.clock() < end_s:
            self._signal(names, signal.SIGSTOP)
            await asyncio.sleep(TURN_S * (1.0 - 1.0 / fault.factor))
            self._signal(names, signal.SIGCONT)
            await asyncio.sleep(TURN_S / fault.factor)

    async def _drain(self, name: str, fault: RealFault) -> None:
        part = self.rig.parts[name]
        why = await self.watch.drain(name, DRAIN_S)
        if why:
            self.left_out.append(f"{fault}: {why}")
            return
        assert part.process is not None
        try:
            code = await asyncio.wait_for(part.process.wait(), END_S_MAX)
            if code:
                self.broken.append(f"{name} was drained and ended with {code}")
        except TimeoutError:
            self.broken.append(f"{name} was drained and did not end within {END_S_MAX:g} s")
            await part.kill()
        part.killed = True  # it was meant to end
        await self._back(name, fault.for_s)

    async def _cut(self, name: str, fault: RealFault) -> None:
        if fault.how == "etcd":
            self.relays[name].hold()
            await asyncio.sleep(fault.for_s)
            self.relays[name].let_go()
            return
        assert self.network is not None
        self.network.cut(name)
        await asyncio.sleep(fault.for_s)
        self.network.heal(name)

    async def _delay(self, fault: RealFault) -> None:
        for relay in self.relays.values():
            relay.delay_s = fault.factor
        await asyncio.sleep(fault.for_s)
        for relay in self.relays.values():
            relay.delay_s = 0.0

    # --- whom ---

    def _names(self, target: str) -> list[str]:
        """Those that are up; of who leads, the one that does, or would be next."""
        if target == ETCD:
            return [ETCD]
        if target == "all":
            return [name for name, part in self.rig.parts.items() if part.up]
        if target in self.rig.parts:
            return [target] if self.rig.parts[target].up else []
        kind = Kind(target)
        leads = self.watch.active if kind is Kind.SCHEDULER else self.watch.leading
        up = [part.name for part in self.rig.of(kind) if part.up]
        return ([leads] if leads in up else up)[:1]

    @contextmanager
    def _holding(self, names: list[str]) -> Iterator[None]:
        self._held.update(names)
        try:
            yield
        finally:
            self._held.difference_update(names)

    def _signal(self, names: Sequence[str], number: signal.Signals) -> None:
        for name in names:
            pid = self.rig.etcd.pid if name == ETCD else _pid(self.rig.parts[name])
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _resume_all(self) -> None:
        """Also when the run was broken off: a process that stands can't end."""
        up = [name for name, part in self.rig.parts.items() if part.up]
        self._signal(up, signal.SIGCONT)
        for relay in self.relays.values():
            relay.let_go()
            relay.delay_s = 0.0


def _pid(part: Part) -> int:
    assert part.process is not None
    return part.process.pid
