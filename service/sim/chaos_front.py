"""The front end and the driver of a chaos run: what a scheduler process does about faults, and its books.

It is the kernel's front end with a memory of sessions. What comes from a session that is over, or about a
pass that is not under way, is stale: the core is told of it all the same where it is the same scheduler (it
must not mind), but no token is taken from it. A scheduler that restarts remembers nothing; the front end
sends what had emitted nothing again, once, and ends the rest as UNAVAILABLE.

The books of clients are kept here and assert as they go: one answer each, and no token after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from engines.base import PassError
from engines.types import KvEvent, Pass, PassResult
from service.core.fleet_view import observe, totals
from service.core.lifecycle import InstanceState
from service.core.progress import ProgressWatch
from service.core.reconcile import Controller
from service.core.scheduler import PrefillScheduler
from service.core.types import (
    Dispatch,
    Event,
    InstanceDown,
    InstanceDraining,
    InstanceResumed,
    KvChanged,
    Lane,
    Outcome,
    PassFailed,
    PassFinished,
    Reason,
    Request,
    RoleChanged,
    Submit,
)
from service.sim.chaos_cluster import ChaosCluster
from service.sim.cluster import Process
from service.sim.kernel import Front
from service.sim.result import SimRecord

CHUNK_TOKENS_MIN = 128  # a chunk of a prompt is no smaller, its last one aside
JOIN_S = 0.05  # a new scheduler waits so long for workers before it is sent requests again


class ChaosFront(Front):
    """make: a fresh scheduler. checked: called after each poll (laws). quiet_s: when the last planned thing
    is over."""

    cluster: ChaosCluster

    def __init__(
        self, make: Callable[[], PrefillScheduler], checked: Callable[[ChaosFront], None], quiet_s: float
    ) -> None:
        super().__init__(make(), keep_log=True, keep_records=True, observer=None)
        self._make = make
        self._checked = checked
        self._quiet_s = quiet_s
        self.away = False
        self.restarts = 0
        self._pending: dict[str, Request] = {}  # to be sent to the scheduler that comes
        self._again: set[str] = set()  # sent twice already
        self._under_way: dict[tuple[int, int], float] = {}  # (process, pass) -> sent at
        self._watch = ProgressWatch(self.scheduler.settings)
        self.at_birth = totals(self.scheduler, 0.0)
        self.pass_s_max = 0.0  # longest wait for a pass so far
        self.disturbed_s = 0.0  # when instances last came, went or stood still
        self.passes_ahead: dict[str, int] = {}  # of those that were live when a request came
        self.passes_so_far = 0  # of all that came
        self.declared_down = 0
        self.stale = 0
        self.agenda.at(self._watch.period_s, self._look)

    @property
    def records(self) -> dict[str, SimRecord]:
        return self._records

    @property
    def log(self) -> list[tuple[float, object]]:
        return list(self._log)

    @property
    def live(self) -> list[SimRecord]:
        return [record for record in self._records.values() if record.outcome is None]

    # --- the scheduler goes and comes ---

    def restart(self, for_s: float) -> None:
        if self.away:
            return
        self.away, self._wake_s, self._heard = True, math.inf, False
        self.restarts += 1
        self._known.clear()
        self._under_way.clear()
        self.cluster.scheduler_lost()
        for record in self.live:
            request = record.request
            if request.request_id in self._pending:
                continue  # the scheduler that is gone now was not sent it yet
            if record.output_tokens or request.request_id in self._again:
                self._end(request.request_id, Outcome.UNAVAILABLE, Reason.INSTANCE_LOST)
            else:
                self._again.add(request.request_id)
                self._pending[request.request_id] = request
        self.agenda.at(self.agenda.now_s + for_s, self._back)

    def _back(self) -> None:
        self.away = False
        self.scheduler = self._make()
        self._watch = ProgressWatch(self.scheduler.settings)
        self.at_birth = totals(self.scheduler, self.agenda.now_s)
        self.disturbed_s = self.agenda.now_s
        self.cluster.scheduler_back()
        self.agenda.at(self.agenda.now_s + JOIN_S, self._send_again)

    def _send_again(self) -> None:
        if self.away:
            return
        pending, self._pending = self._pending, {}
        for request_id, request in pending.items():
            self._records[request_id].known_on = None
            self.emit(Submit(request))

    # --- events in ---

    def emit(self, event: Event) -> None:
        if self.away:
            return
        if isinstance(event, Submit):
            live = (tracked.request for tracked in self.scheduler.live.values())
            self.passes_ahead[event.request.request_id] = sum(map(_passes, live))
            self.passes_so_far += _passes(event.request)
        super().emit(event)

    def submit(self, request: Request, lane: Lane) -> None:
        super().submit(request, lane)
        if self.away:
            self._end(request.request_id, Outcome.UNAVAILABLE, Reason.NO_INSTANCE)

    def cancel(self, request_id: str) -> None:
        record = self._records.get(request_id)
        if record is None or record.outcome is not None:
            return
        if self._pending.pop(request_id, None) is not None:
            self._end(request_id, Outcome.CANCELLED, Reason.CLIENT_CANCELLED)
        else:
            super().cancel(request_id)

    def role(self, name: str, role: str) -> None:
        if name in self.scheduler.instances:
            self.emit(RoleChanged(name, type(self.scheduler.instances[name].role)(role)))

    def stall(self, for_s: float) -> None:
        self.agenda.now_s += for_s
        self.disturbed_s = self.agenda.now_s

    def _look(self) -> None:
        """The progress rule, as long as anything is to be waited for."""
        now_s = self.agenda.now_s
        for hung in () if self.away else self._watch.look(self.scheduler.instances.values(), now_s):
            process = self._known[hung.instance_id]
            self.declared_down += 1
            self.down(process, f"no progress for {hung.waited_s:.3f} s")
            self.cluster.sever(process)
        if not self.away and self.scheduler.live and not self.scheduler.instances:
            allowed_s = self.scheduler.settings.no_instance_s_max + self._watch.period_s
            assert now_s - self.disturbed_s <= allowed_s, "nobody gives up though no instance is up"
        if now_s < self._quiet_s or self.live or self.cluster.busy:
            self.agenda.at(now_s + self._watch.period_s, self._look)

    # --- what is heard ---

    def _current(self, process: Process) -> bool:
        return self._known.get(process.instance_id) is process

    def up(self, process: Process) -> None:
        if self.away or not process.alive:
            return
        old = self._known.get(process.instance_id)
        if old is not None:
            self.down(old, "it has begun anew")
        self.disturbed_s = self.agenda.now_s
        super().up(process)

    def down(self, process: Process, error: str) -> None:
        if not self._current(process):
            return
        del self._known[process.instance_id]
        self._under_way = {k: at_s for k, at_s in self._under_way.items() if k[0] != process.number}
        self.disturbed_s = self.agenda.now_s
        self.emit(InstanceDown(process.instance_id, error))

    def started(self, process: Process, pass_: Pass, start_s: float) -> None:
        if self._current(process):
            super().started(process, pass_, start_s)

    def revoked(self, process: Process, pass_id: int, brought: list[Request]) -> None:
        if self._current(process) and self._under_way.pop((process.number, pass_id), None) is not None:
            super().revoked(process, pass_id, brought)

    def finished(self, process: Process, result: PassResult, kv_events: tuple[KvEvent, ...]) -> None:
        if self._is_fresh(process, result.pass_id):
            super().finished(process, result, kv_events)
        else:
            self._tell_stale(PassFinished(process.instance_id, result))

    def failed(
        self, process: Process, pass_id: int, error: PassError, kv_events: tuple[KvEvent, ...]
    ) -> None:
        if self._is_fresh(process, pass_id):
            super().failed(process, pass_id, error, kv_events)
        else:
            lost = error.request_ids
            self._tell_stale(PassFailed(process.instance_id, pass_id, lost, str(error)))

    def cache_known(self, process: Process, events: tuple[KvEvent, ...]) -> None:
        if self._current(process):
            self.emit(KvChanged(process.instance_id, events))

    def draining(self, process: Process) -> None:
        if self._current(process):
            self.disturbed_s = self.agenda.now_s
            self.emit(InstanceDraining(process.instance_id))

    def resumed(self, process: Process) -> None:
        if self._current(process):
            self.disturbed_s = self.agenda.now_s
            self.emit(InstanceResumed(process.instance_id))

    def _is_fresh(self, process: Process, pass_id: int) -> bool:
        sent_s = self._under_way.pop((process.number, pass_id), None)
        if sent_s is None or not self._current(process):
            return False
        self.pass_s_max = max(self.pass_s_max, self.agenda.now_s - sent_s)
        return True

    def _tell_stale(self, event: Event) -> None:
        """From another session. Another scheduler numbers its passes anew, so nothing is said to that."""
        self.stale += 1
        if not self.restarts:
            self.emit(event)

    # --- commands out ---

    def _poll_while_asked(self) -> None:
        if self.away:
            self._heard, self._wake_s = False, math.inf
            return
        super()._poll_while_asked()

    def _poll(self, now_s: float) -> None:
        super()._poll(now_s)
        self._checked(self)

    def _dispatch(self, command: Dispatch) -> None:
        process = self._known[command.instance_id]
        if self.scheduler.instances[command.instance_id].state is InstanceState.DRAINING:
            self._check_drained(command.pass_, process)
        self._under_way[process.number, command.pass_.pass_id] = self.agenda.now_s
        super()._dispatch(command)

    def _check_drained(self, pass_: Pass, process: Process) -> None:
        """An instance that drains is sent nothing new."""
        for item in pass_.items:
            record = self._records.get(item.request_id)
            assert record is None or record.known_on == process.number, (
                f"{process.instance_id} drains and is sent {item.request_id}"
            )

    def _end(self, request_id: str, outcome: Outcome, reason: Reason | None = None) -> None:
        assert self._records[request_id].outcome is None, f"{request_id} is answered twice"
        super()._end(request_id, outcome, reason)

    def _token(self, record: SimRecord, now_s: float) -> None:
        assert record.outcome is None, f"{record.request.request_id}: a token after its end"
        super()._token(record, now_s)
        asked = record.request.max_new_tokens
        assert record.output_tokens <= asked, f"{record.request.request_id}: more tokens than it asked for"


def _passes(request: Request) -> int:
    """How many passes a request may take, at most."""
    return request.prompt_tokens // CHUNK_TOKENS_MIN + 1 + request.max_new_tokens


class ChaosSteps:
    """A controller that is away now and then, and that finds a new scheduler where one restarted."""

    def __init__(self, front: ChaosFront, controller: Controller) -> None:
        self._front, self._controller = front, controller
        self._of = front.scheduler
        self._seen = front.at_birth
        self.away_until_s = -math.inf

    def away(self, for_s: float) -> None:
        self.away_until_s = max(self.away_until_s, self._front.agenda.now_s + for_s)

    def step(self, now_s: float | None = None) -> int:
        """Look and move; how many instances were moved. now_s: not the present, after the end of a run."""
        front = self._front
        late = front.agenda.now_s if now_s is None else now_s
        if front.away or (now_s is None and late < self.away_until_s):
            return 0
        if self._of is not front.scheduler:
            self._of, self._seen = front.scheduler, front.at_birth
        view, self._seen = observe(front.scheduler, self._seen, late)
        moves = self._controller.step(view, late)
        for move in moves:
            front.role_moves.append((late, move))
            front.emit(RoleChanged(move.instance_id, move.role))
        return len(moves)

    def tick(self) -> None:
        self.step()
