"""Fair shares of the tenants: who has had more than the others (one lane), and who holds too much of a full
queue.

**Service.** Start-time fair queueing with the counters of VTC ("Fairness in Serving Large Language Models",
OSDI 2024), and an allowance. Each tenant has a counter: the predicted seconds of all instances together that
it was served, over its weight. The *front* is the largest counter at which somebody was served so far,

    front = max(front, counter before the service)          counter += seconds / weight

and who comes back, or is served, is taken for no more than two bursts behind it, so idling earns no more than
that. With b the burst the level of a tenant is

    level = max(0, floor((counter - front) / b) + 2)

0 for whoever had little of late, 2 and more for those at the front. A tenant that sends less than its share
stays at level 0, since the front leaves it behind; one that floods is the front. Of tenants that always have
requests waiting, and where the lower level goes first, two differ by no more than a burst and one request
each, all over their weights. The order by level is the queue's (`order`), and so is when it is in force.

While one tenant only is known nobody need count: it is at the front once a second one comes.

A tenant with nothing waiting is forgotten when the table has doubled, if its level is 0 (it would return to
where it is, to within a burst), or if `KEPT_S` were served since.

**Room.** Where a bound of the queue is reached, a tenant's part of it is weight / sum of the weights of those
who want it. A newcomer that stays within the part of its tenant takes the place of the newest requests
without a pass of whoever holds most over its part, in proportion to the weight; any other is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from service.core.lifecycle import RequestState
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Request

CREDIT_BURSTS = 2  # behind the front at most
SWEEP_MIN = 256  # tenants; below this a sweep is not worth its time
KEPT_S = 60.0  # of service to all, as long as a request may wait at most by default


@dataclass(slots=True)
class _Tenant:
    """counter_s: see the module text. seen_s: service to all when it was served last."""

    weight: float
    counter_s: float
    waiting: int = 0
    seen_s: float = 0.0


class FairShare:
    """The counters of one lane. burst_s: seconds of all instances, above 0."""

    def __init__(self, burst_s: float, weights: Mapping[str, float]) -> None:
        self._burst_s = burst_s
        self._weights = weights
        self._tenants: dict[str, _Tenant] = {}
        self._front_s = 0.0
        self._total_s = 0.0
        self._sweep_at = SWEEP_MIN
        self.waiting = 0  # tenants with requests in the queue

    @classmethod
    def of(cls, settings: SchedulerSettings) -> FairShare | None:
        """None where tenants are not told apart."""
        if settings.tenant_burst_s == 0.0:
            return None
        return cls(settings.tenant_burst_s, dict(settings.tenant_weights))

    def __len__(self) -> int:
        """Tenants that are known."""
        return len(self._tenants)

    def joined(self, tenant: str) -> None:
        """A request of it waits."""
        known = self._tenants.get(tenant)
        if known is None:
            known = self._meet(tenant)
        if known.waiting == 0:
            self.waiting += 1
            known.counter_s = max(known.counter_s, self._rear_s)
        known.waiting += 1

    def left(self, tenant: str) -> None:
        """One of its requests waits no more."""
        known = self._tenants[tenant]
        known.waiting -= 1
        if known.waiting == 0:
            self.waiting -= 1

    def served(self, tenant: str, seconds: float) -> None:
        """It is given `seconds` of all instances."""
        known = self._tenants.get(tenant)
        if known is None:
            known = self._meet(tenant)
        if known.counter_s > self._front_s:
            self._front_s = known.counter_s
        elif known.counter_s < self._rear_s:
            known.counter_s = self._rear_s
        known.counter_s += seconds / known.weight
        self._total_s += seconds
        known.seen_s = self._total_s

    def level(self, tenant: str) -> int:
        """How far ahead of its share a tenant is, in bursts; see the module text."""
        known = self._tenants.get(tenant)
        if known is None:
            return 0
        return max(0, int((known.counter_s - self._front_s) / self._burst_s + CREDIT_BURSTS))

    @property
    def _rear_s(self) -> float:
        """The counter of a tenant that comes back."""
        return self._front_s - CREDIT_BURSTS * self._burst_s

    def _meet(self, tenant: str) -> _Tenant:
        if len(self._tenants) == 1:  # it had all there was, which nobody counted
            (alone,) = self._tenants.values()
            alone.counter_s = max(alone.counter_s, self._front_s)
        if len(self._tenants) >= self._sweep_at:
            self._sweep()
        met = self._tenants[tenant] = _Tenant(self._weights.get(tenant, 1.0), self._rear_s)
        return met

    def _sweep(self) -> None:
        self._tenants = {name: known for name, known in self._tenants.items() if self._is_kept(name, known)}
        self._sweep_at = max(SWEEP_MIN, 2 * len(self._tenants))

    def _is_kept(self, name: str, known: _Tenant) -> bool:
        if known.waiting:
            return True
        return self._total_s - known.seen_s < KEPT_S and self.level(name) > 0


class Room:
    """A queue, or a part of it, with bounds on its requests and prompt tokens. `waiting`: all in it."""

    def __init__(
        self, waiting: Iterable[Tracked], bounds: tuple[float, float], weights: Mapping[str, float]
    ) -> None:
        self._bounds = bounds
        self._weights = weights
        self._held: dict[str, list[int]] = {}  # tenant -> requests, tokens
        self._all = [0, 0]
        self._fresh: dict[str, list[Tracked]] = {}  # without a pass so far, in order of arrival
        for tracked in waiting:
            self._count(tracked, 1)
            if tracked.state is RequestState.QUEUED:
                self._fresh.setdefault(tracked.request.tenant, []).append(tracked)
        for mine in self._fresh.values():
            mine.sort(key=lambda t: t.seq)
        self._weight = sum(map(self._weight_of, self._held))

    def is_within(self, request: Request) -> bool:
        """Whether the tenant of `request` stays within its part with it."""
        held = self._held.get(request.tenant, (0, 0))
        parts = self._parts(request.tenant, request.tenant)
        return held[0] + 1 <= parts[0] and held[1] + request.prompt_tokens <= parts[1]

    def make(self, request: Request, gone: Iterable[Tracked] = ()) -> list[Tracked] | None:
        """Who gives way to `request` once those of `gone` have, in this order; None where too few can."""
        for tracked in gone:
            self._give_up(tracked)
        if not self.is_within(request):
            return None
        given: list[Tracked] = []
        while (bound := self._passed(request)) is not None:
            tenant = self._most_over(bound, request.tenant)
            if tenant is None:
                return None
            given.append(self._fresh[tenant][-1])
            self._give_up(given[-1])
        return given

    def _passed(self, request: Request) -> int | None:
        """The bound (0: requests, 1: tokens) that `request` would pass."""
        if self._all[0] + 1 > self._bounds[0]:
            return 0
        return 1 if self._all[1] + request.prompt_tokens > self._bounds[1] else None

    def _most_over(self, bound: int, newcomer: str) -> str | None:
        """The tenant that holds most over its part of a bound, in proportion to its weight, of those that can
        give way. Ties fall by name."""
        over = {
            name: held[bound] / self._weight_of(name)
            for name, held in self._held.items()
            if self._fresh.get(name) and held[bound] > self._parts(name, newcomer)[bound]
        }
        return max(over, key=lambda name: (over[name], name), default=None)

    def _give_up(self, tracked: Tracked) -> None:
        mine = self._fresh.get(tracked.request.tenant, [])
        if tracked in mine:
            mine.remove(tracked)
            self._count(tracked, -1)

    def _count(self, tracked: Tracked, sign: int) -> None:
        for sums in (self._held.setdefault(tracked.request.tenant, [0, 0]), self._all):
            sums[0] += sign
            sums[1] += sign * tracked.remaining

    def _weight_of(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _parts(self, tenant: str, newcomer: str) -> tuple[float, float]:
        """Of both bounds, where `newcomer` wants the queue too."""
        weight = self._weight + (0.0 if newcomer in self._held else self._weight_of(newcomer))
        part = self._weight_of(tenant) / weight
        return part * self._bounds[0], part * self._bounds[1]
