"""The `plaserve` policy: two lanes, AWD on the short one, long prompts in chunks that fit between.

A pass (`pass_maker`) is an aged request's chunk, or shorts, or both, and long tokens beside them where they
are due or pay. If nothing but shorts wait and every other instance is busy, AWD may hold them back for depth.
With long work waiting there is no window: the time is better spent on a chunk.

A request is short here if what it has to compute here is: a prompt whose cached blocks were evicted while it
waited goes the way of the long ones, and a long one whose prefix is cached here that of the short ones.

With several instances a request may wait for one where it would finish sooner (`placement`), and an instance
with a role takes the other lane only where that is predicted to pay (`spill`).

Ageing: a request that waited past the bound leads a pass whatever its lane, oldest first; each leads once
until it has waited as long again. After one that is predicted to take c seconds none leads on that instance
for c / `aged_share`, unless nobody else can run, so that an overload of those who are late already can not
make the others late too. Meanwhile newcomers leave the oldest its room, on the instance that has most where
none has enough yet; there the prompts in parts lead instead of it, so that they make room. So with d the
longest pass and its turn of decode, and n passes of those who come before it (who have waited longer, and
parts that lead in its place), it starts within age_bound + (1 + 1 / aged_share) (n + 1) d, beside the time
until decoding requests give room back.
While the shares of tenants count (`order`), newcomers of the long lane whose tenants are ahead of others join
a pass only if none of the others' can run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, groupby, islice

from service.core.fair_share import FairShare
from service.core.load import Load
from service.core.order import LaneQueue
from service.core.pass_maker import PassMaker
from service.core.placement import Placement
from service.core.policy import Instance, PassPlan, Plan, PlanItem, Wait
from service.core.pools import Pools, serves
from service.core.settings import SchedulerSettings
from service.core.spill import LOOKED_AT, Spill
from service.core.tracked import Tracked
from service.core.triage import set_aside
from service.core.types import DispatchNumbers, Lane, Reason
from service.core.wait_depth import Go, ShortQueue, WaitDepth

FILL_CANDIDATES = 8  # long requests looked at for one pass
TRIAGED = 256  # long requests with a target in reach that are looked at for who is set aside
LOOKED_AT_MAX = 256  # of a lane, for those that one instance can take
LOOKED_FURTHER = 8  # shorts beyond those of one grouping, as some may lack room for KV


class LengthAwarePolicy:
    pass_maker = PassMaker  # puts a pass together; the lab tries it without some of its steps

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._lanes = {lane: LaneQueue(settings.age_bound_s, FairShare.of(settings)) for lane in Lane}
        self.pools = Pools(self._is_waited_for)
        self._placement = Placement(settings, self._lanes, self.pools)
        self._load = Load(self.pools, settings.rate_memory_s)
        self._spill = Spill(settings, self._lanes, self.pools, self._load)
        self._group_candidates = settings.group_requests_max + LOOKED_FURTHER
        self._aged_again_s: dict[str, float] = {}  # instance -> when the next aged request may lead
        self._depth_bounds: dict[str, int] = {}  # by instance
        self._triaged: list[Tracked] = []  # the long requests that the plan which is made has looked at
        self._aside: set[Tracked] = set()  # those of them that are set aside
        self._awd: WaitDepth | None = None  # made for the first instance: D needs its knee

    # --- the queue ---

    def instance_up(self, instance: Instance, now_s: float) -> None:
        if self._awd is None:
            self._awd = WaitDepth(self._settings, instance.pricer.knee_tokens)
        self.pools.file(instance)
        self._placement.instance_up(instance)

    def instance_down(self, instance: Instance, now_s: float) -> None:
        self.pools.remove(instance)
        self._placement.instance_down(instance)
        self._aged_again_s.pop(instance.instance_id, None)
        self._depth_bounds.pop(instance.instance_id, None)

    def repriced(self, instance: Instance) -> None:
        self._depth_bounds.pop(instance.instance_id, None)
        if self._awd is not None:
            self._awd.bound(instance.pricer.knee_tokens)

    def closed(self, instance: Instance, now_s: float) -> None:
        self._placement.pass_over(instance.instance_id)

    def add(self, tracked: Tracked, now_s: float, *, arrival: bool) -> None:
        self._lanes[tracked.lane].add(tracked, tracked.instance_id)
        if tracked.instance_id is not None:
            self.pools.refile(tracked.instance_id)
        if arrival:
            self._load.arrived(tracked, now_s)
            if tracked.lane is Lane.SHORT and self._awd is not None:
                self._awd.arrived(tracked.remaining, now_s)

    def remove(self, tracked: Tracked) -> None:
        queue = self._lanes[tracked.lane]
        queue.remove(tracked)
        self._placement.removed(tracked)
        if tracked.lane is Lane.SHORT and not queue and self._awd is not None:
            self._awd.emptied()

    def late(self, now_s: float) -> list[Tracked]:
        self.pools.new_turn()
        return self._lanes[Lane.SHORT].demote(now_s) + self._lanes[Lane.LONG].demote(now_s)

    def waiting(self) -> Iterator[Tracked]:
        return chain.from_iterable(queue.everyone() for queue in self._lanes.values())

    def bound_to(self, instance_id: str) -> Iterator[Tracked]:
        """The waiting requests that are only for this instance."""
        return chain.from_iterable(queue.only_for(instance_id) for queue in self._lanes.values())

    def lane_load(self, lane: Lane) -> tuple[int, int]:
        return len(self._lanes[lane]), self._lanes[lane].tokens

    def window(self) -> tuple[float, int]:
        return (self._awd.window_s, round(self._awd.depth_tokens)) if self._awd else (0.0, 0)

    def dispatched(self, plan: PassPlan, now_s: float) -> None:
        instance_id = plan.items[0].tracked.instance_id
        assert instance_id is not None, "the requests of a plan are bound when it is carried out"
        self.pools.dispatched()
        if plan.reason is Reason.AGED:
            self._aged_again_s[instance_id] = now_s + plan.predicted_s / self._settings.aged_share
        self._placement.pass_over(instance_id)
        if any(queue.counts_shares for queue in self._lanes.values()):
            self._count_shares(plan)
        shorts = sum(item.new_tokens for item in plan.items if item.tracked.lane is Lane.SHORT)
        if self._awd is not None and shorts:
            self._awd.dispatched(shorts, plan.numbers.depth_bound_tokens, now_s)

    def _count_shares(self, plan: PassPlan) -> None:
        """Each request is given its tokens' part of the pass, in seconds of all instances."""
        token_s = plan.predicted_s / (sum(item.new_tokens for item in plan.items) * self._load.instances)
        for item in plan.items:
            self._lanes[item.tracked.lane].served(item.tracked, token_s * item.new_tokens)

    # --- the plan ---

    def plan(self, instance: Instance, now_s: float) -> Plan:
        if self._awd is None:
            self._awd = WaitDepth(self._settings, instance.pricer.knee_tokens)
        self._placement.release(now_s)
        if not any(queue.waits_for(instance.instance_id) for queue in self._lanes.values()):
            return self._nothing_here(instance, now_s)
        again_s = self._spill.left_to_others(instance, now_s)
        if again_s is not None:
            until_s = min(again_s, self._placement.next_s())
            return Wait(until_s, Reason.WAITING_FOR_INSTANCE, alike=True)
        placed_before = self._placement.placed_total
        self._triage(instance, now_s)
        maker = self.pass_maker(self._settings, self._lanes, self._load, instance, now_s, self._aside)
        old = self._aged(instance, now_s)
        if old and not self._keeps_room(maker, old):
            old = [t for t in old if maker.gate.has_room(t)]
        aged = now_s >= self._aged_again_s.get(instance.instance_id, now_s) and self._lead(maker, old)
        shorts, longs = self._candidates(instance, now_s, maker.items)
        group = maker.short_group(shorts)
        if aged:
            reason = Reason.AGED
        elif group:
            decision = self._hold_or_go(maker, group, now_s, long_waits=bool(longs))
            if isinstance(decision, Wait):
                return self._of_all_alike(decision, placed_before, now_s)
            reason = decision
        else:
            reason = Reason.LONG_CHUNK
        first = self._lanes[Lane.LONG].least_ahead(longs, now_s)  # others only if none of these can run
        self._complete(maker, group, shorts, first)
        if not maker.items and len(first) < len(longs):
            self._complete(maker, group, shorts, longs)
        if not maker.items and self._lead(maker, old):  # nobody else can run
            reason = Reason.AGED
        if maker.items:
            return self._finish(instance, maker.items, reason, now_s)
        if maker.gate.refused_any:
            return self._of_all_alike(Wait(math.inf, Reason.WAITING_FOR_KV), placed_before, now_s)
        return self._of_all_alike(self._nothing_here(instance, now_s), placed_before, now_s)

    def _lead(self, maker: PassMaker, old: list[Tracked]) -> bool:
        """Let one of `old` lead; where the oldest has no room those in parts, since their end makes room."""
        return bool(old) and maker.lead(chain(old[:1], self._parts_here(maker.instance), old[1:]))

    def _keeps_room(self, maker: PassMaker, old: list[Tracked]) -> bool:
        """Keep room for the oldest newcomer, so that nobody overtakes it any more. Where it has none yet,
        that is for the one instance that has most; on the others it is passed over."""
        oldest = next((t for t in old if t.instance_id is None), None)
        if oldest is None:
            return True
        if not maker.gate.has_room(oldest) and not self.pools.has_most_room(maker.instance, oldest):
            maker.gate.pass_over()
            return False
        maker.gate.keep_room(oldest)
        return True

    def _of_all_alike(self, wait: Wait, placed_before: int, now_s: float) -> Wait:
        """The answer of one instance, for its group where what is cached or who has led plays no part."""
        alike = placed_before == self._placement.placed_total
        for queue in self._lanes.values() if alike else ():
            alike = alike and not queue.has_aged(now_s)
            seen = islice(queue.in_order(now_s), max(self._group_candidates, LOOKED_AT))
            alike = alike and not any(map(self._placement.may_choose, seen))
        return replace(wait, alike=alike)

    def _nothing_here(self, instance: Instance, now_s: float) -> Wait:
        """Nobody to run here, but maybe later somebody who waits for another instance now."""
        until_s = min(self._placement.next_s(), self._spill.next_s(instance, now_s))
        anybody = any(queue.waits_for_any() for queue in self._lanes.values())
        everywhere = not anybody and not self._one_is_waited_for()
        return Wait(until_s, Reason.WAITING_FOR_INSTANCE, everywhere, alike=not anybody)

    def _one_is_waited_for(self) -> bool:
        """Whether somebody waits for an instance that may be asked now."""
        if self._settings.stage_lead_s == 0.0:
            return any(self._is_waited_for(instance.instance_id) for instance in self.pools.odd())
        places = chain.from_iterable(queue.places() for queue in self._lanes.values())
        instances = (self.pools.get(place) for place in places)
        return any(i is not None and (i.running is None or i.staged is None) for i in instances)

    def _is_waited_for(self, instance_id: str) -> bool:
        return any(queue.is_for(instance_id) for queue in self._lanes.values())

    def _aged(self, instance: Instance, now_s: float) -> list[Tracked]:
        """The first that can run here of those who have waited past the ageing bound, oldest first."""
        place = instance.instance_id
        if not any(queue.has_aged(now_s, place) for queue in self._lanes.values()):
            return []
        aged: list[Tracked] = []
        for queue in self._lanes.values():
            here = filter(instance.may_take, islice(queue.aged(now_s, place), LOOKED_AT_MAX))
            aged += islice(here, FILL_CANDIDATES)
        return sorted(aged, key=lambda t: (t.waiting_since_s, t.seq))

    def _candidates(
        self, instance: Instance, now_s: float, lead: list[PlanItem]
    ) -> tuple[list[Tracked], list[Tracked]]:
        """(short, long) requests that may join `lead` here: the first of each lane in its order, then those
        that hold KV here already. They need no room, so there is always somebody who can run."""
        found = self._first(Lane.SHORT, instance, now_s, self._group_candidates)
        found += self._first(Lane.LONG, instance, now_s, FILL_CANDIDATES)
        if instance.partial:
            known = set(found)
            found += [t for t in self._parts_here(instance) if t not in known]
        leads = {item.tracked for item in lead}
        shorts: list[Tracked] = []
        longs: list[Tracked] = []
        for tracked in found:
            if tracked not in leads:
                (shorts if self._is_short(instance, tracked) else longs).append(tracked)
        return shorts, longs

    def _first(self, lane: Lane, instance: Instance, now_s: float, count: int) -> list[Tracked]:
        """The first `count` of the lane that may run here and have no better instance to wait for."""
        queue = self._lanes[lane]
        if not instance.takes_new:
            view: Iterable[Tracked] = queue.only_for(instance.instance_id)
        elif serves(instance, lane):
            view = queue.in_order(now_s, instance.instance_id)
            if lane is Lane.LONG and self._aside:
                view = chain(self._aside_behind(), islice(view, len(self._triaged), None))
        else:
            view = chain(queue.only_for(instance.instance_id), self._spill.taken(instance, lane, now_s))
        fitting = filter(instance.may_take, islice(view, LOOKED_AT_MAX))
        looked_at = list(islice(fitting, count))  # the queue changes while we look
        return [t for t in looked_at if not self._placement.waits_elsewhere(t, instance, now_s)]

    def _aside_behind(self) -> Iterator[Tracked]:
        """Those of the triage in service order: who is set aside goes behind the others of its priority."""
        for _, same in groupby(self._triaged, key=lambda t: t.request.priority):
            some = list(same)
            yield from (t for t in some if t not in self._aside)
            yield from (t for t in some if t in self._aside)

    def _triage(self, instance: Instance, now_s: float) -> None:
        """See who is set aside."""
        shorts, longs = self._lanes[Lane.SHORT], self._lanes[Lane.LONG]
        self._triaged, self._aside = [], set()
        all_s = longs.work_s + shorts.tokens / instance.tokens_per_s
        if longs.by_share(now_s) or now_s + all_s / self._load.instances <= longs.latest_start_s:
            return  # all can be in time
        token_s = shorts.tokens / max(1, len(shorts)) / instance.tokens_per_s
        self._triaged = list(islice(longs.feasible(instance.instance_id), TRIAGED))
        self._aside = set_aside(
            self._triaged,
            lambda target_s: token_s * shorts.due_before(target_s),
            self._load.instances,
            now_s,
        )

    def _parts_here(self, instance: Instance) -> list[Tracked]:
        """Waiting requests that hold KV here, in order of arrival."""
        held = (t for t in instance.partial.values() if t in self._lanes[t.lane])
        return sorted(held, key=lambda t: t.seq)

    def _is_short(self, instance: Instance, tracked: Tracked) -> bool:
        """Whether it has a short rest here. A prompt in parts stays what it was."""
        new_tokens, history = instance.item_of(tracked)
        if tracked.lane is Lane.LONG and (tracked.position or not history):
            return False
        return new_tokens <= instance.short_tokens_max(history)

    def _hold_or_go(
        self, maker: PassMaker, group: list[PlanItem], now_s: float, *, long_waits: bool
    ) -> Reason | Wait:
        instance, awd, queue = maker.instance, self._awd, self._lanes[Lane.SHORT]
        assert awd is not None
        if long_waits or instance.decode.running:
            return Reason.NO_GAIN  # the instance would not be idle while it waits
        pricer = instance.pricer
        pass_s = pricer.pass_s([item.size for item in group])
        state = ShortQueue(
            requests=len(queue),
            tokens=queue.tokens,
            head_wait_s=queue.oldest_wait_s(now_s, instance.instance_id),
            slack_s_min=maker.slack_s(group) - pass_s,
            pass_s=pass_s,
        )
        decision = awd.decide(state, now_s, lambda tokens: pricer.pass_s(((tokens, 0),)))
        if isinstance(decision, Go):
            return decision.reason
        if self.pools.idle_other(Lane.SHORT, instance) is not None:
            return Reason.NO_GAIN  # the next one needs no place in this pass: another instance is idle
        return Wait(decision.until_s, Reason.WAITING_FOR_DEPTH)

    def _complete(
        self, maker: PassMaker, group: list[PlanItem], shorts: list[Tracked], longs: list[Tracked]
    ) -> None:
        """Put the group into the pass, and long tokens beside it."""
        due = maker.due_of(longs, group) if group and longs else set()
        due_limit_s = 0.0
        if due:
            size, due_limit_s = maker.make_room(group, shorts, due)
            group = group[:size]
            longs.sort(key=lambda t: t not in due)
            if maker.alone(longs[0], group, due_limit_s):
                return
        limit_s = min(maker.limit_s, maker.slack_s(group))
        maker.items += group
        maker.fill(longs, limit_s, due, due_limit_s)

    def _finish(self, instance: Instance, items: list[PlanItem], reason: Reason, now_s: float) -> PassPlan:
        parts = sum(item.is_part for item in items)
        predicted_s = instance.pricer.pass_s([item.size for item in items], parts)
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
        known = self._depth_bounds.get(instance.instance_id)
        if known is None:
            allowed_s = self._settings.ttft_target_short_s - self._settings.safety_s
            edges = instance.pricer.chunk_edges
            fitting = [edge for edge in edges if instance.pricer.alone_s(((edge, 0),)) <= allowed_s]
            known = self._depth_bounds[instance.instance_id] = fitting[-1] if fitting else edges[0]
        return known
