"""A discrete-event kernel: the scheduling core and simulated engines in virtual time.

The twin of the asyncio runtime, with the same rules, so that both give the core the same events:

* everything due at one instant is delivered in order (see `agenda`), then the core is polled once;
* carrying out a command may emit events at once (a pass starts, a staged one is revoked), and then the core
  is polled again at the same instant;
* a wake-up moves the clock to the deadline that asked for it, never short of it;
* an engine hears of a request with the first pass that brings it, when that pass starts.

Time is a number that jumps, so nothing here waits, and the same input gives the identical result. With a
link delay there are two places: the scheduler and the records are at the front end, where every time in a
record is taken; the engines are behind the link (`cluster`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from engines.base import PassError
from engines.simulated import SimulatedModel
from engines.types import KvEvent, Pass, PassKind, PassResult
from service.core.fleet_view import observe, totals
from service.core.reconcile import Controller, RoleMove
from service.core.scheduler import PrefillScheduler
from service.core.types import (
    Abort,
    Cancel,
    Command,
    Dispatch,
    Event,
    Idle,
    InstanceDown,
    InstanceSpec,
    InstanceUp,
    KvChanged,
    Lane,
    Outcome,
    PassFailed,
    PassFinished,
    PassRevoked,
    PassStarted,
    Reason,
    Reject,
    Request,
    Revoke,
    RoleChanged,
    Submit,
    WaitUntil,
)
from service.sim.agenda import Agenda, Planned
from service.sim.cluster import Cluster, Process, SimInstance
from service.sim.result import GapHistogram, Observer, Samples, SimRecord, SimResult
from service.sim.workload import REPORT_SHORT_TOKENS, Source

__all__ = ["Observer", "SimInstance", "SimRecord", "SimResult", "run"]

POLLS_PER_INSTANT_MAX = 200  # far above any real cascade; a core that asks for more is spinning


def run(
    scheduler: PrefillScheduler,
    instances: Iterable[SimInstance | tuple[InstanceSpec, SimulatedModel]],
    arrivals: Source | Iterable[tuple[float, Request]],
    *,
    cancels: Iterable[tuple[float, str]] = (),
    token_ids: Mapping[str, tuple[int, ...]] | None = None,
    until_s: float = math.inf,
    link_s: float = 0.0,
    controller: Controller | None = None,
    observer: Observer | None = None,
    keep_log: bool = True,
    keep_records: bool = True,
    sample_s: float | None = None,
    hand_overs: HandOverSide | None = None,
) -> SimResult:
    """Drive a fresh `scheduler` until nothing is left to happen, or to `until_s`.

    instances: up from the start, or as `SimInstance` says.
    arrivals: a source, whose requests arrive at their `arrival_s`; or (seconds, request) in order of time,
        reported as short up to `REPORT_SHORT_TOKENS` prompt tokens. Either is read one ahead.
    cancels: (seconds, request id). A client can only cancel what is live, so a cancel before or after the
        life of its request is void.
    token_ids: prompts of requests that have text; the others are simulated by sizes and block hashes.
    link_s: delay between the scheduler and every worker, each way.
    controller: asked every `period_s` with what `fleet_view.observe` sees; its moves are carried out at once.
    observer: hears of every request that ends, and may stop the run.
    keep_log, keep_records: False for long runs; without records only live requests take memory.
    sample_s: period of `SimResult.samples`; None: no samples.
    hand_overs: takes the KV of prompts to the decode side; requests then end with their first token.
    Raises RuntimeError when the core polls without end at one instant; ValueError for an id that comes
    twice, arrivals out of order, and an instance that is back before the link said that it was down.
    """
    if not 0.0 <= link_s < math.inf:
        raise ValueError(f"link_s must be finite and at least 0, got {link_s}")
    front = Front(scheduler, keep_log, keep_records, observer)
    agenda = front.agenda
    front.cluster = cluster = Cluster(agenda, front, link_s, token_ids or {})
    for instance in instances:
        cluster.add(instance if isinstance(instance, SimInstance) else _given(*instance))
    for time_s, request_id in cancels:
        agenda.at(time_s, front.cancel, request_id)
    if isinstance(arrivals, Iterable):
        agenda.arrivals(_planned(arrivals))
    else:
        front.source = arrivals
        agenda.arrivals(_from_source(arrivals))
    if controller is not None:
        agenda.every(controller.period_s, Steps(front, controller).step)
    if sample_s is not None:
        front.samples = Samples()
        agenda.every(sample_s, front.sample)
    if hand_overs is not None:
        front.hand_overs = hand_overs
        hand_overs.begin(agenda, scheduler, front.freed)
    front.run(until_s)
    return front.result()


def _given(spec: InstanceSpec, model: SimulatedModel) -> SimInstance:
    return SimInstance(spec, lambda: model)


def _planned(arrivals: Iterable[tuple[float, Request]]) -> Iterator[Planned]:
    for time_s, request in arrivals:
        yield time_s, request, Lane.SHORT if request.prompt_tokens <= REPORT_SHORT_TOKENS else Lane.LONG


def _from_source(source: Source) -> Iterator[Planned]:
    while (arrival := source.next_arrival()) is not None:
        yield arrival.request.arrival_s, arrival.request, arrival.lane


class HandOverSide(Protocol):
    """Hears what becomes of the KV of prompts (`hand_over`)."""

    def begin(self, agenda: Agenda, scheduler: PrefillScheduler, freed: Callable[[], None]) -> None: ...

    def computed(self, instance_id: str, request: Request, position: int, *, whole: bool) -> None: ...

    def ended(self, request_id: str) -> None: ...

    def lost(self, instance_id: str) -> None: ...


class Front:
    """Drives the core, and keeps the records of what clients would see."""

    cluster: Cluster
    source: Source | None = None
    samples: Samples | None = None
    hand_overs: HandOverSide | None = None

    def __init__(
        self, scheduler: PrefillScheduler, keep_log: bool, keep_records: bool, observer: Observer | None
    ) -> None:
        self.agenda = Agenda(self.submit)
        self.scheduler = scheduler
        self.role_moves: list[tuple[float, RoleMove]] = []
        self._log: list[tuple[float, Event | Command]] = []
        self._records: dict[str, SimRecord] = {}
        self._known: dict[str, Process] = {}  # the process that the scheduler knows as an instance
        self._keep_log = keep_log
        self._keep_records = keep_records
        self._observer = observer
        self._itl = GapHistogram()
        self._submitted = 0
        self._stopped = False
        self._carriers: Mapping[type[Command], Callable[..., None]] = {
            Dispatch: self._dispatch,
            Revoke: self._revoke,
            Abort: self._abort,
            Reject: self._reject,
            WaitUntil: self._wait_until,
            Idle: self._idle,
        }
        self._wake_s = math.inf
        self._heard = False  # an event since the last poll
        self._polled_s = -math.inf
        self._polls_now = 0  # at that instant

    def result(self) -> SimResult:
        return SimResult(
            log=self._log,
            records=self._records,
            end_s=self.agenda.now_s,
            submitted=self._submitted,
            instances=self.cluster.figures(),
            itl=self._itl,
            role_moves=tuple(self.role_moves),
            stopped=self._stopped,
            samples=self.samples,
        )

    # --- time ---

    def run(self, until_s: float) -> None:
        agenda = self.agenda
        while (time_s := min(self._wake_s, agenda.next_s)) <= until_s and time_s < math.inf:
            for tick in agenda.ticks_until(time_s):
                tick()
                self._poll_while_asked()
            agenda.now_s = max(agenda.now_s, time_s)
            agenda.deliver()
            self._poll_while_asked()
            if self._stopped:
                return

    def _poll_while_asked(self) -> None:
        while self._heard or self._wake_s <= self.agenda.now_s:
            self._poll(self.agenda.now_s)

    def _poll(self, now_s: float) -> None:
        self._heard = False
        self._polls_now = self._polls_now + 1 if now_s == self._polled_s else 1
        self._polled_s = now_s
        commands = self.scheduler.poll(now_s)
        if self._polls_now > POLLS_PER_INSTANT_MAX:
            raise RuntimeError(f"the core spins at {now_s} s; its last commands were {commands}")
        if self._keep_log:
            self._log.extend((now_s, command) for command in commands)
        for command in commands:
            self._carriers[type(command)](command)

    # --- events in ---

    def emit(self, event: Event) -> None:
        now_s = self.agenda.now_s
        if self._keep_log:
            self._log.append((now_s, event))
        self.scheduler.on_event(event, now_s)
        self._heard = True

    def submit(self, request: Request, lane: Lane) -> None:
        if request.request_id in self._records:
            raise ValueError(f"arrivals: request id {request.request_id} comes twice")
        self._records[request.request_id] = SimRecord(request, lane)
        self._submitted += 1
        self.emit(Submit(request))

    def cancel(self, request_id: str) -> None:
        record = self._records.get(request_id)
        if record is not None and record.outcome is None:
            self.emit(Cancel(request_id))

    def freed(self) -> None:
        """Blocks of an instance are free without an event of the core."""
        self._heard = True

    # --- commands out ---

    def _dispatch(self, command: Dispatch) -> None:
        process, pass_ = self._known[command.instance_id], command.pass_
        self.cluster.dispatch(process, pass_, self._brought(process, pass_), staged=command.staged)

    def _revoke(self, command: Revoke) -> None:
        self.cluster.revoke(self._known[command.instance_id], command.pass_id)

    def _abort(self, command: Abort) -> None:
        self.cluster.abort(self._known[command.instance_id], command.request_id)
        if command.request_id in self._records:
            self._records[command.request_id].known_on = None

    def _reject(self, command: Reject) -> None:
        self._end(command.request_id, command.outcome, command.reason)
        if self.hand_overs is not None:
            self.hand_overs.ended(command.request_id)

    def _wait_until(self, command: WaitUntil) -> None:
        self._wake_s = command.time_s

    def _idle(self, command: Idle) -> None:
        self._wake_s = math.inf

    def _brought(self, process: Process, pass_: Pass) -> list[Request]:
        """The requests that the engine hears of with this pass."""
        brings: list[Request] = []
        for item in pass_.items if pass_.kind is PassKind.PREFILL else ():
            record = self._records.get(item.request_id)
            if record is not None and record.known_on != process.number:
                record.known_on = process.number
                brings.append(record.request)
        return brings

    def _end(self, request_id: str, outcome: Outcome, reason: Reason | None = None) -> None:
        record = self._records[request_id]
        record.outcome, record.reason, record.end_s = outcome, reason, self.agenda.now_s
        if not self._keep_records:
            del self._records[request_id]
        if self._observer is not None and self._observer.ended(record):
            self._stopped = True
        if self.source is not None:
            self._ask_for_more(self.source, record.request)

    def _ask_for_more(self, source: Source, request: Request) -> None:
        now_s = self.agenda.now_s
        for arrival in source.ended(request, now_s):
            if arrival.request.arrival_s < now_s:
                raise ValueError(
                    f"arrivals: {arrival.request.request_id} is due at {arrival.request.arrival_s} s, before "
                    f"{request.request_id} ended at {now_s} s"
                )
            self.agenda.at(arrival.request.arrival_s, self.submit, arrival.request, arrival.lane)

    # --- what is heard from workers ---

    def up(self, process: Process) -> None:
        self._known[process.instance_id] = process
        self.emit(InstanceUp(process.instance.spec))

    def down(self, process: Process, error: str) -> None:
        if self.hand_overs is not None:
            self.hand_overs.lost(process.instance_id)
        self.emit(InstanceDown(process.instance_id, error))

    def started(self, process: Process, pass_: Pass, start_s: float) -> None:
        for item in pass_.items:
            record = self._records.get(item.request_id)
            if record is not None and record.first_pass_s is None:
                record.first_pass_s = start_s
        self.emit(PassStarted(process.instance_id, pass_.pass_id))

    def revoked(self, process: Process, pass_id: int, brought: list[Request]) -> None:
        for request in brought:
            if request.request_id in self._records:
                self._records[request.request_id].known_on = None
        self.emit(PassRevoked(process.instance_id, pass_id))

    def finished(self, process: Process, result: PassResult, kv_events: tuple[KvEvent, ...]) -> None:
        complete: list[str] = []
        prompts: list[tuple[Request, int, bool]] = []  # of whom, how far, whether whole
        for item in result.items:
            record = self._records.get(item.request_id)
            if record is None or record.outcome is not None or item.error is not None:
                continue  # ended meanwhile, or its part of the pass failed
            if item.request_id not in self.scheduler.live:
                continue  # cancelled at this very instant: its Reject comes with the next poll
            if item.position <= record.request.prompt_tokens:  # decode may ride in a prefill pass
                record.new_tokens += item.computed
                record.history_tokens += item.reused
                prompts.append((record.request, item.position, item.token is not None))
            if item.token is not None:
                self._token(record, self.agenda.now_s)
            if item.finish is not None:
                complete.append(item.request_id)
        self.emit(PassFinished(process.instance_id, result))
        for request_id in complete:
            self._end(request_id, Outcome.COMPLETED)
        if self.hand_overs is not None:
            for request, position, whole in prompts:
                self.hand_overs.computed(process.instance_id, request, position, whole=whole)
        self._kv_changed(process, kv_events)

    def failed(
        self, process: Process, pass_id: int, error: PassError, kv_events: tuple[KvEvent, ...]
    ) -> None:
        self.emit(PassFailed(process.instance_id, pass_id, error.request_ids, str(error)))
        self._kv_changed(process, kv_events)

    def _kv_changed(self, process: Process, kv_events: tuple[KvEvent, ...]) -> None:
        if kv_events:
            self.emit(KvChanged(process.instance_id, kv_events))

    def _token(self, record: SimRecord, now_s: float) -> None:
        record.output_tokens += 1
        if record.last_token_s is None:
            record.first_token_s = now_s
        else:
            self._itl.add(now_s - record.last_token_s)
        record.last_token_s = now_s

    # --- ticks ---

    def sample(self) -> None:
        assert self.samples is not None
        self.samples.take(self.scheduler, self.agenda.now_s)


class Steps:
    """The steps of a controller: what it sees each period, and its moves."""

    def __init__(self, front: Front, controller: Controller) -> None:
        self._front = front
        self._controller = controller
        self._seen = totals(front.scheduler, 0.0)

    def step(self) -> None:
        now_s = self._front.agenda.now_s
        view, self._seen = observe(self._front.scheduler, self._seen, now_s)
        for move in self._controller.step(view, now_s):
            self._front.role_moves.append((now_s, move))
            self._front.emit(RoleChanged(move.instance_id, move.role))
