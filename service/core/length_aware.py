"""The `plaserve` policy: two lanes, AWD on the short one, long prompts in chunks that fit between.

A pass is built in three steps.

1. Short group. The short lane in its order, cut by predicted cost (`grouping`), trimmed until the tightest
   target in it that can be met is met.
2. Window. If nothing but shorts wait, AWD may hold the group back for depth. With long work waiting there is
   no window: the time is better spent on a chunk.
3. Long fill. Long tokens join the short group only where that is predicted to lower the summed completion
   time: with n shorts in the pass, m requests waiting behind it, and c the cost of a pass,

       (m + 1) (saved - (c(mixed) - c(short))) > n (c(mixed) - c(short))

   `saved` is the time that the tokens would take later: the whole pass for those that finish a prompt, else
   their share of the next chunk, since a part taken out of a chunk saves no pass. Padding up to the class
   edge is free by the same test. The mixed pass never costs a short in it its target. Without shorts the pass
   is a long chunk of the size with the best tokens/s among those that block an arriving short, or the next
   decode step, no longer than allowed; never below the knee, where tokens are not yet paid for, except for a
   tail.

A request is short here if what it has to compute here is: a prompt whose cached blocks were evicted while it
waited goes the way of the long ones.

Ageing: a request that waited past the bound leads the pass whatever its lane, oldest first; each leads once
until it has waited as long again. While shorts wait an aged request leads every other pass only, so that an
overload of long ones leaves the shorts their half. So with d the longest pass and its turn of decode, and n
requests that have waited longer, it starts within age_bound + 2 (n + 1) d where there is room for its KV.
Where there is none, or too many prompts are in parts, no newcomer overtakes it and the parts lead instead,
so that they make room.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from service.core.grouping import first_group, ordered_for
from service.core.lanes import short_tokens_max
from service.core.order import LaneQueue
from service.core.policy import Instance, KvGate, PassPlan, Plan, PlanItem, Wait
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import DispatchNumbers, Lane, Reason
from service.core.wait_depth import Go, ShortQueue, WaitDepth

FILL_CANDIDATES = 8  # long requests looked at for one pass


class LengthAwarePolicy:
    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._lanes = {lane: LaneQueue(settings.age_bound_s) for lane in Lane}
        self._group_candidates = 2 * settings.group_requests_max  # looked at; some may lack room for KV
        self._led: set[str | None] = set()  # instances whose last pass was led by an aged request
        self._awd: WaitDepth | None = None  # made for the first instance: D needs its knee

    # --- the queue ---

    def instance_up(self, instance: Instance, now_s: float) -> None:
        pass

    def instance_down(self, instance: Instance, now_s: float) -> None:
        pass

    def add(self, tracked: Tracked, now_s: float, *, arrival: bool) -> None:
        self._lanes[tracked.lane].add(tracked)
        if arrival and tracked.lane is Lane.SHORT and self._awd is not None:
            self._awd.arrived(tracked.remaining, now_s)

    def remove(self, tracked: Tracked) -> None:
        self._lanes[tracked.lane].remove(tracked)
        if self._awd is not None and not self._lanes[Lane.SHORT]:
            self._awd.emptied()

    def late(self, now_s: float) -> list[Tracked]:
        return [tracked for queue in self._lanes.values() for tracked in queue.demote(now_s)]

    def waiting(self) -> Iterator[Tracked]:
        return chain.from_iterable(queue.everyone() for queue in self._lanes.values())

    def lane_load(self, lane: Lane) -> tuple[int, int]:
        return len(self._lanes[lane]), self._lanes[lane].tokens

    def window(self) -> tuple[float, int]:
        return (self._awd.window_s, round(self._awd.depth_tokens)) if self._awd else (0.0, 0)

    def dispatched(self, plan: PassPlan, now_s: float) -> None:
        instance_id = plan.items[0].tracked.instance_id
        (self._led.add if plan.reason is Reason.AGED else self._led.discard)(instance_id)
        shorts = sum(item.new_tokens for item in plan.items if item.tracked.lane is Lane.SHORT)
        if self._awd is not None and shorts:
            self._awd.dispatched(shorts, plan.numbers.depth_bound_tokens, now_s)

    # --- the plan ---

    def plan(self, instance: Instance, now_s: float) -> Plan:
        if self._awd is None:
            self._awd = WaitDepth(self._settings, instance.pricer.knee_tokens)
        if not any(self._lanes.values()):
            return None
        gate = KvGate(instance, self._settings, now_s)
        allowed_s = self._pass_s_max(instance)
        led = instance.instance_id in self._led and bool(self._lanes[Lane.SHORT])
        lead = [] if led else self._aged_lead(instance, gate, now_s, allowed_s)
        shorts, longs = self._candidates(instance, now_s, lead)
        group = self._short_group(instance, gate, now_s, lead, shorts)
        if lead:
            reason = Reason.AGED
        elif group:
            decision = self._hold_or_go(instance, group, now_s, long_waits=bool(longs))
            if isinstance(decision, Wait):
                return decision
            reason = decision
        else:
            reason = Reason.LONG_CHUNK
        allowed_s = min(allowed_s, self._slack(group, now_s))
        items = self._fill(instance, gate, lead + group, longs, allowed_s)
        if items:
            return self._finish(instance, items, reason, now_s)
        return Wait(math.inf, Reason.WAITING_FOR_KV) if gate.refused_any else None

    def _aged_lead(self, instance: Instance, gate: KvGate, now_s: float, allowed_s: float) -> list[PlanItem]:
        """The request that has waited longest past the ageing bound, with one chunk. Where it has no room,
        those in parts here lead: their end makes room."""
        aged = [t for queue in self._lanes.values() for t in self._first(queue.aged(now_s), instance)]
        aged.sort(key=lambda t: (t.waiting_since_s, t.seq))
        parts = self._parts_here(instance) if aged else []
        for tracked in chain(aged[:1], parts, aged[1:]):
            new_tokens, history = instance.item_of(tracked)
            limit = self._chunk_bound(instance, history, allowed_s)
            chunk = instance.chunk_tokens((new_tokens, history), limit)
            if (
                chunk
                and self._fits(instance, [(chunk, history)])
                and gate.admits(tracked, whole=chunk == new_tokens)
            ):
                return [PlanItem(tracked, chunk, history)]
        return []

    def _candidates(
        self, instance: Instance, now_s: float, lead: list[PlanItem]
    ) -> tuple[list[Tracked], list[Tracked]]:
        """(short, long) requests that may join `lead` here: the first of each lane in its order, then those
        that hold KV here already. They need no room, so there is always somebody who can run."""
        shorts = self._first(self._lanes[Lane.SHORT].in_order(now_s), instance, self._group_candidates)
        longs = self._first(self._lanes[Lane.LONG].in_order(now_s), instance)
        found = dict.fromkeys(chain(shorts, longs, self._parts_here(instance)))
        for item in lead:
            found.pop(item.tracked, None)
        short = {t for t in found if t.lane is Lane.SHORT and self._is_short(instance, t)}
        return [t for t in found if t in short], [t for t in found if t not in short]

    def _first(
        self, requests: Iterable[Tracked], instance: Instance, count: int = FILL_CANDIDATES
    ) -> list[Tracked]:
        """The first `count` that are not bound elsewhere."""
        here = (None, instance.instance_id)
        return list(islice((t for t in requests if t.instance_id in here), count))

    def _parts_here(self, instance: Instance) -> list[Tracked]:
        """Waiting requests that hold KV here, in order of arrival."""
        held = (t for t in instance.partial.values() if t in self._lanes[t.lane])
        return sorted(held, key=lambda t: t.seq)

    def _is_short(self, instance: Instance, tracked: Tracked) -> bool:
        new_tokens, history = instance.item_of(tracked)
        return new_tokens <= short_tokens_max(instance, history, self._settings)

    def _short_group(
        self,
        instance: Instance,
        gate: KvGate,
        now_s: float,
        lead: list[PlanItem],
        candidates: list[Tracked],
    ) -> list[PlanItem]:
        """The short requests of the pass, beside an aged `lead`."""
        found: list[PlanItem] = []
        for tracked in candidates:
            if len(found) == min(self._settings.group_requests_max, instance.requests_max - len(lead)):
                break
            if gate.admits(tracked):
                found.append(PlanItem(tracked, *instance.item_of(tracked)))
        order = ordered_for(instance.spec.profiles, [item.size for item in found])
        found = [found[index] for index in order]
        pricer, fixed = instance.pricer, [item.size for item in lead]
        if lead and found and self._mixing_loses(instance, fixed, found[0]):
            return []
        size = first_group(
            [item.size for item in found],
            lambda items: pricer.pass_s([*fixed, *items]),
            instance.requests_max - len(lead),
            self._settings.grouping,
        )
        return self._trim_to_targets(instance, found[:size], fixed, now_s)

    def _trim_to_targets(
        self, instance: Instance, group: list[PlanItem], fixed: list[tuple[int, int]], now_s: float
    ) -> list[PlanItem]:
        """Drop requests from the end while the pass would miss a target that a smaller one meets."""
        allowed_s = self._slack(group, now_s)
        if math.isinf(allowed_s):
            return group
        queue = self._lanes[Lane.SHORT]
        targets = [i.tracked.target_s if queue.is_feasible(i.tracked) else math.inf for i in group]
        tightest = targets.index(min(targets)) + 1
        for size in range(len(group), tightest - 1, -1):
            if instance.pricer.pass_s([*fixed, *(i.size for i in group[:size])]) <= allowed_s:
                return group[:size]
        return group

    def _hold_or_go(
        self, instance: Instance, group: list[PlanItem], now_s: float, *, long_waits: bool
    ) -> Reason | Wait:
        awd, queue, pricer = self._awd, self._lanes[Lane.SHORT], instance.pricer
        assert awd is not None
        if long_waits or instance.decode.running:
            return Reason.NO_GAIN  # the instance would not be idle while it waits
        pass_s = pricer.pass_s([item.size for item in group])
        state = ShortQueue(
            requests=len(queue),
            tokens=queue.tokens,
            head_wait_s=queue.oldest_wait_s(now_s),
            slack_s_min=self._slack(group, now_s) - pass_s,
            pass_s=pass_s,
        )
        decision = awd.decide(state, now_s, lambda tokens: pricer.pass_s([(tokens, 0)]))
        if isinstance(decision, Go):
            return decision.reason
        return Wait(decision.until_s, Reason.WAITING_FOR_DEPTH)

    def _slack(self, group: list[PlanItem], now_s: float) -> float:
        """Seconds until the tightest target in reach is due, hand-back time taken off; inf without one."""
        queue = self._lanes[Lane.SHORT]
        targets = (i.tracked.target_s for i in group if queue.is_feasible(i.tracked))
        return min(targets, default=math.inf) - now_s - self._settings.safety_s

    def _fill(
        self,
        instance: Instance,
        gate: KvGate,
        front: list[PlanItem],
        longs: list[Tracked],
        allowed_s: float,
    ) -> list[PlanItem]:
        """Add long tokens to `front` where it pays; the first chunk of all where there is no front."""
        items = list(front)
        behind = sum(len(queue) for queue in self._lanes.values()) - len(front)
        for tracked in longs:
            if len(items) == instance.requests_max:
                break
            new_tokens, history = instance.item_of(tracked)
            chunk = (
                self._paying_chunk(instance, items, (new_tokens, history), behind, allowed_s)
                if items
                else instance.chunk_tokens(
                    (new_tokens, history), self._chunk_bound(instance, history, allowed_s)
                )
            )
            if chunk and gate.admits(tracked, whole=chunk == new_tokens):
                items.append(PlanItem(tracked, chunk, history))
                behind -= 1
        return items

    def _paying_chunk(
        self,
        instance: Instance,
        items: list[PlanItem],
        rest: tuple[int, int],
        behind: int,
        allowed_s: float,
    ) -> int:
        """The chunk of `rest` with the largest predicted gain beside `items`; 0 if none gains (see the
        module text)."""
        pricer, front = instance.pricer, [item.size for item in items]
        new_tokens, history = rest
        front_s = pricer.pass_s(front)
        allowed_s = max(front_s, allowed_s)
        later = min(new_tokens, self._chunk_bound(instance, history, allowed_s))
        later_s = pricer.pass_s([(later, history)])
        best_gain, best = 0.0, 0
        for limit in pricer.chunk_sizes(sum(new for new, _ in front), new_tokens):
            chunk = instance.chunk_tokens(rest, limit)
            if chunk == 0:
                continue
            mixed_s = pricer.pass_s([*front, (chunk, history)])
            if mixed_s > allowed_s:
                continue
            whole = chunk == new_tokens
            saved_s = pricer.pass_s([(chunk, history)]) if whole else later_s * chunk / later
            added_s = mixed_s - front_s
            gain = (behind + 1) * (saved_s - added_s) - len(front) * added_s
            if gain > best_gain:
                best_gain, best = gain, chunk
        return best

    def _chunk_bound(self, instance: Instance, history: int, allowed_s: float) -> int:
        """Tokens of a long chunk alone: the best tokens/s within the allowed time, at least the knee."""
        pricer = instance.pricer
        best_rate, best = 0.0, 0
        for edge in pricer.chunk_edges:
            chunk_s = pricer.pass_s([(edge, history)])
            if best >= pricer.knee_tokens and chunk_s > allowed_s:
                break
            if math.isfinite(chunk_s) and (best < pricer.knee_tokens or edge / chunk_s >= best_rate):
                best_rate, best = edge / chunk_s, edge
        return best

    def _pass_s_max(self, instance: Instance) -> float:
        """How long a pass with long tokens may block an arriving short and the next decode step."""
        return min(self._settings.long_chunk_s_max, instance.decode.pass_s_max())

    def _mixing_loses(self, instance: Instance, front: list[tuple[int, int]], item: PlanItem) -> bool:
        """Whether two passes are predicted to be shorter than one (rows padded to the longest, say)."""
        pass_s = instance.pricer.pass_s
        return pass_s([*front, item.size]) > pass_s(front) + pass_s([item.size])

    def _fits(self, instance: Instance, sizes: list[tuple[int, int]]) -> bool:
        return math.isfinite(instance.pricer.pass_s(sizes))

    def _finish(self, instance: Instance, items: list[PlanItem], reason: Reason, now_s: float) -> PassPlan:
        predicted_s = instance.pricer.pass_s([item.size for item in items])
        slack_s = min((i.tracked.target_s for i in items), default=math.inf) - now_s - predicted_s
        window_s, depth_tokens = self.window()
        numbers = DispatchNumbers(
            predicted_s=predicted_s,
            slack_s_min=slack_s if math.isfinite(slack_s) else None,
            window_s=window_s,
            depth_tokens=depth_tokens,
            depth_bound_tokens=self._depth_bound(instance),
            queued_short_tokens=self._lanes[Lane.SHORT].tokens,
            queued_long_tokens=self._lanes[Lane.LONG].tokens,
        )
        return PassPlan(tuple(items), reason, predicted_s, numbers)

    def _depth_bound(self, instance: Instance) -> int:
        """Largest pass in tokens that the default short target leaves time for: D never grows past it."""
        allowed_s = self._settings.ttft_target_short_s - self._settings.safety_s
        edges = instance.pricer.chunk_edges
        fitting = [edge for edge in edges if instance.pricer.pass_s([(edge, 0)]) <= allowed_s]
        return fitting[-1] if fitting else edges[0]
