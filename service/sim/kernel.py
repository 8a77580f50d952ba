"""A discrete-event kernel: the scheduling core and simulated engines in virtual time.

The twin of the asyncio runtime, with the same rules, so that both give the core the same events:

* everything due at one instant is delivered in order of scheduling, then the core is polled once;
* carrying out a command may emit events at once (a pass starts, a staged one is revoked), and then the core
  is polled again at the same instant;
* a wake-up moves the clock to the deadline that asked for it, never short of it;
* an engine hears of a request with the first pass that brings it, when that pass starts.

Time is a number that jumps, so nothing here waits. Events at equal times keep the order in which they were
scheduled: the same input gives the identical log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from engines.base import EngineError, PassError
from engines.simulated import SimulatedModel
from engines.types import EngineRequest, Pass, PassKind, PassResult
from service.core.scheduler import PrefillScheduler
from service.core.slot import WorkerSlot
from service.core.types import (
    Abort,
    Cancel,
    Command,
    Dispatch,
    Event,
    InstanceDown,
    InstanceSpec,
    InstanceUp,
    KvChanged,
    Outcome,
    PassFailed,
    PassFinished,
    PassRevoked,
    PassStarted,
    Reject,
    Request,
    Revoke,
    Submit,
    WaitUntil,
)

POLLS_PER_INSTANT_MAX = 200  # far above any real cascade; a core that asks for more is spinning


@dataclass(slots=True)
class SimRecord:
    """The life of one request in virtual time (seconds), written by the kernel only."""

    request: Request
    new_tokens: int = 0  # prompt tokens computed
    history_tokens: int = 0  # prompt tokens reused
    output_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    end_s: float | None = None
    outcome: Outcome | None = None  # None: still live when the run ended
    known_on: str | None = None  # the instance whose engine holds it

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s


@dataclass(frozen=True, slots=True)
class SimResult:
    """log: (now, event or command) in the order in which they happened; empty when not asked for."""

    log: list[tuple[float, Event | Command]]
    records: dict[str, SimRecord]
    end_s: float


@dataclass(slots=True, eq=False)
class _Worker:
    spec: InstanceSpec
    model: SimulatedModel
    slot: WorkerSlot = field(default_factory=WorkerSlot)
    brings: dict[int, list[Request]] = field(default_factory=dict)  # pass id -> requests new to the engine


def run(
    scheduler: PrefillScheduler,
    instances: Iterable[tuple[InstanceSpec, SimulatedModel]],
    arrivals: Iterable[tuple[float, Request]],
    *,
    cancels: Iterable[tuple[float, str]] = (),
    token_ids: Mapping[str, tuple[int, ...]] | None = None,
    until_s: float = math.inf,
    keep_log: bool = True,
) -> SimResult:
    """Drive a fresh `scheduler` until nothing is left to happen, or to `until_s`.

    arrivals, cancels: (seconds, request) and (seconds, request id); of equal times, in the order given.
        A client can only cancel what is live, so a cancel before or after the life of its request is void.
    token_ids: prompts of requests that have text; the others are simulated by sizes and block hashes.
    Raises RuntimeError when the core polls without end at one instant, ValueError for a repeated id.
    """
    kernel = _Kernel(scheduler, instances, token_ids or {}, keep_log)
    for time_s, request in arrivals:
        kernel.at(time_s, partial(kernel.submit, request))
    for time_s, request_id in cancels:
        kernel.at(time_s, partial(kernel.cancel, request_id))
    kernel.run(until_s)
    return SimResult(kernel.log, kernel.records, kernel.now_s)


class _Kernel:
    def __init__(
        self,
        scheduler: PrefillScheduler,
        instances: Iterable[tuple[InstanceSpec, SimulatedModel]],
        token_ids: Mapping[str, tuple[int, ...]],
        keep_log: bool,
    ) -> None:
        self.now_s = 0.0
        self.log: list[tuple[float, Event | Command]] = []
        self.records: dict[str, SimRecord] = {}
        self._scheduler = scheduler
        self._token_ids = token_ids
        self._keep_log = keep_log
        self._workers = {spec.instance_id: _Worker(spec, model) for spec, model in instances}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._wake_s = math.inf
        self._heard = False  # an event since the last poll
        self._polls_now = 0  # at this instant
        for worker in self._workers.values():
            self.at(0.0, partial(self.emit, InstanceUp(worker.spec)))

    # --- time ---

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heappush(self._heap, (time_s, self._scheduled, action))
        self._scheduled += 1

    def run(self, until_s: float) -> None:
        while (time_s := self._next_s()) <= until_s and math.isfinite(time_s):
            if time_s > self.now_s:
                self.now_s, self._polls_now = time_s, 0
            while self._heap and self._heap[0][0] <= self.now_s:
                heappop(self._heap)[2]()
            while self._heard or self._wake_s <= self.now_s:
                self._poll()

    def _next_s(self) -> float:
        return min(self._wake_s, self._heap[0][0]) if self._heap else self._wake_s

    def _poll(self) -> None:
        self._heard = False
        self._polls_now += 1
        commands = self._scheduler.poll(self.now_s)
        if self._polls_now > POLLS_PER_INSTANT_MAX:
            raise RuntimeError(f"the core spins at {self.now_s} s; its last commands were {commands}")
        for command in commands:
            self._note(command)
        for command in commands:
            self._carry_out(command)

    def _note(self, entry: Event | Command) -> None:
        if self._keep_log:
            self.log.append((self.now_s, entry))

    # --- events in ---

    def emit(self, event: Event) -> None:
        self._note(event)
        self._scheduler.on_event(event, self.now_s)
        self._heard = True

    def submit(self, request: Request) -> None:
        if request.request_id in self.records:
            raise ValueError(f"arrivals: request id {request.request_id} comes twice")
        self.records[request.request_id] = SimRecord(request)
        self.emit(Submit(request))

    def cancel(self, request_id: str) -> None:
        record = self.records.get(request_id)
        if record is not None and record.outcome is None:
            self.emit(Cancel(request_id))

    # --- commands out ---

    def _carry_out(self, command: Command) -> None:
        match command:
            case Dispatch(instance_id, pass_, staged):
                self._dispatch(self._workers[instance_id], pass_, staged)
            case Revoke(instance_id, pass_id, _):
                self._revoke(self._workers[instance_id], pass_id)
            case Abort(instance_id, request_id, _):
                self._workers[instance_id].model.cancel(request_id)
                self.records[request_id].known_on = None
            case Reject(request_id, outcome):
                self._end(request_id, outcome)
            case WaitUntil(time_s, _):
                self._wake_s = time_s
            case _:
                self._wake_s = math.inf

    def _dispatch(self, worker: _Worker, pass_: Pass, staged: bool) -> None:
        brings: list[Request] = []
        for item in pass_.items if pass_.kind is PassKind.PREFILL else ():
            record = self.records[item.request_id]
            if record.known_on != worker.spec.instance_id:
                record.known_on = worker.spec.instance_id
                brings.append(record.request)
        worker.slot.dispatch(pass_, staged)
        worker.brings[pass_.pass_id] = brings
        self._start_next(worker)

    def _revoke(self, worker: _Worker, pass_id: int) -> None:
        if worker.slot.revoke(pass_id):
            for request in worker.brings.pop(pass_id):
                self.records[request.request_id].known_on = None
            self.emit(PassRevoked(worker.spec.instance_id, pass_id))

    def _end(self, request_id: str, outcome: Outcome) -> None:
        record = self.records[request_id]
        record.outcome, record.end_s = outcome, self.now_s

    # --- passes ---

    def _start_next(self, worker: _Worker) -> None:
        pass_ = worker.slot.start_next()
        if pass_ is None:
            return
        self.emit(PassStarted(worker.spec.instance_id, pass_.pass_id))
        try:
            for request in worker.brings.pop(pass_.pass_id):
                self._introduce(worker.model, request)
            end_s = self.now_s + worker.model.begin(pass_)
        except (KeyError, ValueError) as error:  # refused before anything ran
            refusal = PassError(f"{type(error).__name__}: {error}", ())
            self.at(self.now_s, partial(self._answer, worker, refusal))
        else:
            self.at(end_s, partial(self._finish, worker))

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

    def _finish(self, worker: _Worker) -> None:
        try:
            self._answer(worker, worker.model.finish())
        except (PassError, EngineError) as error:
            self._answer(worker, error)

    def _answer(self, worker: _Worker, outcome: PassResult | PassError | EngineError) -> None:
        """The running pass is over: tell the core, and go on with the staged one."""
        pass_, instance_id = worker.slot.finish(), worker.spec.instance_id
        if isinstance(outcome, EngineError):
            self.emit(InstanceDown(instance_id, f"{type(outcome).__name__}: {outcome}"))
            return
        if isinstance(outcome, PassError):
            self.emit(PassFailed(instance_id, pass_.pass_id, outcome.request_ids, str(outcome)))
        else:
            self._record(outcome)
            self.emit(PassFinished(instance_id, outcome))
            self._end_finished(outcome)
        kv_events = worker.model.kv_events()
        if kv_events:
            self.emit(KvChanged(instance_id, kv_events))
        self._start_next(worker)

    def _record(self, result: PassResult) -> None:
        for item in result.items:
            record = self.records[item.request_id]
            if record.outcome is not None or item.error is not None:
                continue  # ended meanwhile, or its part of the pass failed
            if result.kind is PassKind.PREFILL:
                record.new_tokens += item.computed
                record.history_tokens += item.reused
            if item.token is not None:
                record.output_tokens += 1
                record.last_token_s = self.now_s
                if record.first_token_s is None:
                    record.first_token_s = self.now_s

    def _end_finished(self, result: PassResult) -> None:
        for item in result.items:
            if item.finish is not None and self.records[item.request_id].outcome is None:
                self._end(item.request_id, Outcome.COMPLETED)
