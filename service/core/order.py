"""The order of one lane.

Requests that can still meet their target come first, by priority and then deadline; the hopeless after them,
by priority and then least remaining work, since among those only the mean counts. Ageing over all: whoever
waited past the bound leads, oldest first, so that no order can starve anybody.

All moves are amortised O(log n); reading the first k is O(k).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import chain

from sortedcontainers import SortedDict, SortedKeyList

from service.core.tracked import Tracked

SWEEP_MIN = 256  # entries; below this a sweep is not worth its time


class LaneQueue:
    """Waiting requests of one lane in service order. Ties fall by arrival."""

    def __init__(self, age_bound_s: float) -> None:
        self._age_bound_s = age_bound_s
        self._feasible: SortedKeyList = SortedKeyList(key=lambda t: (-t.request.priority, t.target_s, t.seq))
        self._hopeless: SortedKeyList = SortedKeyList(key=lambda t: (-t.request.priority, t.remaining, t.seq))
        self._by_age: SortedDict = SortedDict()  # (waiting_since_s, seq) -> request
        self._latest_start: list[tuple[float, int, Tracked]] = []  # heap; leavers are dropped lazily
        self._sweep_at = SWEEP_MIN
        self._place: dict[str, tuple[SortedKeyList, tuple[float, int]]] = {}
        self.tokens = 0  # remaining prompt tokens of all

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, tracked: Tracked) -> bool:
        return tracked.request_id in self._place

    def add(self, tracked: Tracked) -> None:
        """A request's sort keys must not change while it is in the queue: remove, change, add."""
        age = (tracked.waiting_since_s, tracked.seq)
        self._feasible.add(tracked)
        self._by_age[age] = tracked
        self._place[tracked.request_id] = (self._feasible, age)
        if math.isfinite(tracked.target_s):
            self._watch(tracked)
        self.tokens += tracked.remaining

    def remove(self, tracked: Tracked) -> None:
        where, age = self._place.pop(tracked.request_id)
        where.remove(tracked)
        del self._by_age[age]
        self.tokens -= tracked.remaining

    def demote(self, now_s: float) -> list[Tracked]:
        """Move those whose latest useful start has passed to the hopeless; returns them."""
        moved: list[Tracked] = []
        while self._latest_start and self._latest_start[0][0] < now_s:
            _, _, tracked = heapq.heappop(self._latest_start)
            place = self._place.get(tracked.request_id)
            if place is None or place[0] is not self._feasible or tracked.latest_start_s >= now_s:
                continue
            self._feasible.remove(tracked)
            self._hopeless.add(tracked)
            self._place[tracked.request_id] = (self._hopeless, place[1])
            moved.append(tracked)
        return moved

    def _watch(self, tracked: Tracked) -> None:
        """Note its latest start; when the heap has doubled, entries that are moot are swept out."""
        if len(self._latest_start) >= self._sweep_at:
            true = (e for e in self._latest_start if e[2] in self and e[0] == e[2].latest_start_s)
            self._latest_start = sorted(set(true))  # a sorted list is a heap
            self._sweep_at = max(SWEEP_MIN, 2 * len(self._latest_start))
        heapq.heappush(self._latest_start, (tracked.latest_start_s, tracked.seq, tracked))

    def aged(self, now_s: float) -> Iterator[Tracked]:
        """Those that waited past the bound, oldest first."""
        for (since_s, _), tracked in self._by_age.items():
            if now_s - since_s < self._age_bound_s:
                return
            yield tracked

    def in_order(self, now_s: float) -> Iterator[Tracked]:
        """Everybody in service order; demote first."""
        led: set[str] = set()
        for tracked in self.aged(now_s):
            led.add(tracked.request_id)
            yield tracked
        for tracked in chain(self._feasible, self._hopeless):
            if tracked.request_id not in led:
                yield tracked

    def everyone(self) -> Iterator[Tracked]:
        return iter(self._by_age.values())

    def is_feasible(self, tracked: Tracked) -> bool:
        return self._place[tracked.request_id][0] is self._feasible

    def oldest_wait_s(self, now_s: float) -> float:
        """How long the longest waiter has waited; 0 when empty."""
        return now_s - self._by_age.peekitem(0)[0][0] if self._by_age else 0.0
