"""The pump: carries events into the scheduler, its commands to the workers, and tokens to their readers.

Everything happens on one event loop. Events are handed to the core as they come; one poll follows in the next
loop turn, so events of one turn are decided on together. The clock given to the core never runs backwards
and is at least the deadline that woke it, so a timer a hair early can't spin.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engines.types import EngineRequest, Pass, PassKind, PassResult
from service.core.lifecycle import InstanceState
from service.core.scheduler import PrefillScheduler
from service.core.types import (
    Abort,
    Command,
    Dispatch,
    DrainBegan,
    Event,
    InstanceDown,
    InstanceUp,
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
    Submit,
    WaitUntil,
)
from service.runtime.contract import Ended, InstanceSnapshot, Observer, RequestRecord, Snapshot, Token
from service.runtime.event_log import EventLog
from service.runtime.handle import Handle
from service.runtime.worker import Worker

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Sent:
    """A pass on its way: what it holds, which requests its worker first hears of with it, its start."""

    pass_: Pass
    new_ids: tuple[str, ...]
    start_s: float


class Pump:
    """`contract.Runtime` over workers, which may come and go while it runs (`add`, `remove`).

    needs_instance: whether the loss of the last instance is the end. In a fleet another one will come.
    broken: set to the reason once the service can't go on, because the last instance is lost or the core
        failed. Whoever runs the pump ends the process then; nothing in it restarts an engine.
    """

    def __init__(
        self,
        scheduler: PrefillScheduler,
        workers: Iterable[Worker],
        observers: Sequence[Observer] = (),
        event_log: EventLog | None = None,
        *,
        needs_instance: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self._needs_instance = needs_instance
        self._workers = {worker.instance_id: worker for worker in workers}
        self._observers = observers
        self._event_log = event_log
        self._handles: dict[str, Handle] = {}
        self._passes: dict[tuple[str, int], Sent] = {}  # by (instance, pass id)
        self._now_s = 0.0
        self._poll_pending = False
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    # --- contract.Runtime ---

    async def start(self) -> None:
        for worker in self._workers.values():
            self._join(worker)

    def add(self, worker: Worker) -> None:
        """Use one more instance from now on. Raises ValueError for an id that is already here."""
        if worker.instance_id in self._workers:
            raise ValueError(f"instance {worker.instance_id} is already here; remove it first")
        self._workers[worker.instance_id] = worker
        self._join(worker)

    def remove(self, instance_id: str, error: str = "the instance was removed") -> Worker | None:
        """Use an instance no longer; what it runs is lost to it as if it had failed, and may run elsewhere.

        Returns the worker, which is the caller's to close; None for one that is not here.
        """
        worker = self._workers.get(instance_id)
        if worker is None:
            return None
        worker.connect(lambda event: None)
        if instance_id in self.scheduler.instances:
            self.send(InstanceDown(instance_id, error))
        del self._workers[instance_id]
        return worker

    def submit(self, request: Request, engine_request: EngineRequest) -> Handle:
        """Hand a request to the scheduler. Raises ValueError for an id that is still live."""
        if request.request_id in self._handles:
            raise ValueError(f"request id {request.request_id} is already live")
        record = RequestRecord(request)
        handle = Handle(self.send, record, engine_request)
        self.send(Submit(request))  # first: the core may still hold the id in a pass that runs unheard
        self._handles[request.request_id] = handle
        known = self.scheduler.target_of(request.request_id)
        if known is not None:
            record.lane, record.ttft_target_s = known
        for observer in self._observers:
            observer.submitted(record)
        return handle

    def snapshot(self) -> Snapshot:
        core = self.scheduler
        queued, running = core.waiting_and_running()
        window_s, depth_tokens = core.policy.window()
        instances = list(core.instances.values())
        floor = core.settings.lane_floor_tokens
        loads = {lane: core.policy.lane_load(lane) for lane in Lane}
        return Snapshot(
            submitted=core.submitted,
            outcomes=dict(core.outcomes),
            queued=queued,
            running=running,
            lane_queued={lane: requests for lane, (requests, _) in loads.items()},
            lane_queued_tokens={lane: tokens for lane, (_, tokens) in loads.items()},
            window_s=window_s,
            depth_tokens=depth_tokens,
            boundary_tokens=max([floor, *(i.boundary_tokens(0) for i in instances)]),
            knee_tokens=max((i.pricer.knee_tokens for i in instances), default=0),
            draining=core.draining,
            instances=tuple(self._instance_snapshot(worker) for worker in self._workers.values()),
        )

    async def drain(self, timeout_s: float) -> int:
        self.send(DrainBegan())
        try:
            async with asyncio.timeout(timeout_s):
                while self._handles:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            log.warning("drain: %d requests were cut off after %.1f s", len(self._handles), timeout_s)
        return len(self._handles)

    async def close(self) -> None:
        """Stop. Requests that still live end as UNAVAILABLE, later ones are refused: no instance is up."""
        for instance_id in list(self.scheduler.instances):
            self.send(InstanceDown(instance_id, "the service is stopping"))
        self._poll()
        for request_id in list(self._handles):
            self._end(request_id, Outcome.UNAVAILABLE, Reason.DRAINING, "the service is stopping")
        self._event_log = None  # whoever gave it closes it next; polls may still be on their way
        self._wake_at(None)
        for worker in self._workers.values():
            worker.connect(lambda event: None)
            await worker.close()

    # --- events in ---

    def send(self, event: Event) -> None:
        """Give an event to the core now; decide on it in the next loop turn.

        Raises ValueError for a Submit that the core refuses to know. Any other fault means that core and
        runtime disagree about the state of the world: see `broken`.
        """
        now_s = self._now()
        finished = self._finished(event)
        try:
            self._note(event, now_s)
            self.scheduler.on_event(event, now_s)
        except Exception as error:
            if isinstance(event, Submit):
                raise
            self._break(error)
            return
        if self._event_log is not None:
            self._event_log.event(now_s, event)
        for request_id in finished:
            self._end(request_id, Outcome.COMPLETED)
        if isinstance(event, InstanceDown) and self._needs_instance and not self.scheduler.instances:
            self._set_broken(f"no instance is left ({event.error})")
        self._poll_soon()

    def _join(self, worker: Worker) -> None:
        worker.connect(self.send)
        self.send(InstanceUp(worker.spec))

    def _note(self, event: Event, now_s: float) -> None:
        """Keep records and passes in step with what the workers say."""
        match event:
            case PassStarted(instance_id, pass_id):
                self._pass_started(instance_id, pass_id, now_s)
            case PassFinished(instance_id, result):
                self._pass_finished(instance_id, result, now_s)
            case PassFailed(instance_id, pass_id, _, error):
                self._pass_lost(instance_id, pass_id, Reason.PASS_FAILED, error, now_s)
            case PassRevoked(instance_id, pass_id):
                self._pass_revoked(instance_id, pass_id, now_s)
            case InstanceDown(instance_id, error):
                for pass_id in [key[1] for key in self._passes if key[0] == instance_id]:
                    self._pass_lost(instance_id, pass_id, Reason.INSTANCE_LOST, error, now_s)
                for handle in self._handles.values():
                    if handle.known_on == instance_id:  # should it come back, it knows nobody
                        handle.known_on = None
            case _:
                pass

    def _break(self, error: Exception) -> None:
        """The scheduler can't be trusted any more: answer everybody, decide nothing further."""
        log.critical("the scheduler failed; every request ends here", exc_info=error)
        self._set_broken(f"the scheduler failed: {type(error).__name__}: {error}")
        self._wake_at(None)
        for request_id in list(self._handles):
            self._end(request_id, Outcome.UNAVAILABLE, Reason.DRAINING, "the scheduler failed")

    def _set_broken(self, reason: str) -> None:
        if not self.broken.done():
            self.broken.set_result(reason)

    def _poll_soon(self) -> None:
        """Poll in the next loop turn, after whatever else is due in this one."""
        if not self._poll_pending:
            self._poll_pending = True
            asyncio.get_running_loop().call_soon(self._poll)

    def _now(self) -> float:
        self._now_s = max(self._now_s, asyncio.get_running_loop().time())
        return self._now_s

    # --- commands out ---

    def _poll(self) -> None:
        self._poll_pending = False
        now_s = self._now()
        try:
            commands = self.scheduler.poll(now_s)
            if self._event_log is not None:
                self._event_log.poll(now_s, commands)
            for command in commands:
                self._carry_out(command, now_s)
        except Exception as error:
            self._break(error)

    def _carry_out(self, command: Command, now_s: float) -> None:
        match command:
            case Dispatch():
                self._dispatch(command, now_s)
            case Revoke(instance_id, pass_id, _):
                self._workers[instance_id].revoke(pass_id)
            case Abort(instance_id, request_id, _):
                self._workers[instance_id].abort(request_id)
                handle = self._handles.get(request_id)
                if handle is not None:
                    handle.known_on = None
            case Reject(request_id, outcome, reason, detail, retry_after_s):
                self._end(request_id, outcome, reason, detail, retry_after_s)
            case WaitUntil(time_s, _):
                self._wake_at(time_s)
            case _:
                self._wake_at(None)

    def _dispatch(self, command: Dispatch, now_s: float) -> None:
        pass_ = command.pass_
        for observer in self._observers:
            observer.dispatched(command, now_s)
        new_requests: list[EngineRequest] = []
        for item in pass_.items if pass_.kind is PassKind.PREFILL else ():
            handle = self._handles.get(item.request_id)
            if handle is None:
                continue  # ended between the decision and now; the pass runs unheard for it
            handle.record.pass_ids.append(pass_.pass_id)
            if handle.record.first_dispatch_reason is None:
                handle.record.first_dispatch_reason = command.reason
            if handle.known_on != command.instance_id:
                handle.known_on = command.instance_id
                new_requests.append(handle.engine_request)
        new_ids = tuple(request.request_id for request in new_requests)
        self._passes[command.instance_id, pass_.pass_id] = Sent(pass_, new_ids, now_s)
        self._workers[command.instance_id].dispatch(pass_, new_requests, staged=command.staged)

    def _wake_at(self, time_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if time_s is not None:
            self._timer = asyncio.get_running_loop().call_at(time_s, self._wake, time_s)

    def _wake(self, time_s: float) -> None:
        self._now_s = max(self._now_s, time_s)
        self._timer = None
        self._poll_soon()

    # --- records ---

    def _pass_started(self, instance_id: str, pass_id: int, now_s: float) -> None:
        sent = self._passes[instance_id, pass_id]
        sent.start_s = now_s
        for item in sent.pass_.items:
            handle = self._handles.get(item.request_id)
            if handle is not None and handle.record.first_pass_start_s is None:
                handle.record.first_pass_start_s = now_s

    def _pass_finished(self, instance_id: str, result: PassResult, now_s: float) -> None:
        sent = self._passes.pop((instance_id, result.pass_id))
        for item in result.items:
            handle = self._handles.get(item.request_id)
            if handle is None or item.error is not None:
                continue
            record = handle.record
            if item.position <= record.request.prompt_tokens:  # decode may ride in a prefill pass
                record.new_tokens += item.computed
                record.history_tokens += item.reused
                record.prefill_end_s = now_s
            if item.token is not None:
                self._token(handle, item.token, now_s, now_s - sent.start_s)
                record.finish = item.finish
        for observer in self._observers:
            observer.pass_finished(sent.pass_, result, sent.start_s, now_s)

    def _pass_revoked(self, instance_id: str, pass_id: int, now_s: float) -> None:
        """The worker never heard of the requests that the pass would have brought."""
        for request_id in self._pass_lost(instance_id, pass_id, Reason.URGENT_ARRIVAL, "", now_s).new_ids:
            handle = self._handles.get(request_id)
            if handle is not None:
                handle.known_on = None

    def _pass_lost(self, instance_id: str, pass_id: int, reason: Reason, detail: str, now_s: float) -> Sent:
        sent = self._passes.pop((instance_id, pass_id))
        for observer in self._observers:
            observer.pass_lost(sent.pass_, reason, detail, sent.start_s, now_s)
        return sent

    def _token(self, handle: Handle, token_id: int, now_s: float, pass_s: float) -> None:
        record = handle.record
        record.output_tokens += 1
        if record.first_token_s is None:
            record.first_token_s = now_s
            record.first_pass_s = pass_s
        elif record.last_token_s is not None:
            record.itl_s.append(now_s - record.last_token_s)
        record.last_token_s = now_s
        handle.put(Token(token_id))

    def _finished(self, event: Event) -> list[str]:
        """Requests that end with it; not those that the core has ended before and will say so."""
        if not isinstance(event, PassFinished):
            return []
        live = self.scheduler.live
        return [i.request_id for i in event.result.items if i.finish is not None and i.request_id in live]

    def _end(
        self,
        request_id: str,
        outcome: Outcome,
        reason: Reason | None = None,
        detail: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        handle = self._handles.pop(request_id, None)
        if handle is None:
            return
        record = handle.record
        record.outcome, record.reason, record.detail = outcome, reason, detail
        record.retry_after_s = retry_after_s
        record.end_s = self._now()
        handle.put(Ended(record))
        for observer in self._observers:
            observer.ended(record)
        if not self._handles:
            self._idle.set()

    def _instance_snapshot(self, worker: Worker) -> InstanceSnapshot:
        instance = self.scheduler.instances.get(worker.instance_id)
        state = instance.state if instance is not None else InstanceState.DOWN
        decoding = len(instance.decode.running) if instance is not None else 0
        correction = instance.correction if instance is not None else (1.0, 1.0)
        return InstanceSnapshot(worker.instance_id, state.value, decoding, worker.stats(), correction)
