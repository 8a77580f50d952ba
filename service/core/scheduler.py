"""PrefillScheduler: events and time in, commands out.

It sequences and owns nothing else: the policy owns the order of the queue, `Admission` its bounds, `KvBudget`
the promises of memory, `DecodeRule` the turns of decode, `lifecycle` the legal moves. Central queue, late
binding: a request meets an instance when that instance is about to be free.

Per instance one pass runs and at most one more is staged, revocable until it starts. A request that ends
while it is in a pass is answered at once and its blocks are freed when the pass is over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

from engines.types import ItemResult, PassKind
from service.core.dispatcher import Dispatcher
from service.core.elsewhere import Elsewhere
from service.core.lifecycle import RequestState
from service.core.membership import Membership
from service.core.policy import Instance, PrefillPolicy
from service.core.settings import LatePolicy, SchedulerSettings
from service.core.timeouts import Timeout, Timeouts
from service.core.tracked import Tracked
from service.core.turns import Turns
from service.core.types import (
    Abort,
    Cancel,
    Command,
    DrainBegan,
    Event,
    Idle,
    InstanceDown,
    InstanceDraining,
    InstanceResumed,
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
    RoleChanged,
    Submit,
    WaitUntil,
)

FAILURES_MAX = 1  # a request is run again once
_IDLE = Idle()
_WAITING = (RequestState.QUEUED, RequestState.PARTIAL)


class PrefillScheduler:
    def __init__(self, settings: SchedulerSettings, policy: PrefillPolicy) -> None:
        self.settings = settings
        self.policy = policy
        self.live: dict[str, Tracked] = {}
        self.submitted = 0
        self.outcomes: Counter[Outcome] = Counter()
        self.accepted_requests = dict.fromkeys(Lane, 0)
        self.accepted_work_s = dict.fromkeys(Lane, 0.0)  # predicted prefill of each alone
        self.draining = False
        self._unheard: dict[str, str] = {}  # ended while in a pass -> instance
        self._timeouts = Timeouts()
        self._arrivals: list[Tracked] = []  # since the last poll
        self._outbox: list[Command] = []
        self._last = WaitUntil(math.inf, Reason.DEADLINE_PASSED)  # often the same from poll to poll
        self.turns = Turns(settings, policy, Dispatcher(policy, self._emit), self._emit)
        members = self._members = Membership(settings, policy, self.turns, self._look_elsewhere)
        self.instances, self.outliers = members.instances, members.outliers
        self._elsewhere = Elsewhere(self.instances, self.turns.touch)
        self._no_instance_since_s = -math.inf
        self._handlers: Mapping[type[Event], Callable[..., None]] = {
            Submit: self._submit,
            Cancel: self._cancel,
            PassStarted: self._started,
            PassFinished: self._finished,
            PassFailed: self._failed,
            PassRevoked: self._revoked,
            InstanceUp: members.up,
            InstanceDown: self._instance_down,
            InstanceDraining: members.draining,
            InstanceResumed: members.resumed,
            RoleChanged: members.role_changed,
            KvChanged: members.kv_changed,
            DrainBegan: self._drain_began,
        }

    # --- what the drivers call ---

    def on_event(self, event: Event, now_s: float) -> None:
        self._handlers[type(event)](event, now_s)
        if type(event) is not PassStarted:
            self.turns.changed()

    def poll(self, now_s: float) -> tuple[Command, ...]:
        """Everything to be done now; the last command says when to poll again."""
        wake_s, why = self._timeouts.next_s, Reason.DEADLINE_PASSED
        if wake_s <= now_s:
            for timeout in self._timeouts.due(now_s):
                self._reject(timeout.tracked, timeout.outcome, timeout.reason, now_s)
            wake_s = self._timeouts.next_s
        late = self.policy.late(now_s)
        if late and self.settings.late_policy is LatePolicy.REFUSE:
            for tracked in late:
                if tracked.state is RequestState.QUEUED:
                    self._reject(tracked, Outcome.REJECTED_LATE, Reason.TARGET_UNREACHABLE, now_s)
            wake_s = self._timeouts.next_s
        if self.outliers.next_s < math.inf:
            for instance in self.outliers.due(now_s):
                self.turns.touch(instance)
            if self.live and self.outliers.next_s < wake_s:
                wake_s, why = self.outliers.next_s, Reason.WAITING_FOR_INSTANCE
        if not self.instances and self.live:
            wake_s, why = min((wake_s, why), (self._give_up(now_s), Reason.NO_INSTANCE))
        wait = self.turns.take(self._arrivals, now_s)
        if wait is not None and wait.until_s < wake_s:
            wake_s, why = wait.until_s, wait.reason
        self._arrivals.clear()
        if self._last.time_s != wake_s or self._last.reason is not why:
            self._last = WaitUntil(wake_s, why)
        commands, self._outbox = self._outbox, []
        return (*commands, self._last if wake_s < math.inf else _IDLE)

    def target_of(self, request_id: str) -> tuple[Lane, float | None] | None:
        """Lane and TTFT target (seconds from arrival) of a live request; None if it is not live."""
        tracked = self.live.get(request_id)
        return None if tracked is None else (tracked.lane, tracked.ttft_target_s)

    def waiting_and_running(self) -> tuple[int, int]:
        """(requests without a pass so far, the other live ones)."""
        waiting = sum(1 for t in self.live.values() if t.state is RequestState.QUEUED)
        return waiting, len(self.live) - waiting

    # --- arrivals and ends ---

    def _submit(self, event: Submit, now_s: float) -> None:
        request = event.request
        if request.request_id in self.live or request.request_id in self._unheard:
            raise ValueError(f"request id {request.request_id} is already live")
        self.submitted += 1
        tracked = (
            self._members.intake.closed(request)
            if self.draining
            else self._members.intake.admit(request, self.policy, self.submitted, now_s)
        )
        if isinstance(tracked, Reject) and tracked.outcome is Outcome.REJECTED_CAPACITY:
            tracked = self._in_place_of_others(request, now_s) or tracked
        if isinstance(tracked, Reject):
            self.outcomes[tracked.outcome] += 1
            self._emit(tracked)
            return
        self.live[request.request_id] = tracked
        self.accepted_requests[tracked.lane] += 1
        self.accepted_work_s[tracked.lane] += tracked.service_s
        self._arrivals.append(tracked)
        self.policy.add(tracked, now_s, arrival=True)
        self._bound_age(tracked, now_s)
        if request.deadline_s is not None:
            timeout = Timeout(tracked, Outcome.DEADLINE_EXCEEDED, Reason.DEADLINE_PASSED)
            self._timeouts.add(request.deadline_s, timeout)

    def _in_place_of_others(self, request: Request, now_s: float) -> Tracked | Reject | None:
        """The queue is full: its live record, where tenants that hold more than their part give way."""
        given = self._members.intake.gives_way(request, self.policy, now_s)
        for tracked in given:
            detail = f"the queue is full and tenant {tracked.request.tenant!r} holds more than its part of it"
            self._reject(tracked, Outcome.REJECTED_CAPACITY, Reason.TENANT_SHARE, now_s, detail)
        return self._members.intake.admit(request, self.policy, self.submitted, now_s) if given else None

    def _cancel(self, event: Cancel, now_s: float) -> None:
        tracked = self.live.get(event.request_id)
        if tracked is not None:
            outcome = Outcome.COMPLETED if event.finished else Outcome.CANCELLED
            self._reject(tracked, outcome, Reason.CLIENT_CANCELLED, now_s)

    def _reject(
        self, tracked: Tracked, outcome: Outcome, reason: Reason, now_s: float, detail: str = ""
    ) -> None:
        """End a live request by our decision: answer it, and free what it holds now or after its pass."""
        retry_s = self.settings.retry_after_s if outcome.name.startswith("REJECTED") else None
        self._emit(Reject(tracked.request_id, outcome, reason, detail, retry_s))
        instance = self.instances.get(tracked.instance_id or "")
        if tracked.state in _WAITING:
            self.policy.remove(tracked)
        if instance is not None:
            if instance.in_pass(tracked.request_id):
                self._unheard[tracked.request_id] = instance.instance_id
            else:
                self._free(instance, tracked.request_id, reason)
        self._end(tracked, instance, outcome)

    def _end(self, tracked: Tracked, instance: Instance | None, outcome: Outcome) -> None:
        tracked.move(RequestState.ENDED)
        self.outcomes[outcome] += 1
        del self.live[tracked.request_id]
        if instance is not None:
            instance.partial.pop(tracked.request_id, None)
            instance.decode.running.pop(tracked.request_id, None)

    def _emit(self, command: Command) -> None:
        self._outbox.append(command)

    def _give_up(self, now_s: float) -> float:
        """With no instance up, end everything once that has lasted; returns when, inf when it has."""
        give_up_s = self._no_instance_since_s + self.settings.no_instance_s_max
        if now_s < give_up_s:
            return give_up_s
        for tracked in list(self.live.values()):
            self._reject(tracked, Outcome.UNAVAILABLE, Reason.NO_INSTANCE, now_s, "no instance is up")
        return math.inf

    def _free(self, instance: Instance, request_id: str, reason: Reason) -> None:
        self._emit(Abort(instance.instance_id, request_id, reason))
        instance.kv.release(request_id)

    # --- passes ---

    def _started(self, event: PassStarted, now_s: float) -> None:
        instance = self.instances.get(event.instance_id)
        flight = instance.running if instance is not None else None
        if instance is None or flight is None or flight.pass_.pass_id != event.pass_id:
            return
        if flight.start_s != now_s:  # it is when it was expected to, as a rule
            flight.start_s = now_s
            self.turns.touch(instance)

    def _revoked(self, event: PassRevoked, now_s: float) -> None:
        instance = self.instances.get(event.instance_id)
        if instance is None or instance.staged is None or instance.staged.pass_.pass_id != event.pass_id:
            return
        flight, instance.staged = instance.staged, None
        self.turns.touch(instance)
        for item in flight.pass_.items:
            tracked = self.live.get(item.request_id)
            if tracked is None:
                self._forget_unheard(instance, item.request_id)
            else:
                self._wait_again(instance, tracked, now_s)

    def _finished(self, event: PassFinished, now_s: float) -> None:
        instance = self.instances.get(event.instance_id)
        flight = instance.running if instance is not None else None
        instance = self._over(event.instance_id, event.result.pass_id)
        if instance is None or flight is None:
            return
        completes = flight.pass_.completes
        self._elsewhere.look()
        self._members.ran(instance, flight, event.result, now_s)
        instance.busy_s += event.result.elapsed_s
        decode = event.result.kind is PassKind.DECODE
        (instance.decode.ran_step if decode else instance.decode.ran_prefill)(event.result.elapsed_s)
        for item in event.result.items:
            tracked = self.live.get(item.request_id)
            if tracked is None:
                self._forget_unheard(instance, item.request_id)
            elif item.error is not None:
                self._lose(tracked, instance, now_s, Reason.PASS_FAILED, item.error)
            elif not completes:
                instance.partial[tracked.request_id] = tracked
                self._wait_again(instance, tracked, now_s)
            else:
                self._advance(tracked, instance, item, now_s)

    def _advance(self, tracked: Tracked, instance: Instance, item: ItemResult, now_s: float) -> None:
        stuck = item.computed == 0 and item.position >= tracked.position  # less: its cache was evicted
        tracked.position = item.position
        if item.token is None:
            if stuck:
                self._lose(tracked, instance, now_s, Reason.PASS_FAILED, "the pass computed nothing")
                return
            instance.partial[tracked.request_id] = tracked
            self._wait_again(instance, tracked, now_s)
            return
        tracked.generated += 1
        tracked.last_token_s = now_s
        instance.partial.pop(tracked.request_id, None)
        if item.finish is not None:
            instance.kv.release(tracked.request_id)
            self._end(tracked, instance, Outcome.COMPLETED)
        elif tracked.state is not RequestState.DECODING:
            tracked.move(RequestState.DECODING)
            instance.decode.running[tracked.request_id] = tracked

    def _wait_again(self, instance: Instance, tracked: Tracked, now_s: float) -> None:
        """Back to the queue after a chunk or a revoked pass."""
        if tracked.request_id in instance.partial:
            if tracked.state is not RequestState.STAGED:  # a revoked pass did nothing for it: it ages on
                tracked.waiting_since_s = now_s
            tracked.move(RequestState.PARTIAL)
            tracked.service_s = instance.pricer.request_s(tracked.remaining, tracked.position)
        else:
            instance.kv.release(tracked.request_id)
            tracked.instance_id = None
            tracked.move(RequestState.QUEUED)
            self._bound_age(tracked, now_s)
        self.policy.add(tracked, now_s, arrival=False)

    def _failed(self, event: PassFailed, now_s: float) -> None:
        flight_of = self.instances.get(event.instance_id)
        flight = flight_of.running if flight_of is not None else None
        instance = self._over(event.instance_id, event.pass_id)
        if instance is None or flight is None:
            return
        instance.busy_s += now_s - min(now_s, flight.start_s)
        if self.outliers.failed(instance, now_s):
            self._members.closed(instance, now_s)
        for request_id in dict.fromkeys([*event.lost, *(i.request_id for i in flight.pass_.items)]):
            tracked = self.live.get(request_id)
            if tracked is None:
                self._forget_unheard(instance, request_id)
            elif instance.in_pass(request_id):
                continue  # its next pass has started already and will answer for it
            elif request_id in event.lost or not self._try_again(tracked, instance, now_s):
                self._lose(tracked, instance, now_s, Reason.PASS_FAILED, event.error)

    def _try_again(self, tracked: Tracked, instance: Instance, now_s: float) -> bool:
        """Whether a request whose KV outlived a failed pass goes on from where it was."""
        if tracked.failures >= FAILURES_MAX:
            return False
        if tracked.request_id in instance.partial:
            tracked.failures += 1
            self._wait_again(instance, tracked, now_s)
            return True
        tracked.failures += tracked.state is RequestState.DECODING
        return tracked.state is RequestState.DECODING

    def _over(self, instance_id: str, pass_id: int) -> Instance | None:
        """The running pass ended; the staged one runs. None for an instance or pass that is not ours."""
        instance = self.instances.get(instance_id)
        if instance is None or instance.running is None or instance.running.pass_.pass_id != pass_id:
            return None
        instance.running, instance.staged = instance.staged, None
        self.turns.touch(instance)
        if instance.running is not None:
            for item in instance.running.pass_.items:
                if item.request_id in self.live:
                    self.live[item.request_id].move(RequestState.PREFILLING)
        return instance

    def _forget_unheard(self, instance: Instance, request_id: str) -> None:
        if self._unheard.pop(request_id, None) is not None:
            self._free(instance, request_id, Reason.CLIENT_CANCELLED)

    def _lose(self, tracked: Tracked, instance: Instance, now_s: float, reason: Reason, detail: str) -> None:
        """KV is gone. Run it again, once, if the client has seen nothing; else it ends."""
        if tracked.generated > 0 or tracked.failures >= FAILURES_MAX:
            gone = reason is Reason.INSTANCE_LOST
            outcome = Outcome.UNAVAILABLE if gone else Outcome.ENGINE_FAILED
            self._reject(tracked, outcome, reason, now_s, detail)
            return
        if tracked.state in _WAITING:
            self.policy.remove(tracked)
        tracked.failures += 1
        instance.partial.pop(tracked.request_id, None)
        self._free(instance, tracked.request_id, reason)
        if tracked.position:
            tracked.service_s = instance.pricer.request_s(tracked.request.prompt_tokens, 0)
        tracked.instance_id, tracked.position = None, 0
        if reason is Reason.PASS_FAILED:
            self._elsewhere.failed(tracked, instance)
        tracked.move(RequestState.QUEUED)
        self._bound_age(tracked, now_s)
        self.policy.add(tracked, now_s, arrival=False)

    def _bound_age(self, tracked: Tracked, now_s: float) -> None:
        """Joining the queue, and again when it comes back: its earlier bound is gone once it has started."""
        age_s = now_s + self.settings.queue_age_s_max
        self._timeouts.add(age_s, Timeout(tracked, Outcome.REJECTED_CAPACITY, Reason.QUEUE_AGE))

    # --- instances ---

    def _instance_down(self, event: InstanceDown, now_s: float) -> None:
        instance = self._members.down(event.instance_id, now_s)
        if instance is None:
            return
        self._unheard = {r: i for r, i in self._unheard.items() if i != event.instance_id}
        self._no_instance_since_s = now_s
        mine = [t for t in self.live.values() if t.instance_id == event.instance_id]
        for tracked in sorted(mine, key=lambda t: t.seq):
            self._lose(tracked, instance, now_s, Reason.INSTANCE_LOST, event.error)
        gone = event.instance_id  # nothing that is still to be said reaches it
        self._outbox = [c for c in self._outbox if getattr(c, "instance_id", None) != gone]

    def _look_elsewhere(self) -> None:
        self._elsewhere.look()

    def _drain_began(self, event: DrainBegan, now_s: float) -> None:
        self.draining = True
