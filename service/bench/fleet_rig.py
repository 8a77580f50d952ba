"""A fleet of real processes on loopback, for a demo that kills some of them.

One etcd, workers, schedulers, front ends and controllers, each a process of its own with a log of its own.
Front ends and controllers keep their ports over a restart, as behind a service address; the others pick new
ones and are found through etcd. A kill is SIGKILL: nothing is said to anybody. All of them are in sessions of
their own, so that Ctrl-C reaches the driver alone, which then stops each by its pid; where the driver itself
is killed, they are killed with it.

Processor time is read from /proc (Linux), and that of a process that has died stays counted as last read.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from service.bench.arms import free_ports
from service.bench.etcd import EtcdServer, running_etcd, with_parent

READY_S_MAX = 120.0  # a dozen interpreters start at once, on a machine that may be busy
STOP_S_MAX = 10.0
POLL_S = 0.1
LOG_TAIL_LINES = 15
READY = b"ready: "
MAIN = "from service.cli import main; main()"


class RigError(Exception):
    """A process of the fleet did not start, or ended when nobody told it to."""


class Kind(StrEnum):
    WORKER = "worker"
    SCHEDULER = "scheduler"
    FRONTEND = "frontend"
    CONTROLLER = "controller"


@dataclass(frozen=True, slots=True)
class RigSettings:
    """How many of each kind. environment: settings that all of them get. policy: with its knobs."""

    environment: Mapping[str, str]
    policy: str = "plaserve"
    workers: int = 6
    schedulers: int = 2
    front_ends: int = 2
    controllers: int = 2
    lease_ttl_s: float = 4.0

    def __post_init__(self) -> None:
        for name in ("workers", "schedulers", "front_ends", "controllers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(slots=True)
class Part:
    """A process by its name in the fleet. lives: how often it was started. killed: SIGKILL on purpose.

    address: for kinds with a port that they keep. before: put before its command. first: Python that it runs
    before anything else. environment: its own settings, over those of all. hard: it had to be killed at the
    end. cpu_s: of all its lives, as last read.
    """

    name: str
    kind: Kind
    arguments: tuple[str, ...]
    log: Path
    address: str = ""
    before: tuple[str, ...] = ()
    first: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    lives: int = 0
    killed: bool = False
    hard: bool = False
    log_start: int = 0  # of the present life in the log
    cpu_s: float = 0.0
    _cpu_before_s: float = 0.0  # of earlier lives

    @property
    def up(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def ready(self) -> bool:
        """It has said so in this life."""
        if not self.up:
            return False
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            return READY in log.read()

    async def start(self, environment: Mapping[str, str]) -> None:
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        self._cpu_before_s = self.cpu_s
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *with_parent(), *self.before, sys.executable, "-c", f"{self.first}{MAIN}",
                self.kind.value, "--member", self.name, *self.arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, **environment, **self.environment}, start_new_session=True,
            )  # fmt: skip
        self.lives += 1
        self.killed = False

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.process is not None and self.up:
            self.look()
            self.killed = True
            self.process.kill()
            await self.process.wait()

    async def stop(self) -> None:
        """SIGTERM, which lets it drain; SIGKILL when it takes too long."""
        if self.process is None or not self.up:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), STOP_S_MAX)
        except TimeoutError:
            self.hard = True
            self.process.kill()
            await self.process.wait()

    def look(self) -> None:
        """Read its processor time."""
        if self.process is not None and self.up:
            self.cpu_s = self._cpu_before_s + process_cpu_s(self.process.pid)

    def tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])


@dataclass(slots=True)
class FleetRig:
    """See the module text."""

    settings: RigSettings
    folder: Path
    etcd: EtcdServer
    parts: dict[str, Part] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ports = iter(free_ports(self.settings.front_ends + self.settings.controllers))
        policy = ("--policy", self.settings.policy)
        for n in range(self.settings.workers):
            self.add(f"w{n}", Kind.WORKER, ())
        for n in range(self.settings.schedulers):
            self.add(f"s{n}", Kind.SCHEDULER, policy)
        for n in range(self.settings.front_ends):
            port = next(ports)
            self.add(f"f{n}", Kind.FRONTEND, ("--port", str(port)), f"127.0.0.1:{port}")
        for n in range(self.settings.controllers):
            address = f"127.0.0.1:{next(ports)}"
            self.add(f"c{n}", Kind.CONTROLLER, (*policy, "--listen", address), address)

    def add(self, name: str, kind: Kind, arguments: tuple[str, ...], address: str = "") -> None:
        self.parts[name] = Part(name, kind, arguments, self.folder / f"{name}.log", address)

    def of(self, kind: Kind) -> list[Part]:
        return [part for part in self.parts.values() if part.kind is kind]

    @property
    def environment(self) -> dict[str, str]:
        return {
            **self.settings.environment,
            "PLASERVE_FLEET__MEMBERSHIP": "etcd",
            "PLASERVE_FLEET__ENDPOINTS": f'["{self.etcd.endpoint}"]',
            "PLASERVE_FLEET__NAME": "demo",
            "PLASERVE_FLEET__LEASE_TTL_S": str(self.settings.lease_ttl_s),
        }

    async def start(self) -> None:
        """All at once; returns when each has said that it is ready. Raises RigError."""
        for part in self.parts.values():
            await part.start(self.environment)
        await self.ready(*self.parts)

    async def restart(self, name: str) -> None:
        """Start one again. `ready` waits for it."""
        await self.parts[name].start(self.environment)

    async def ready(self, *names: str) -> None:
        """Raises RigError."""
        loop = asyncio.get_running_loop()
        limit_s = loop.time() + READY_S_MAX
        waiting = [self.parts[name] for name in names]
        while waiting := [part for part in waiting if not part.ready]:
            for part in waiting:
                if not part.up:
                    raise RigError(f"{part.name} ended before it was ready\n{part.tail()}")
            if loop.time() > limit_s:
                part = waiting[0]
                raise RigError(f"{part.name} was not ready after {READY_S_MAX:.0f} s\n{part.tail()}")
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """All of them: front ends first, so that what they hold is finished; then the rest."""
        await asyncio.gather(*(part.stop() for part in self.of(Kind.FRONTEND)))
        await asyncio.gather(*(part.stop() for part in self.parts.values()))

    def died(self) -> list[str]:
        """Those that ended though nobody killed them."""
        return [part.name for part in self.parts.values() if part.lives and not part.up and not part.killed]

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds so far by kind, `etcd` among them."""
        used = dict.fromkeys((*(kind.value for kind in Kind), "etcd"), 0.0)
        for part in self.parts.values():
            part.look()
            used[part.kind.value] += part.cpu_s
        used["etcd"] = process_cpu_s(self.etcd.pid)
        return used


Rig = TypeVar("Rig", bound=FleetRig)


def fleet_rig(settings: RigSettings, folder: Path) -> AbstractAsyncContextManager[FleetRig]:
    """A fleet that is not started yet; everything of it is stopped in the end. Raises EtcdError."""
    return rig_of(FleetRig, settings, folder)


@asynccontextmanager
async def rig_of(shape: type[Rig], settings: RigSettings, folder: Path) -> AsyncIterator[Rig]:
    """As `fleet_rig`, of another shape."""
    with running_etcd(_emptied(folder)) as etcd:
        rig = shape(settings, folder, etcd)
        try:
            yield rig
        finally:
            await asyncio.shield(rig.stop())


def _emptied(folder: Path) -> Path:
    """Without what an earlier run left; returns the place of etcd's data."""
    folder.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*.log"):
        log.unlink()
    shutil.rmtree(folder / "etcd", ignore_errors=True)
    return folder / "etcd"


def process_cpu_s(pid: int) -> float:
    """Processor time of a process so far, all its threads (Linux); 0 for one that is gone."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def machine_cpu_s() -> float:
    """Busy processor seconds of the whole machine so far (Linux): what others use shows beside ours."""
    first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    user, nice, system, _idle, _wait, irq, soft = (int(value) for value in first[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
