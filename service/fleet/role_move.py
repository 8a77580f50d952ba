"""How a worker changes its role where that takes another engine.

    serving -> draining -> unloading -> loading -> verifying -> serving in the new role
                  |                        `----------`-> restoring -> serving in the old role
                  `-> serving as before

Draining: schedulers are asked for nothing new, what is here goes on, for `drain_s` at most. Another role that
is wanted meanwhile, and that the loaded engine serves, calls the move off: work is taken again at once.
Unloading: the scheduler hears that the instance is gone, with its KV and its cache. What has not ended runs
again elsewhere if it has shown no token; an answer that has begun goes on elsewhere (`going_on`).
Loading, verifying: in a thread, so that leases and heartbeats go on. Whoever calls is told to come again.
Restoring: the new engine can't be had, so the old one is loaded again; the move failed, with the reason.

Where that fails too, or a step takes longer than `load_s`, or a pass hangs that is to end, the worker can't
go on: its process ends, for a supervisor to start it anew, and then it loads what its wanted role asks for.

A role that the loaded engine serves is a label, and takes none of this.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from engines.catalog import LoadedEngine
from service.core.types import InstanceSpec, Role
from service.fleet.membership import Assignment
from service.fleet.role_engines import RoleEngines
from service.fleet.role_facts import NEXT, EnginesTold, MoveEnd, MovePhase, MoveState
from service.fleet.roles import RoleRefused
from service.fleet.worker_engine import EngineStuck
from service.fleet.worker_service import WorkerServicer
from service.runtime.worker import PassRunner, ThreadRunner

log = logging.getLogger(__name__)

LOOK_S = 0.02
ERROR_CHARS_MAX = 2000  # facts of a member are bounded
Wanted = Callable[[], Role | None]
Hear = Callable[[MoveState], None]


@dataclass(frozen=True, slots=True)
class MoveSettings:
    """Seconds. drain_s: how long requests may go on. load_s: how long each of unloading, loading and
    verifying may take."""

    drain_s: float = 30.0
    load_s: float = 900.0

    @property
    def bound_s(self) -> float:
        """After it a move is over: done, failed and restored, or the process has ended."""
        return self.drain_s + 5.0 * self.load_s


class RoleMover:
    """wanted: the role that membership wants now; None: it says nothing. report: tells membership of a role
    before the engine is open to schedulers. hear: told of every phase and end. runner: around an engine."""

    def __init__(
        self,
        worker: WorkerServicer,
        engines: RoleEngines,
        settings: MoveSettings,
        wanted: Wanted,
        report: Callable[[Role, int], Awaitable[None]],
        hear: Hear,
        runner: Callable[[LoadedEngine], PassRunner] = lambda loaded: ThreadRunner(loaded.engine),
    ) -> None:
        self._worker = worker
        self._engines = engines
        self._settings = settings
        self._wanted = wanted
        self._report = report
        self._hear = hear
        self._runner = runner
        self._drain_s = 0.0  # as measured last
        self._state: MoveState | None = None
        self._since_s = 0.0  # of the phase, on a clock that only goes on

    @property
    def told(self) -> EnginesTold:
        move_s = self._drain_s + self._engines.move_s
        return EnginesTold(self._engines.names, self._engines.loaded, move_s, self._settings.bound_s)

    async def take(self, wanted: Assignment) -> Role:
        """Go to the wanted role; returns the role that the worker has then, which is the old one where the
        move was called off. Raises RoleRefused where it can't be had."""
        before, name = self._worker.spec.role, self._engines.of(wanted.role)
        if name == self._engines.loaded:
            self._worker.set_role(wanted.role)
            return wanted.role
        if self._worker.leaving.done() or self._worker.failed.done():
            raise RoleRefused("the worker is stopping")
        log.info("%s moves to role %s, engine %s", self._worker.spec.instance_id, wanted.role, name)
        self._begin(MoveState(wanted.number, before, wanted.role, MovePhase.DRAINING, time.time()))
        try:
            if not await self._drained(wanted.role):
                self._worker.release()
                self._end(MoveEnd.CALLED_OFF)
                return before
            return await self._change(name, wanted, before)
        except EngineStuck as error:
            raise self._over(f"the engine can't be unloaded: {error}") from error
        except RoleRefused:
            raise
        except Exception as error:  # it may have no engine now
            raise self._over(f"{type(error).__name__}: {error}") from error

    # --- draining ---

    async def _drained(self, role: Role) -> bool:
        """False: called off. What is here ends, or its time does."""
        worker, end_s = self._worker, _now_s() + self._settings.drain_s
        worker.hold(f"it moves to role {role}")
        start_s = _now_s()
        while not worker.quiet and _now_s() < end_s:
            if worker.leaving.done() or self._called_off():
                return False
            await asyncio.sleep(LOOK_S)
        if worker.leaving.done() or worker.failed.done() or self._called_off():
            return False
        self._drain_s = _now_s() - start_s
        return True

    def _called_off(self) -> bool:
        wanted = self._wanted()
        return wanted is not None and self._engines.of(wanted) == self._engines.loaded

    # --- the engine ---

    async def _change(self, name: str, wanted: Assignment, before: Role) -> Role:
        worker, load_s, old = self._worker, self._settings.load_s, self._engines.loaded
        cut_off = len(worker.engine.held)
        assert self._state is not None
        self._state = replace(self._state, cut_off=cut_off)
        if cut_off:
            log.warning("%s: %d requests are cut off by a move", worker.spec.instance_id, cut_off)
        worker.unseat(f"it loads engine {name} for role {wanted.role}")
        self._step(MovePhase.UNLOADING)
        try:
            async with asyncio.timeout(load_s):
                await worker.engine.unload()
        except TimeoutError:
            raise self._over(f"closing engine {old} took more than {load_s:g} s") from None
        try:
            loaded = await self._load(name)
        except Exception as error:
            if isinstance(error, TimeoutError):  # what hangs in a thread may hold the device
                raise self._over(f"engine {name} took more than {load_s:g} s") from None
            await self._restore(old, before, wanted.number, f"{type(error).__name__}: {error}")
            raise RoleRefused(f"engine {name}: {type(error).__name__}: {error}") from error
        await self._serve(name, loaded, wanted.role, wanted.number)
        self._end(MoveEnd.DONE)
        return wanted.role

    async def _load(self, name: str, *, again: bool = False) -> LoadedEngine:
        """Loaded and verified; one that does not do is closed. again: as part of restoring."""
        if not again:
            self._step(MovePhase.LOADING)
        loaded = await self._engines.load(name, self._settings.load_s)
        try:
            if not again:
                self._step(MovePhase.VERIFYING)
            await self._engines.verify(name, loaded, self._settings.load_s)
        except TimeoutError:
            raise
        except Exception:
            await self._engines.close(loaded, self._settings.load_s)
            raise
        return loaded

    async def _restore(self, name: str, role: Role, number: int, why: str) -> None:
        log.error("%s: %s; engine %s is loaded again", self._worker.spec.instance_id, why, name)
        self._step(MovePhase.RESTORING)
        try:
            loaded = await self._load(name, again=True)
        except Exception as error:
            what = f"{why}; and engine {name} can't be had again: {type(error).__name__}: {error}"
            raise self._over(what) from error
        await self._serve(name, loaded, role, number)
        self._end(MoveEnd.FAILED, why)

    async def _serve(self, name: str, loaded: LoadedEngine, role: Role, number: int) -> None:
        engine = loaded.engine
        spec = InstanceSpec(
            self._worker.spec.instance_id, engine.capabilities, engine.profiles, loaded.cost, role
        )
        await self._report(role, number)  # first, so that no scheduler takes it for one of its old role
        self._engines.loaded = name
        self._worker.seat(spec, self._runner(loaded))

    # --- what is told ---

    def _over(self, why: str) -> RoleRefused:
        """The worker can't go on; its process ends."""
        self._end(MoveEnd.FAILED, why)
        if not self._worker.failed.done():
            self._worker.failed.set_result(f"a move of its role failed: {why}")
        return RoleRefused(why)

    def _begin(self, state: MoveState) -> None:
        self._state, self._since_s = state, _now_s()
        self._hear(state)

    def _step(self, phase: MovePhase) -> None:
        self._go(phase)

    def _end(self, end: MoveEnd, error: str = "") -> None:
        self._go(end, error)
        self._state = None

    def _go(self, at: MovePhase | MoveEnd, error: str = "") -> None:
        state, now_s = self._state, _now_s()
        assert state is not None
        assert isinstance(state.at, MovePhase)
        assert at in NEXT[state.at], f"a move goes from {state.at} to {at}"
        seconds = {**state.seconds, state.at: now_s - self._since_s}
        self._state = replace(
            state, at=at, at_time_s=time.time(), seconds=seconds, error=error[:ERROR_CHARS_MAX]
        )
        self._since_s = now_s
        log.info("%s: role move %d, %s", self._worker.spec.instance_id, state.number, at)
        self._hear(self._state)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
