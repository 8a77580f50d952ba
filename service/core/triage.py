"""Which long requests are set aside so that the fewest are late (Moore and Hodgson's rule).

Deadline order is the best while all can be in time; past that it makes everybody late by a little. So the
requests of the long lane that can still meet their target are gone through by priority and then target. Ahead
of each lies the work of those kept so far, and of the shorts whose targets are earlier, on all instances
together. Where one would be late, the one with most work of those so far with its priority is set aside. On
one machine and with one priority no choice leaves fewer late.

Who is set aside is served after those that are not, and no target of its own counts. Nothing is remembered:
each plan asks anew, and what was begun has less work left than it had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import groupby

from service.core.tracked import Tracked

STRETCH = 16  # requests


def set_aside(
    by_target: Iterable[Tracked], shorts_s: Callable[[float], float], instances: int, now_s: float
) -> set[Tracked]:
    """Those of `by_target`, requests by priority and then target, that are not to be served in time.

    shorts_s: seconds of one instance that shorts with a target before the given time ask for; it never falls
        as the target rises.
    """
    aside: set[Tracked] = set()
    ahead_s = 0.0  # work that is kept of higher priorities
    for _, same in groupby(by_target, key=lambda t: t.request.priority):
        kept_s = _of_one_priority(list(same), ahead_s, shorts_s, instances, now_s, aside)
        ahead_s += kept_s
    return aside


def _of_one_priority(
    by_target: Sequence[Tracked],
    ahead_s: float,
    shorts_s: Callable[[float], float],
    instances: int,
    now_s: float,
    aside: set[Tracked],
) -> float:
    """Put who is set aside into `aside`; the work of the others."""
    kept: list[tuple[float, int, Tracked]] = []  # heap, most work first
    fresh: list[tuple[float, int, Tracked]] = []  # to be put on it
    work_s = ahead_s
    # `shorts_s` is asked for the end of each stretch, and in between only where that doesn't tell:
    before_s, asked_s = 0.0, -math.inf  # of a target that is no later
    within_s, end_s = 0.0, -math.inf  # of one that is no earlier
    for index, tracked in enumerate(by_target):
        if index % STRETCH == 0:
            before_s, asked_s = within_s, end_s
            end_s = by_target[min(index + STRETCH, len(by_target)) - 1].target_s
            within_s = shorts_s(end_s)
        target_s, own_s = tracked.target_s, tracked.service_s
        work_s += own_s
        fresh.append((-own_s, tracked.seq, tracked))
        while now_s + (work_s + within_s) / instances > target_s:
            if now_s + (work_s + before_s) / instances > target_s:
                while fresh:
                    heappush(kept, fresh.pop())
                if not kept:
                    break
                minus_s, _, most = heappop(kept)
                work_s += minus_s
                aside.add(most)
            elif asked_s < target_s:
                before_s, asked_s = shorts_s(target_s), target_s
            else:
                break
    return work_s - ahead_s
