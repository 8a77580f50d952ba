"""The order of one lane.

Requests that can still meet their target come first, by priority and then deadline; the hopeless after them,
by priority and then least remaining work, since among those only the mean counts. That order may starve
somebody: `aged` yields those who waited past the bound, oldest first, and the policy lets them lead.

While requests of several tenants wait and targets are missed (somebody waits whose target is out of reach, or
it came out of reach within `DANGER_S`), tenants that are ahead of their share (`fair_share`) go behind those
that are not: among the feasible and among the hopeless, within a priority, by level and then as ever. So the
flood of one tenant is late for itself, and nothing changes while all are in time. Such a look is at all that
waits in the lane, O(n log n), where it is else at the first few.

A lane has one row for those that any instance may take, and one for each instance that some of them are for:
because their KV lives there, or because they wait for it (`placement`). An instance sees its own row merged
with the common one, so what waits for others costs it nothing.

All moves are amortised O(log n); reading the first k is O(k).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

from sortedcontainers import SortedDict, SortedKeyList

from service.core.fair_share import FairShare
from service.core.tracked import Tracked

DANGER_S = 1.0  # missed targets are remembered so long, some passes
SWEEP_MIN = 256  # entries; below this a sweep is not worth its time


def _feasible_key(tracked: Tracked) -> tuple[int, float, int]:
    return -tracked.request.priority, tracked.target_s, tracked.seq


def _hopeless_key(tracked: Tracked) -> tuple[int, int, int]:
    return -tracked.request.priority, tracked.remaining, tracked.seq


def _age_key(tracked: Tracked) -> tuple[float, int]:
    return tracked.waiting_since_s, tracked.seq


class _ByAge:
    """Those of a row, who has waited longest first. Nearly all join in that order: they are a plain queue."""

    __slots__ = ("_queue", "_rejoined")

    def __init__(self) -> None:
        self._queue: OrderedDict[tuple[float, int], Tracked] = OrderedDict()
        self._rejoined: SortedDict = SortedDict()  # when somebody younger had joined

    def __bool__(self) -> bool:
        return bool(self._queue or self._rejoined)

    def __iter__(self) -> Iterator[Tracked]:
        if not self._rejoined:
            return iter(self._queue.values())
        return heapq.merge(self._queue.values(), self._rejoined.values(), key=_age_key)

    def add(self, tracked: Tracked) -> None:
        key = _age_key(tracked)
        in_order = not self._queue or next(reversed(self._queue)) < key
        (self._queue if in_order else self._rejoined)[key] = tracked

    def remove(self, tracked: Tracked) -> None:
        key = _age_key(tracked)
        if self._queue.pop(key, None) is None:
            del self._rejoined[key]

    @property
    def since_s(self) -> float:
        """Since when the first has waited; inf where nobody does."""
        first_s = next(iter(self._queue))[0] if self._queue else math.inf
        return min(first_s, self._rejoined.peekitem(0)[0][0]) if self._rejoined else first_s


class _Row:
    """Those of a lane that are for one instance, or for any."""

    __slots__ = ("by_age", "feasible", "hopeless")

    def __init__(self) -> None:
        self.feasible: SortedKeyList = SortedKeyList(key=_feasible_key)
        self.hopeless: SortedKeyList = SortedKeyList(key=_hopeless_key)
        self.by_age = _ByAge()


def _merged(many: SortedKeyList, few: SortedKeyList) -> Iterator[Tracked]:
    """Both in one order; looks for the place of each of the few, where a merge would look at all."""
    begin = 0
    for tracked in few:
        end = many.bisect_left(tracked)
        yield from many.islice(begin, end)
        yield tracked
        begin = end
    yield from many.islice(begin)


class LaneQueue:
    """Waiting requests of one lane in service order. Ties fall by arrival.

    `place` is an instance id, or None for any instance: where a request waits, and whose view is asked for.
    """

    def __init__(self, age_bound_s: float, share: FairShare | None = None) -> None:
        self._age_bound_s = age_bound_s
        self._share = share
        self._missed_s = -math.inf  # when a target came out of reach last
        self._rows: dict[str | None, _Row] = {None: _Row()}
        self._latest_start: list[tuple[float, int, Tracked]] = []  # heap; leavers are dropped lazily
        self._sweep_at = SWEEP_MIN
        self._row_of: dict[str, str | None] = {}
        self._hopeless: set[str] = set()
        self.tokens = 0  # remaining prompt tokens of all
        self.work_s = 0.0  # `service_s` of all, to within rounding

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, tracked: Tracked) -> bool:
        return tracked.request_id in self._row_of

    def add(self, tracked: Tracked, place: str | None = None) -> None:
        """A request's sort keys must not change while it is in the queue: remove, change, add."""
        row = self._rows.get(place)
        if row is None:
            row = self._rows[place] = _Row()
        row.feasible.add(tracked)
        row.by_age.add(tracked)
        self._row_of[tracked.request_id] = place
        if math.isfinite(tracked.target_s):
            self._watch(tracked)
        self.tokens += tracked.remaining
        self.work_s += tracked.service_s
        if self._share is not None:
            self._share.joined(tracked.request.tenant)

    def remove(self, tracked: Tracked) -> None:
        self._take_out(tracked)
        self._hopeless.discard(tracked.request_id)
        self.tokens -= tracked.remaining
        self.work_s -= tracked.service_s
        if self._share is not None:
            self._share.left(tracked.request.tenant)

    @property
    def counts_shares(self) -> bool:
        """Whether `served` must be told: requests of several tenants came lately."""
        return self._share is not None and len(self._share) > 1

    def served(self, tracked: Tracked, seconds: float) -> None:
        """Its tenant is given `seconds` of all instances."""
        if self._share is not None:
            self._share.served(tracked.request.tenant, seconds)

    def move(self, tracked: Tracked, place: str | None) -> None:
        """Let a waiting request wait for another instance, or for any."""
        self._take_out(tracked)
        row = self._rows.get(place)
        if row is None:
            row = self._rows[place] = _Row()
        (row.hopeless if tracked.request_id in self._hopeless else row.feasible).add(tracked)
        row.by_age.add(tracked)
        self._row_of[tracked.request_id] = place

    def demote(self, now_s: float) -> list[Tracked]:
        """Move those whose latest useful start has passed to the hopeless; returns them."""
        moved: list[Tracked] = []
        while self._latest_start and self._latest_start[0][0] < now_s:
            _, _, tracked = heapq.heappop(self._latest_start)
            waits = tracked.request_id in self._row_of and tracked.request_id not in self._hopeless
            if not waits or tracked.latest_start_s >= now_s:
                continue
            row = self._rows[self._row_of[tracked.request_id]]
            row.feasible.remove(tracked)
            row.hopeless.add(tracked)
            self._hopeless.add(tracked.request_id)
            moved.append(tracked)
        if moved:
            self._missed_s = now_s
        return moved

    @property
    def latest_start_s(self) -> float:
        """No waiting request with a target in reach must start before that; inf where there is none."""
        return self._latest_start[0][0] if self._latest_start else math.inf

    def by_share(self, now_s: float) -> bool:
        """Whether the shares of the tenants count now."""
        if self._share is None or self._share.waiting < 2:
            return False
        return bool(self._hopeless) or now_s - self._missed_s <= DANGER_S

    def feasible(self, place: str) -> Iterable[Tracked]:
        """Those for `place` or any instance whose target is in reach, by priority and then target."""
        return self._by_target(place)[0]

    def due_before(self, target_s: float) -> int:
        """How many that any instance may take have an earlier target, of those with the usual priority."""
        return int(self._rows[None].feasible.bisect_key_left((0, target_s, 0)))

    def least_ahead(self, some: list[Tracked], now_s: float) -> list[Tracked]:
        """Those of `some` whose tenants are the least ahead of their share, and prompts in parts, whose end
        makes room; all while shares don't count."""
        if self._share is None or not some or not self.by_share(now_s):
            return some
        levels = [self._share.level(tracked.request.tenant) for tracked in some]
        least = min(levels)
        return [t for t, level in zip(some, levels, strict=True) if level == least or t.instance_id]

    def has_aged(self, now_s: float, place: str | None = None) -> bool:
        """Whether `aged` yields anybody."""
        return now_s - self._since_s(place) >= self._age_bound_s

    def aged(self, now_s: float, place: str | None = None) -> Iterator[Tracked]:
        """Those for `place` or any instance that waited past the bound, oldest first."""
        views = [self._aged(row, now_s) for row in self._seen_from(place)]
        return views[0] if len(views) == 1 else heapq.merge(*views, key=_age_key)

    def in_order(self, now_s: float, place: str | None = None) -> Iterator[Tracked]:
        """Those for `place` or any instance in service order; demote first."""
        if self.by_share(now_s):
            return self._in_shares(place)
        return chain(*self._by_target(place))

    def _in_shares(self, place: str | None) -> Iterator[Tracked]:
        """The order while shares count; see the module text."""
        assert self._share is not None
        feasible, hopeless = map(list, self._by_target(place))
        tenants = {tracked.request.tenant for tracked in chain(feasible, hopeless)}
        level = {tenant: self._share.level(tenant) for tenant in tenants}

        def rank(tracked: Tracked) -> tuple[int, int]:
            return -tracked.request.priority, level[tracked.request.tenant]

        return chain(sorted(feasible, key=rank), sorted(hopeless, key=rank))

    def _by_target(self, place: str | None) -> tuple[Iterable[Tracked], Iterable[Tracked]]:
        """The feasible and the hopeless."""
        common, own = self._rows[None], self._rows.get(place)
        if own is None or place is None:
            return common.feasible, common.hopeless
        return _merged(common.feasible, own.feasible), _merged(common.hopeless, own.hopeless)

    def everyone(self) -> Iterator[Tracked]:
        return chain.from_iterable(row.by_age for row in self._rows.values())

    def only_for(self, place: str) -> Iterator[Tracked]:
        """Those that wait for this instance, oldest first."""
        row = self._rows.get(place)
        return iter(row.by_age) if row is not None else iter(())

    def is_for(self, place: str) -> bool:
        """Whether anybody waits for this instance only."""
        return place in self._rows

    def places(self) -> Iterator[str]:
        """The instances that somebody waits for."""
        return (place for place in self._rows if place is not None)

    def waits_for(self, place: str) -> bool:
        """Whether anybody waits whom this instance may take."""
        return place in self._rows or bool(self._rows[None].by_age)

    def waits_for_any(self) -> bool:
        """Whether anybody waits whom every instance may take."""
        return bool(self._rows[None].by_age)

    def is_feasible(self, tracked: Tracked) -> bool:
        return tracked.request_id not in self._hopeless

    def oldest_wait_s(self, now_s: float, place: str | None = None) -> float:
        """How long the longest waiter for `place` or any instance has waited; 0 when there is none."""
        since_s = self._since_s(place)
        return now_s - since_s if since_s < math.inf else 0.0

    def _since_s(self, place: str | None) -> float:
        """Since when the longest waiter for `place` or any instance has waited; inf when there is none."""
        since_s, own = self._rows[None].by_age.since_s, self._rows.get(place)
        return since_s if own is None else min(since_s, own.by_age.since_s)

    def _seen_from(self, place: str | None) -> list[_Row]:
        own = self._rows.get(place) if place is not None else None
        return [self._rows[None]] if own is None else [self._rows[None], own]

    def _aged(self, row: _Row, now_s: float) -> Iterator[Tracked]:
        for tracked in row.by_age:
            if now_s - tracked.waiting_since_s < self._age_bound_s:
                return
            yield tracked

    def _take_out(self, tracked: Tracked) -> None:
        place = self._row_of.pop(tracked.request_id)
        row = self._rows[place]
        (row.hopeless if tracked.request_id in self._hopeless else row.feasible).remove(tracked)
        row.by_age.remove(tracked)
        if place is not None and not row.by_age:
            del self._rows[place]

    def _watch(self, tracked: Tracked) -> None:
        """Note its latest start; when the heap has doubled, entries that are moot are swept out."""
        if len(self._latest_start) >= self._sweep_at:
            true = (e for e in self._latest_start if e[2] in self and e[0] == e[2].latest_start_s)
            self._latest_start = sorted(set(true))  # a sorted list is a heap
            self._sweep_at = max(SWEEP_MIN, 2 * len(self._latest_start))
        heapq.heappush(self._latest_start, (tracked.latest_start_s, tracked.seq, tracked))
