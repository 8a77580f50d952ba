"""Workers that die, hang and lose their link; `cluster` with sessions.

A *session* is one connection of one process to one scheduler. A link that breaks ends it: the worker drops
what is staged, runs the pass that it is in to its end, and then begins a new session with all requests
forgotten and its cache kept (the scheduler is told what is in it). So a worker says `up` only when it is
idle, and what it said in an old session can be told from what it says now. A silent link holds everything in
both directions until it heals, as TCP does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engines.base import PassError
from engines.types import BlocksStored, KvEvent, Pass
from service.core.types import Request
from service.sim.agenda import Agenda
from service.sim.chaos_schedule import ChaosFault
from service.sim.cluster import Cluster, Process, SimInstance
from service.sim.cluster import FrontEnd as Hears

KILLED_S = 10.0  # a pass that hangs this long is killed by whoever watches the process itself
BACK_S = 1.0  # from a kill to the next start
LEAVE_LOOK_S = 0.02
DRAIN_S_MAX = 5.0  # then it leaves with whatever it holds


@dataclass(slots=True, eq=False)
class Session(Process):
    """severed: its link is gone for good. held: what waits for a silent link. brought: requests that the
    engine was told of."""

    severed: bool = False
    held: list[tuple[Callable[..., None], tuple[object, ...]]] = field(default_factory=list)
    brought: set[str] = field(default_factory=set)


class ChaosHears(Hears, Protocol):
    def cache_known(self, process: Process, events: tuple[KvEvent, ...]) -> None: ...

    def draining(self, process: Process) -> None: ...

    def resumed(self, process: Process) -> None: ...


class ChaosCluster(Cluster):
    def __init__(
        self, agenda: Agenda, front: ChaosHears, link_s: float, faults: Sequence[ChaosFault], instances: int
    ) -> None:
        super().__init__(agenda, front, link_s, {})
        self._hears = front
        self._away = False  # the scheduler
        self._cut: dict[str, str] = {}  # instance -> how, while its link is cut
        self._gone: set[str] = set()  # never starts again
        self._cached: dict[str, dict[int, None]] = {}  # instance -> hashes in its cache, as it said
        self._hangs = {f"i{n}": _windows(faults, "hang", n) for n in range(instances)}
        self._repeats = {f"i{n}": _windows(faults, "repeat", n) for n in range(instances)}
        self._names: dict[str, SimInstance] = {}
        self._draining: dict[str, object] = {}  # instance -> engine of the process that drains

    # --- what the schedule does ---

    def add(self, instance: SimInstance) -> None:
        super().add(instance)
        self._names[instance.spec.instance_id] = instance

    def die(self, name: str, for_s: float | None) -> None:
        if for_s is None:
            self._gone.add(name)
        self._end(name, "the process was killed")
        if for_s is not None:
            self._agenda.at(self._agenda.now_s + for_s, self._start, self._names[name])

    def drain(self, name: str, for_s: float, leaves: bool) -> None:
        session = self._session(name)
        if session is None or name in self._draining:
            return
        self._draining[name] = session.model
        self._say(self._hears.draining, session)
        now_s = self._agenda.now_s
        if leaves:
            self._agenda.at(now_s + LEAVE_LOOK_S, self._leave, name, session.model, now_s, for_s)
        else:
            self._agenda.at(now_s + for_s, self._resume, name, session.model)

    def _resume(self, name: str, engine: object) -> None:
        if self._drains(name, engine):
            del self._draining[name]
            session = self._session(name)
            assert session is not None
            self._say(self._hears.resumed, session)

    def _leave(self, name: str, engine: object, since_s: float, for_s: float) -> None:
        """Once nothing is here, and what was sent before the scheduler knew has come."""
        if not self._drains(name, engine):
            return
        session, waited_s = self._session(name), self._agenda.now_s - since_s
        assert session is not None
        quiet = session.slot.running is None and not session.model.stats().requests_live
        if waited_s < DRAIN_S_MAX and (not quiet or waited_s <= 2.0 * self._link_s or name in self._cut):
            at_s = self._agenda.now_s + LEAVE_LOOK_S
            self._agenda.at(at_s, self._leave, name, engine, since_s, for_s)
            return
        del self._draining[name]
        self.die(name, for_s)

    def _drains(self, name: str, engine: object) -> bool:
        """Whether that process still is there to drain."""
        session = self._session(name)
        if session is not None and session.model is engine and self._draining.get(name) is engine:
            return True
        if self._draining.get(name) is engine:
            del self._draining[name]
        return False

    def cut(self, name: str, how: str) -> None:
        if name in self._cut:
            return
        self._cut[name] = how
        session = self._session(name)
        if how == "reset" and session is not None:
            self._agenda.at(self._agenda.now_s, self._front.down, session, "connection reset")
            self.sever(session)

    def heal(self, name: str) -> None:
        self._cut.pop(name, None)
        session = self._session(name)
        if session is None:
            return
        held, session.held = session.held, []
        for action, args in held:
            action(*args)
        self._join(session)

    def sever(self, session: Process) -> None:
        """End a session. The process goes on alone and joins anew when it can."""
        assert isinstance(session, Session)
        if session.severed:
            return
        session.severed = True
        staged = session.slot.staged
        if staged is not None:
            session.slot.revoke(staged.pass_id)
        self._agenda.at(self._agenda.now_s, self._join, session)

    def scheduler_lost(self) -> None:
        self._away = True
        for session in list(self._processes.values()):
            self.sever(session)

    def scheduler_back(self) -> None:
        self._away = False
        for session in list(self._processes.values()):
            self._join(session)

    def sessions(self) -> list[Process]:
        return list(self._processes.values())

    @property
    def busy(self) -> bool:
        """Whether some process runs a pass or has not joined yet."""
        return any(p.slot.running is not None or self._waits(p) for p in self._processes.values())

    # --- lives ---

    def _session(self, name: str) -> Session | None:
        found = self._processes.get(name)
        assert found is None or isinstance(found, Session)
        return found

    def _start(self, instance: SimInstance) -> None:
        name = instance.spec.instance_id
        if name in self._processes or name in self._gone:
            return
        session = self._new(instance)
        session.severed = True  # until it has joined
        self._join(session)

    def _new(self, instance: SimInstance, old: Session | None = None) -> Session:
        model = instance.fresh_model() if old is None else old.model
        session = Session(instance, model, self._started, self._agenda.now_s)
        if old is None:
            self._cached[session.instance_id] = {}
        else:
            session.passes_begun = old.passes_begun
        self._started += 1
        self._processes[session.instance_id] = session
        return session

    def _waits(self, process: Process) -> bool:
        return isinstance(process, Session) and process.severed

    def _join(self, session: Process) -> None:
        """A new session in the place of `session`, whose link is gone, if it can begin now."""
        assert isinstance(session, Session)
        name = session.instance_id
        current = self._processes.get(name) is session and session.severed
        if not current or session.slot.running is not None or self._away or name in self._cut:
            return
        session.alive = False  # what is on its way to the old session is lost
        self._account_life(session)
        for request_id in sorted(session.brought):
            session.model.cancel(request_id)
        self._learn(name, session.model.kv_events())
        fresh = self._new(session.instance, session)
        if self._agenda.now_s == 0.0:
            self._front.up(fresh)
        else:
            self._say(self._front.up, fresh)
        if self._draining.get(name) is fresh.model:
            self._say(self._hears.draining, fresh)  # the next scheduler hears it too
        if self._cached[name]:
            self._say(self._hears.cache_known, fresh, (BlocksStored(tuple(self._cached[name])),))

    def _learn(self, name: str, events: tuple[KvEvent, ...]) -> None:
        cached = self._cached[name]
        for event in events:
            if isinstance(event, BlocksStored):
                cached.update(dict.fromkeys(event.block_hashes))
            else:
                for value in event.block_hashes:
                    cached.pop(value, None)

    def _end(self, name: str, error: str) -> None:
        session = self._session(name)
        if session is not None:
            self._die(session, error)

    def _die(self, process: Process, error: str) -> None:
        super()._die(process, error)  # where the link is gone, nobody hears of it

    def _killed(self, process: Process, pass_: Pass) -> None:
        """It has hung in that pass for so long that its own supervisor ends it."""
        if process.alive and process.slot.running is pass_:
            self._end(process.instance_id, "killed: no progress")
            self._agenda.at(self._agenda.now_s + BACK_S, self._start, process.instance)

    # --- links ---

    def _send(self, process: Process, action: Callable[..., None], *args: object) -> None:
        assert isinstance(process, Session)
        if process.severed:
            return
        if process.instance_id in self._cut:
            process.held.append((self._reach, (process, action, *args)))
        else:
            super()._send(process, action, *args)

    def _say(self, heard: Callable[..., None], *args: object) -> None:
        process = args[0]
        assert isinstance(process, Session)
        name, of_pass = process.instance_id, heard in (self._front.finished, self._front.failed)
        if of_pass:
            events = args[-1]
            assert isinstance(events, tuple)
            self._learn(name, events)
        if process.severed:
            return
        if name in self._cut:
            process.held.append((heard, args))
            return
        super()._say(heard, *args)
        if of_pass and any(start <= self._agenda.now_s < end for start, end in self._repeats[name]):
            self._agenda.at(self._agenda.now_s + self._link_s + 0.001, heard, *args)

    def _reach(self, process: Process, action: Callable[..., None], *args: object) -> None:
        assert isinstance(process, Session)
        if process.alive and not process.severed:
            action(process, *args)

    # --- passes ---

    def _take(self, process: Process, pass_: Pass, staged: bool, brings: list[Request]) -> None:
        assert isinstance(process, Session)
        process.brought.update(request.request_id for request in brings)
        super()._take(process, pass_, staged, brings)

    def _finish(self, process: Process) -> None:
        if not process.alive:
            return
        now_s = self._agenda.now_s
        for start_s, end_s in self._hangs[process.instance_id]:
            if start_s <= now_s < end_s and process.up_s <= start_s:  # a new process does not hang
                running = process.slot.running
                if end_s < now_s + KILLED_S:
                    self._agenda.at(end_s, self._finish, process)
                else:
                    self._agenda.at(now_s + KILLED_S, self._killed, process, running)
                return
        super()._finish(process)
        self._join_later(process)

    def _refuse(self, process: Process, error: PassError) -> None:
        super()._refuse(process, error)
        self._join_later(process)

    def _join_later(self, process: Process) -> None:
        if isinstance(process, Session) and process.severed:
            self._join(process)


def _windows(faults: Sequence[ChaosFault], kind: str, number: int) -> list[tuple[float, float]]:
    mine = (fault for fault in faults if fault.kind == kind and fault.instance == number)
    return [(f.at_s, math.inf if f.for_s is None else f.at_s + f.for_s) for f in mine]
