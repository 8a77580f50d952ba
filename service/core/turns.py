"""Whose turn it is: which instances can take a pass, in which order they are asked, and what each takes.

*Open* is an instance that is free, or, with staging, one whose running pass ends within the lead and has
nothing staged behind it. Only the open ones are asked, in the order in which they joined, and only while
anything waits: a poll costs what can happen in it, not what there is. Of free instances that are alike
(`pools`) one can answer for all, until somebody is given a pass. Nobody is asked twice at one instant if
nothing has changed in between (a worker said that it began, which was known).

A staged pass is taken back, once, when a short newcomer that found no place makes its target only without it;
never one that an aged request leads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from sortedcontainers import SortedDict

from service.core.dispatcher import Dispatcher
from service.core.lifecycle import RequestState
from service.core.policy import InFlight, Instance, PassPlan, PrefillPolicy, Wait
from service.core.pools import Group, HasPools, Pools
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Command, Lane, Reason, Revoke


class Turns:
    """Passes go out through `dispatcher`, revokes through `emit`."""

    def __init__(
        self,
        settings: SchedulerSettings,
        policy: PrefillPolicy,
        dispatcher: Dispatcher,
        emit: Callable[[Command], None],
    ) -> None:
        self._lead_s = settings.stage_lead_s
        self._policy = policy
        self._dispatcher = dispatcher
        self._emit = emit
        self._pools = policy.pools if isinstance(policy, HasPools) else Pools()
        self._leading: SortedDict = SortedDict()  # place -> instance that runs, its lead begun
        self._touched: dict[int, Instance] = {}  # place -> instance, since the last poll
        self._staged: SortedDict = SortedDict()  # place -> instance with a staged pass
        self._leads: list[tuple[float, int, int, InFlight, Instance]] = []  # heap: begin, place, pass id
        self._asked_s = -math.inf
        self._changed = True  # anything, since the open ones were asked
        self._answer: Wait | None = None  # what they said

    def left(self, instance: Instance) -> None:
        self._pools.remove(instance)
        for places in (self._leading, self._touched, self._staged):
            places.pop(instance.place, None)
        self._leads = [lead for lead in self._leads if lead[4] is not instance]
        heapify(self._leads)
        self._changed = True

    def touch(self, instance: Instance) -> None:
        """`instance` is new, or its passes, its role or what it takes have changed."""
        self._touched[instance.place] = instance
        self._changed = True

    def will_ask(self, instance: Instance) -> bool:
        """Whether the next poll asks `instance` where anything waits (for checks)."""
        known = self._pools.is_idle(instance) or instance.place in self._leading
        return known or instance.place in self._touched

    def changed(self) -> None:
        """The queue or something else that plans depend on."""
        self._changed = True

    def take(self, arrivals: Sequence[Tracked], now_s: float) -> Wait | None:
        """Give the open instances their next passes; the earliest wait of those that took none."""
        for instance in self._touched.values():
            self._sort_in(instance, now_s)
        if self._leads:
            self._begin_leads(now_s)
        if self._changed or now_s != self._asked_s:
            self._asked_s, self._changed = now_s, False
            self._answer = self._ask(now_s)
        self._touched.clear()
        if self._staged and arrivals:
            self._revoke_for(arrivals, now_s)
        lead_s = self._leads[0][0] if self._leads else math.inf
        if lead_s < (self._answer.until_s if self._answer is not None else math.inf):
            return Wait(lead_s, Reason.STAGE_LATER)
        return self._answer

    # --- who is open ---

    def _sort_in(self, instance: Instance, now_s: float) -> None:
        place, running = instance.place, instance.running
        self._pools.file(instance)
        self._staged.pop(place, None)
        self._leading.pop(place, None)
        if running is None:
            return
        if instance.staged is not None:
            self._staged[place] = instance
        elif self._lead_s > 0.0 and math.isfinite(running.end_s):
            pass_id = running.pass_.pass_id
            heappush(self._leads, (running.end_s - self._lead_s, place, pass_id, running, instance))
            self._begin_leads(now_s)

    def _begin_leads(self, now_s: float) -> None:
        """Open those whose lead has begun. After it the first of `_leads` is one to wait for."""
        leads = self._leads
        while leads:
            begins_s, place, _, running, instance = leads[0]
            moot = instance.running is not running or instance.staged is not None
            if not moot and begins_s > now_s and begins_s == running.end_s - self._lead_s:
                return
            heappop(leads)
            if not moot and begins_s <= now_s:
                self._leading[place] = instance
                self._changed = True

    # --- what they take ---

    def _ask(self, now_s: float) -> Wait | None:
        answer: Wait | None = None
        served: list[Instance] = []
        passed_over = False  # somebody took nothing so far
        for each in self._pools.groups:
            each.silent = False
        place = -1
        self._pools.take_called()
        while (found := self._next_open(place)) is not None and self._anything_waits():
            instance, group = found
            place = instance.place
            if not (instance.takes_new or instance.partial or instance.decode.running):
                continue
            free = instance.running is None
            wait = self._choose(instance, now_s) if free else self._stage(instance, now_s)
            if free:
                self._pools.file(instance)
            place = int(min(place, self._pools.take_called() - 1))  # who was asked before is waited for now
            if instance.running is not None if free else instance.staged is not None:
                served.append(instance)
                self._changed = self._changed or passed_over  # who took nothing has not seen this queue
                for each in self._pools.groups:
                    each.silent = False
                continue
            passed_over = True
            if wait is None:
                continue
            if answer is None or wait.until_s < answer.until_s:
                answer = wait
            if wait.everywhere:
                break
            if wait.alike and group is not None and group.role is not None:
                group.silent = True
        for _, instance in sorted(self._touched.items()) if self._touched else ():
            if instance.running is None and instance.decode.running:
                self._choose(instance, now_s)
                served.append(instance)
        for instance in served:
            self._sort_in(instance, now_s)
        return answer

    def _next_open(self, place: int) -> tuple[Instance, Group | None] | None:
        """The first open instance that joined after `place` and that nobody has spoken for."""
        first: Instance | None = None
        of: Group | None = None
        for group in self._pools.groups:
            members = group.members
            if members and not group.silent:
                index = members.bisect_right(place)
                if index < len(members) and (first is None or members.keys()[index] < first.place):
                    first, of = members.peekitem(index)[1], group
        if self._leading:
            index = self._leading.bisect_right(place)
            if index < len(self._leading):
                leading = self._leading.peekitem(index)[1]
                if first is None or leading.place < first.place:
                    first, of = leading, None
        return None if first is None else (first, of)

    def _anything_waits(self) -> bool:
        lane_load = self._policy.lane_load
        return lane_load(Lane.SHORT)[0] > 0 or lane_load(Lane.LONG)[0] > 0

    def _choose(self, instance: Instance, start_s: float) -> Wait | None:
        """Start what comes next on a free instance; or say until when to wait."""
        instance.decode.ride()
        plan = self._policy.plan(instance, start_s)
        step = instance.decode.step() if instance.decode.running else None
        if isinstance(plan, PassPlan):
            if step is not None and instance.decode.must_step(step, plan.predicted_s, start_s):
                self._dispatcher.decode(instance, step, Reason.DECODE_DUE, start_s)
            else:
                self._dispatcher.prefill(instance, plan, start_s, staged=False)
            return None
        if step is not None:
            self._dispatcher.decode(instance, step, Reason.DECODE_ONLY, start_s)
            return None
        return plan

    def _stage(self, instance: Instance, now_s: float) -> Wait | None:
        """Stage the next prefill pass behind the running one, unless a decode step is due between them:
        that is chosen when the running pass is over, since it needs its results. Never a wait: the end of
        the running pass asks again."""
        assert instance.running is not None
        start_s = max(now_s, instance.running.end_s)
        instance.decode.ride()
        plan = self._policy.plan(instance, start_s)
        if isinstance(plan, PassPlan):
            step, rule = instance.decode.step(), instance.decode
            if step is None or not rule.must_step(step, plan.predicted_s, start_s, after_prefill=True):
                self._dispatcher.prefill(instance, plan, start_s, staged=True)
                self._pools.file(instance)
                self._pools.new_turn()  # it is free later than who looked so far was told
        return None

    def _revoke_for(self, arrivals: Sequence[Tracked], now_s: float) -> None:
        """Take staged passes back for those who came since the last poll and still wait."""
        fresh = [t for t in arrivals if t.state is RequestState.QUEUED and t.lane is Lane.SHORT]
        for instance in self._staged.values() if fresh else ():
            flight = instance.staged
            if flight is None or flight.revoking or flight.reason is Reason.AGED:
                continue  # whoever has waited for its turn keeps it
            if any(instance.makes_it_only_unstaged(tracked, now_s) for tracked in fresh):
                flight.revoking = True
                revoke = Revoke(instance.instance_id, flight.pass_.pass_id, Reason.URGENT_ARRIVAL)
                self._emit(revoke)
