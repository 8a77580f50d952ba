"""When an instance takes requests of the lane that it does not prefer.

A role is a preference, not a wall, so this is decided by predicted cost, each time the instance is free. With
`start` the predicted moment at which the own pool of a request gets to it (the first of the pool to be free,
and the tokens ahead of it shared by the pool), an instance of the other role takes the request

* if its own pool has no instance;
* if it would miss its target by waiting until `start`, and meets it here;
* if nothing of the instance's own lane waits, and what the visitors gain is more than what newcomers of the
  own lane lose. The gain is the time by which the request ends sooner here, and for each of the n behind it
  its work off their queue; the loss is half the blocked time for every newcomer that no idle instance takes:

      start + time - (now + time here)  +  n work / k   >   1/2 b max(0, r b - idle)

  where b is how long the pass blocks the instance, r the rate of the own lane, k the instances of the pool.
  A long prompt runs in short chunks here and shorts go between them, so its time here is stretched by what
  the shorts take. Where the engine can't cut a chunk as short as the setting asks for, it stays away.

And never while an instance of its own pool is idle and has room: whichever instance is asked first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice

from service.core.fill import LongFill
from service.core.load import Load
from service.core.order import LaneQueue
from service.core.policy import Instance
from service.core.pools import OWN_LANE, Pools, has_room, serves
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Lane

LOOKED_AT = 24  # requests of the other lane in one plan
TICK_S = 0.001  # not asked again sooner
LOAD_MAX = 0.95  # of the own lane, in the stretch of a visitor's time


class Spill:
    def __init__(
        self, settings: SchedulerSettings, lanes: Mapping[Lane, LaneQueue], pools: Pools, load: Load
    ) -> None:
        self._settings = settings
        self._lanes = lanes
        self._pools = pools
        self._load = load

    def taken(self, instance: Instance, lane: Lane, now_s: float) -> Iterator[Tracked]:
        """Those of `lane`, not that of the instance, that it may take now, in order."""
        waiting = self._lanes[lane]
        if not waiting.waits_for_any():
            return
        self._pools.look(now_s)
        pool_size = self._pools.size(lane)
        if pool_size == 0:
            yield from waiting.in_order(now_s)
            return
        own_waits = self._lanes[OWN_LANE[instance.role]].waits_for(instance.instance_id)
        per_token_s = 1.0 / instance.tokens_per_s
        ahead_tokens, behind = 0, len(waiting)
        for tracked in islice(waiting.in_order(now_s), LOOKED_AT):
            if self._pools.room_beside(lane, instance, tracked):
                return
            behind -= 1
            start_s = self._pools.busy_until_s(lane, now_s) + ahead_tokens * per_token_s / pool_size
            if self._pays(instance, tracked, start_s, (behind, pool_size), now_s, own_waits=own_waits):
                yield tracked
            else:
                ahead_tokens += tracked.remaining

    def left_to_others(self, instance: Instance, now_s: float) -> float | None:
        """When to ask again, where there is nothing for `instance` but requests of the other lane that an
        idle instance of their own pool is about to take; None: make a plan. (A plan would say the same, but
        there may be many who ask.)"""
        own = OWN_LANE.get(instance.role)
        if own is None or any(queue.is_for(instance.instance_id) for queue in self._lanes.values()):
            return None
        other_lane = Lane.LONG if own is Lane.SHORT else Lane.SHORT
        waiting = self._lanes[other_lane]
        aged_s = now_s - waiting.oldest_wait_s(now_s) + self._settings.age_bound_s
        if self._lanes[own].waits_for_any() or aged_s <= now_s:
            return None
        first = next(waiting.in_order(now_s), None)
        idle = self._pools.idle_other(other_lane, instance)
        if first is None or idle is None or not has_room(idle, first):
            return None
        return aged_s

    def next_s(self, instance: Instance, now_s: float) -> float:
        """When to ask again about what was not taken, if nothing happens before; inf: nothing waits."""
        other = [lane for lane in Lane if not serves(instance, lane) and self._lanes[lane].waits_for_any()]
        if not other:
            return math.inf
        self._pools.look(now_s)
        free_s = self._pools.busy_until_s(other[0], now_s)
        aged_s = now_s - self._lanes[other[0]].oldest_wait_s(now_s) + self._settings.age_bound_s
        again_s = min(free_s, aged_s) if aged_s > now_s else free_s
        return max(now_s + TICK_S, again_s)

    def _pays(
        self,
        instance: Instance,
        tracked: Tracked,
        start_s: float,
        behind: tuple[int, int],
        now_s: float,
        *,
        own_waits: bool,
    ) -> bool:
        """behind: requests behind it, and instances of their pool."""
        size = instance.item_of(tracked)
        block_s = here_s = instance.pricer.request_s(*size)
        own = OWN_LANE[instance.role]
        if own is Lane.SHORT:
            limit_s = self._settings.spill_chunk_s_max
            chunk = LongFill(instance, limit_s).alone(size)
            block_s = instance.pricer.pass_s(((chunk, size[1]),)) if chunk else math.inf
            if block_s > limit_s:
                return False  # nothing shorter can be cut from it here
        end_there_s = start_s + tracked.service_s + self._settings.safety_s
        if now_s + here_s <= tracked.target_s < end_there_s:
            return True
        if own_waits:
            return False
        if own is Lane.SHORT:
            load = self._load.of(own, instance, now_s) * self._load.instances / max(1, self._pools.size(own))
            here_s /= 1.0 - min(LOAD_MAX, load)
        idle = self._pools.idle_beside(own, instance)
        gain_s = end_there_s - (now_s + here_s) + behind[0] * tracked.service_s / behind[1]
        newcomers = self._load.requests_per_s(own, now_s) * block_s - idle
        return gain_s > 0.5 * block_s * max(0.0, newcomers)
