"""Waiting for a better instance: spatial dispatch under late binding.

A request goes where it is predicted to finish first. An instance is only asked when it is free, so that
becomes a choice to be left: instance I is free, but J holds more of the prompt. The request waits for J if

    max(now, J free) + ahead(J) - now  <  (time on I - time on J) (1 + m)

and is *placed* with J: it moves to J's row of the queue and is nobody else's to look at. `ahead` is the work
that is placed with J already (and, before a long request, what J has in parts), so that a popular prefix does
not draw everybody to one instance. m is the number of other requests that wait, for each instance: they would
wait for what I computes again. J is one of a short list: the instances that hold most of the prefix. Where
nobody holds its first block there is nothing to choose, at the price of one look-up.

Nobody waits for ever. A placed request is anybody's again when J passes it over, when the moment comes at
which waiting no longer pays although J is late, when J goes down, and before it is aged; an aged request is
never placed. A request that would meet its target here is placed only where it is predicted to meet it too.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

from service.core.order import LaneQueue
from service.core.policy import Instance
from service.core.pools import Pools, free_s
from service.core.prefix_index import PrefixTable
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Lane

CANDIDATES = 4  # instances looked at for one request
BEHIND_MAX = 5.0  # m is taken for no more: a long queue must not tie requests to a busy instance
KEPT_S = 0.05  # a short list is this old at most


@dataclass(frozen=True, slots=True)
class _Placed:
    """tracked waits for the instance until `until_s`; `work_s` is its predicted time there."""

    tracked: Tracked
    instance_id: str
    until_s: float
    work_s: float


class Placement:
    def __init__(self, settings: SchedulerSettings, lanes: Mapping[Lane, LaneQueue], pools: Pools) -> None:
        self._settings = settings
        self._lanes = lanes
        self._pools = pools
        self._prefixes: PrefixTable | None = None  # the table of all instances
        self._by_row: dict[int, Instance] = {}  # of that table
        self._placed: dict[str, _Placed] = {}
        self._ahead_s: dict[str, dict[str, float]] = {}  # instance -> request placed there -> its work
        self._until: list[tuple[float, int, str]] = []  # heap; those placed anew or gone are dropped lazily
        self._known: dict[str, tuple[float, list[tuple[Instance, float]]]] = {}  # request -> short list
        self.placed_total = 0

    def instance_up(self, instance: Instance) -> None:
        self._prefixes = instance.prefix.table
        self._by_row[instance.prefix.row] = instance

    def instance_down(self, instance: Instance) -> None:
        self._by_row.pop(instance.prefix.row, None)
        self.pass_over(instance.instance_id)

    def removed(self, tracked: Tracked) -> None:
        """It left the queue."""
        self._known.pop(tracked.request_id, None)
        self._forget(tracked.request_id)

    def release(self, now_s: float) -> None:
        """Those who have waited long enough for their instance are anybody's again."""
        while self._until and self._until[0][0] <= now_s:
            until_s, _, request_id = heapq.heappop(self._until)
            placed = self._placed.get(request_id)
            if placed is not None and placed.until_s == until_s:
                self._give_back(placed)

    def pass_over(self, instance_id: str) -> None:
        """The instance took others, or is gone: those placed with it are anybody's again."""
        for request_id in list(self._ahead_s.get(instance_id, ())):
            self._give_back(self._placed[request_id])

    def next_s(self) -> float:
        """When the next one is released; inf where nobody is placed."""
        while self._until:
            until_s, _, request_id = self._until[0]
            placed = self._placed.get(request_id)
            if placed is not None and placed.until_s == until_s:
                return until_s
            heapq.heappop(self._until)
        return math.inf

    def waits_elsewhere(self, tracked: Tracked, instance: Instance, now_s: float) -> bool:
        """Whether a better instance than `instance`, which is free, is predicted for an unbound request; it
        is placed there then."""
        if tracked.instance_id is not None or not tracked.request.block_hashes:
            return False
        aged_s = tracked.waiting_since_s + self._settings.age_bound_s
        places = self._short_list(tracked, now_s) if now_s < aged_s else []
        if not places or (len(places) == 1 and places[0][0] is instance):
            return False
        here_s = instance.pricer.request_s(*instance.item_of(tracked))
        in_time = now_s + here_s <= tracked.target_s
        waiting = sum(map(len, self._lanes.values())) - 1
        others = 1.0 + min(BEHIND_MAX, waiting / len(self._pools))
        best: _Placed | None = None
        best_s = self._settings.safety_s
        for place, there_s in places:
            saved_s = (here_s - there_s) * others
            if place is instance or saved_s <= best_s:
                continue
            if not (place.takes_new and place.kv.fits(tracked.kv_tokens_max)):
                continue
            start_s = free_s(place, now_s) + self._work_ahead_s(tracked, place)
            if saved_s - (start_s - now_s) > best_s and (
                start_s + there_s <= tracked.target_s or not in_time
            ):
                best_s = saved_s - (start_s - now_s)
                until_s = min(start_s + saved_s, aged_s)
                best = _Placed(tracked, place.instance_id, until_s, there_s)
        if best is not None:
            self._place(best)
        return best is not None

    def may_choose(self, tracked: Tracked) -> bool:
        """Whether some instances may be better than others for the request: one holds its first block, or
        did lately."""
        hashes = tracked.request.block_hashes
        if not hashes or self._prefixes is None:
            return False
        return tracked.request_id in self._known or self._prefixes.is_held(hashes[0])

    def _work_ahead_s(self, tracked: Tracked, place: Instance) -> float:
        """Predicted seconds of work that goes before `tracked` on `place`, beside its passes."""
        work_s = sum(self._ahead_s.get(place.instance_id, {}).values())
        if tracked.lane is Lane.LONG:
            work_s += sum(part.service_s for part in place.partial.values())
        return work_s

    def _short_list(self, tracked: Tracked, now_s: float) -> list[tuple[Instance, float]]:
        """Instances that hold part of the prompt, with the predicted time of the request there."""
        known = self._known.get(tracked.request_id)
        if known is not None and now_s < known[0] + KEPT_S and all(self._is_up(i) for i, _ in known[1]):
            return known[1]
        found: list[tuple[Instance, float]] = []
        hashes = tracked.request.block_hashes
        for row in self._prefixes.leaders(hashes, CANDIDATES) if self._prefixes is not None else ():
            place = self._by_row.get(row)
            if place is not None and place.may_take(tracked):
                found.append((place, place.pricer.request_s(*place.item_of(tracked))))
        if found:
            self._known[tracked.request_id] = (now_s, found)
        return found

    def _is_up(self, instance: Instance) -> bool:
        return self._pools.get(instance.instance_id) is instance

    def _place(self, placed: _Placed) -> None:
        request_id = placed.tracked.request_id
        self._forget(request_id)  # it may have waited for another one
        self._placed[request_id] = placed
        self._ahead_s.setdefault(placed.instance_id, {})[request_id] = placed.work_s
        heapq.heappush(self._until, (placed.until_s, placed.tracked.seq, request_id))
        self.placed_total += 1
        self._move(placed, placed.instance_id)

    def _give_back(self, placed: _Placed) -> None:
        self._forget(placed.tracked.request_id)
        self._move(placed, None)

    def _move(self, placed: _Placed, instance_id: str | None) -> None:
        self._lanes[placed.tracked.lane].move(placed.tracked, instance_id)
        self._pools.refile(placed.instance_id)

    def _forget(self, request_id: str) -> None:
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            ahead = self._ahead_s[placed.instance_id]
            del ahead[request_id]
            if not ahead:
                del self._ahead_s[placed.instance_id]
