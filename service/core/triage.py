"""Which long requests are set aside so that the fewest are late (Moore and Hodgson's rule).

Deadline order is the best while all can be in time; past that it makes everybody late by a little. So the
requests of the long lane that can still meet their target are gone through by target. Ahead of each lies the
work of those kept so far, and of the shorts whose targets are earlier, on all instances together. Where one
would be late, the one with most work of those so far is set aside. On one machine no choice leaves fewer
late.

Who is set aside is served after those that are not, and no target of its own counts. Nothing is remembered:
each plan asks anew, and what was begun has less work left than it had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from service.core.tracked import Tracked


def set_aside(
    by_target: Iterable[Tracked], shorts_s: Callable[[float], float], instances: int, now_s: float
) -> set[Tracked]:
    """Those of `by_target`, requests by priority and then target, that are not to be served in time.

    shorts_s: seconds of one instance that shorts with a target before the given time ask for; it never falls
        as the target rises.
    """
    aside: set[Tracked] = set()
    kept: list[tuple[float, int, Tracked]] = []  # heap, most work first
    fresh: list[tuple[float, int, Tracked]] = []  # to be put on it
    work_s, all_s = 0.0, shorts_s(math.inf)
    before_s, asked_s = 0.0, -math.inf  # `shorts_s` of a target that is no later: it is asked seldom
    for tracked in by_target:
        target_s, own_s = tracked.target_s, tracked.service_s
        if tracked.position:
            own_s *= tracked.remaining / tracked.request.prompt_tokens
        work_s += own_s
        fresh.append((-own_s, tracked.seq, tracked))
        if target_s < asked_s:  # a lower priority begins
            before_s, asked_s = 0.0, -math.inf
        while now_s + (work_s + all_s) / instances > target_s:
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
    return aside
