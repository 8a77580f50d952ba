"""Simulated instances: when each is up, how fast it runs, and the workers behind the link.

An instance has lives. Each start is a new process with an empty engine; a kill ends it in the middle of
whatever runs. Speed is a factor on the time of a pass, fixed when the pass starts: a step function of time
(a power cap), times a factor for the first passes of a life (a cold start).

The link delays every command on its way to a worker and everything that a worker says, each by `link_s`, and
keeps their order. What is on its way to a process that has died is lost.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from engines.base import EngineError, PassError
from engines.simulated import SimulatedModel
from engines.types import EngineRequest, KvEvent, Pass, PassKind, PassResult
from service.core.slot import WorkerSlot
from service.core.types import InstanceSpec, Request
from service.sim.agenda import Agenda
from service.sim.result import InstanceFigures


@dataclass(frozen=True, slots=True)
class SimInstance:
    """One instance of a run.

    make_model: a fresh engine for each life; None: `SimulatedModel` of the spec.
    up_s: when it first joins. Instances with 0 are known to the scheduler from the start.
    outages: (killed at, up again at), ascending; inf for never again.
    speed: (from, factor on pass times), ascending; the factor is 1 before the first.
    cold_passes: passes after each start that take `cold_factor` times as long.
    """

    spec: InstanceSpec
    make_model: Callable[[], SimulatedModel] | None = None
    up_s: float = 0.0
    outages: tuple[tuple[float, float], ...] = ()
    speed: tuple[tuple[float, float], ...] = ()
    cold_passes: int = 0
    cold_factor: float = 1.0

    def __post_init__(self) -> None:
        name = self.spec.instance_id
        moments = [self.up_s, *(moment for outage in self.outages for moment in outage)]
        if any(later <= earlier for earlier, later in pairwise(moments)):
            raise ValueError(f"{name}: up_s and outages must ascend, got {moments}")
        if not 0.0 <= self.up_s < math.inf:
            raise ValueError(f"{name}: up_s must be a moment of the run, got {self.up_s}")
        steps = [from_s for from_s, _ in self.speed]
        if steps != sorted(set(steps)):
            raise ValueError(f"{name}: the steps of speed must ascend, got {steps}")
        if any(not 0.0 < factor < math.inf for factor in (self.cold_factor, *(f for _, f in self.speed))):
            raise ValueError(f"{name}: speed and cold_factor must be above 0 and finite")

    @property
    def lives(self) -> tuple[tuple[float, float], ...]:
        """(up from, killed at), inf for never; lives that never begin are left out."""
        starts = [self.up_s, *(up_s for _, up_s in self.outages)]
        ends = [*(down_s for down_s, _ in self.outages), math.inf]
        return tuple((up_s, down_s) for up_s, down_s in zip(starts, ends, strict=True) if up_s < math.inf)

    def fresh_model(self) -> SimulatedModel:
        if self.make_model is not None:
            return self.make_model()
        return SimulatedModel(self.spec.capabilities, self.spec.profiles, self.spec.cost)

    def factor(self, passes_before: int, now_s: float) -> float:
        """On the time of a pass that starts now, the `passes_before` + 1st of its life."""
        cold = self.cold_factor if passes_before < self.cold_passes else 1.0
        step = bisect_right(self.speed, (now_s, math.inf)) - 1
        return cold * self.speed[step][1] if step >= 0 else cold


@dataclass(slots=True, eq=False)
class Process:
    """One life of an instance: its engine and its slot.

    number: counts processes over the whole run. brings: pass id -> requests that are new to the engine.
    """

    instance: SimInstance
    model: SimulatedModel
    number: int
    up_s: float
    slot: WorkerSlot = field(default_factory=WorkerSlot)
    brings: dict[int, list[Request]] = field(default_factory=dict)
    alive: bool = True
    passes_begun: int = 0
    started_s: float = 0.0  # of the running pass
    factor: float = 1.0  # on the time of the running pass

    @property
    def instance_id(self) -> str:
        return self.instance.spec.instance_id


class FrontEnd(Protocol):
    """What workers say, as it is heard at the other end of the link."""

    def up(self, process: Process) -> None: ...

    def started(self, process: Process, pass_: Pass, start_s: float) -> None: ...

    def revoked(self, process: Process, pass_id: int, brought: list[Request]) -> None: ...

    def finished(self, process: Process, result: PassResult, kv_events: tuple[KvEvent, ...]) -> None: ...

    def failed(
        self, process: Process, pass_id: int, error: PassError, kv_events: tuple[KvEvent, ...]
    ) -> None: ...

    def down(self, process: Process, error: str) -> None: ...


class Cluster:
    """All workers. Commands are methods; answers go to the front end."""

    def __init__(
        self, agenda: Agenda, front: FrontEnd, link_s: float, token_ids: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._agenda = agenda
        self._front = front
        self._link_s = link_s
        self._token_ids = token_ids
        self._processes: dict[str, Process] = {}  # those up now, by instance
        self._started = 0
        self._figures: dict[str, InstanceFigures] = {}

    def add(self, instance: SimInstance) -> None:
        """Plan the lives of an instance. Raises ValueError for an id that comes twice."""
        name = instance.spec.instance_id
        if name in self._figures:
            raise ValueError(f"instances: {name} comes twice")
        if any(up_s - down_s <= self._link_s for down_s, up_s in instance.outages):
            raise ValueError(f"{name}: an outage must last longer than link_s ({self._link_s} s)")
        self._figures[name] = InstanceFigures(name)
        for up_s, down_s in instance.lives:
            self._agenda.early(up_s, self._start, instance)
            if down_s < math.inf:
                self._agenda.early(down_s, self._kill, instance)

    def figures(self) -> tuple[InstanceFigures, ...]:
        """What every instance did, up to now. To be asked once, at the end."""
        for process in self._processes.values():
            self._account_life(process)
        return tuple(self._figures.values())

    # --- commands, sent over the link ---

    def dispatch(self, process: Process, pass_: Pass, brings: list[Request], *, staged: bool) -> None:
        self._send(process, self._take, pass_, staged, brings)

    def revoke(self, process: Process, pass_id: int) -> None:
        self._send(process, self._drop, pass_id)

    def abort(self, process: Process, request_id: str) -> None:
        self._send(process, self._forget, request_id)

    def _send(self, process: Process, action: Callable[..., None], *args: object) -> None:
        if self._link_s == 0.0:
            self._reach(process, action, *args)
        else:
            self._agenda.at(self._agenda.now_s + self._link_s, self._reach, process, action, *args)

    def _reach(self, process: Process, action: Callable[..., None], *args: object) -> None:
        if process.alive:
            action(process, *args)

    def _say(self, heard: Callable[..., None], *args: object) -> None:
        if self._link_s == 0.0:
            heard(*args)
        else:
            self._agenda.at(self._agenda.now_s + self._link_s, heard, *args)

    # --- lives ---

    def _start(self, instance: SimInstance) -> None:
        now_s = self._agenda.now_s
        process = Process(instance, instance.fresh_model(), self._started, now_s)
        self._started += 1
        self._processes[process.instance_id] = process
        if now_s == 0.0:
            self._front.up(process)
        else:
            self._say(self._front.up, process)

    def _kill(self, instance: SimInstance) -> None:
        process = self._processes.get(instance.spec.instance_id)
        if process is not None:  # else its engine was lost before
            self._die(process, "the process was killed")

    def _die(self, process: Process, error: str) -> None:
        process.alive = False
        self._account_life(process)
        del self._processes[process.instance_id]
        self._say(self._front.down, process, error)

    def _account_life(self, process: Process) -> None:
        now_s = self._agenda.now_s
        self._figures[process.instance_id].up_s += now_s - process.up_s
        running = process.slot.running
        if running is not None:
            self._account_time(process, running.kind, now_s - process.started_s)

    def _account_time(self, process: Process, kind: PassKind, elapsed_s: float) -> None:
        figures = self._figures[process.instance_id]
        if kind is PassKind.PREFILL:
            figures.prefill_s += elapsed_s
        else:
            figures.decode_s += elapsed_s

    # --- passes ---

    def _take(self, process: Process, pass_: Pass, staged: bool, brings: list[Request]) -> None:
        process.slot.dispatch(pass_, staged)
        process.brings[pass_.pass_id] = brings
        self._start_next(process)

    def _drop(self, process: Process, pass_id: int) -> None:
        if process.slot.revoke(pass_id):
            self._say(self._front.revoked, process, pass_id, process.brings.pop(pass_id))

    def _forget(self, process: Process, request_id: str) -> None:
        process.model.cancel(request_id)

    def _start_next(self, process: Process) -> None:
        pass_ = process.slot.start_next()
        if pass_ is None:
            return
        now_s = self._agenda.now_s
        process.started_s = now_s
        self._say(self._front.started, process, pass_, now_s)
        try:
            for request in process.brings.pop(pass_.pass_id):
                self._introduce(process.model, request)
            duration_s = process.model.begin(pass_)
        except (KeyError, ValueError) as error:  # refused before anything ran
            refusal = PassError(f"{type(error).__name__}: {error}", ())
            self._agenda.at(now_s, self._refuse, process, refusal)
            return
        process.factor = process.instance.factor(process.passes_begun, now_s)
        process.passes_begun += 1
        self._agenda.at(now_s + duration_s * process.factor, self._finish, process)

    def _introduce(self, model: SimulatedModel, request: Request) -> None:
        ids, retain = self._token_ids.get(request.request_id), bool(request.session)
        if ids is not None:
            model.submit(EngineRequest(request.request_id, ids, request.max_new_tokens, retain=retain))
            return
        model.submit_sizes(
            request.request_id,
            request.prompt_tokens,
            request.max_new_tokens,
            request.block_hashes,
            retain=retain,
        )

    def _finish(self, process: Process) -> None:
        if not process.alive:
            return
        try:
            result = process.model.finish()
        except PassError as error:
            self._refuse(process, error)
            return
        except EngineError as error:
            self._die(process, f"{type(error).__name__}: {error}")
            return
        process.slot.finish()
        if process.factor != 1.0:
            result = replace(result, elapsed_s=result.elapsed_s * process.factor)
        self._account(process, result)
        self._say(self._front.finished, process, result, process.model.kv_events())
        self._start_next(process)

    def _refuse(self, process: Process, error: PassError) -> None:
        """The running pass failed; the engine goes on."""
        if not process.alive:
            return
        pass_ = process.slot.finish()
        self._account_time(process, pass_.kind, self._agenda.now_s - process.started_s)
        self._figures[process.instance_id].failed_passes += 1
        self._say(self._front.failed, process, pass_.pass_id, error, process.model.kv_events())
        self._start_next(process)

    def _account(self, process: Process, result: PassResult) -> None:
        figures = self._figures[process.instance_id]
        if result.kind is PassKind.DECODE:
            figures.decode_s += result.elapsed_s
            figures.decode_passes += 1
            figures.decode_tokens += sum(1 for item in result.items if item.token is not None)
            return
        figures.prefill_s += result.elapsed_s
        figures.prefill_passes += 1
        figures.executed_tokens += result.executed_tokens
        for item in result.items:
            figures.new_tokens += item.computed
            figures.reused_tokens += item.reused
