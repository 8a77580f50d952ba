"""Long requests that must not wait for another pass, and how long a pass may take for their sake.

Shorts go first, so a long prompt of a few hundred tokens could wait until its target is out of reach while
every short has time to spare. It is *due* when little more than its own time is left,

    target - now  <  time / (1 - load of the shorts)  +  PASSES x time of the pass without it

and then it joins the pass whether or not that lowers the summed completion time, as far as no short loses its
target by it: those in the pass, the next one behind it, and the last one, which waits until the shorts before
it are through. Some passes ahead of time, since the next ones may be longer than this, or full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked

PASSES = 5  # fewer miss targets when shorts keep an engine busy, more gain nothing and cost the shorts


def due_requests(
    longs: Iterable[Tracked],
    feasible: Callable[[Tracked], bool],
    front_s: float,
    load: float,
    now_s: float,
    safety_s: float,
) -> set[Tracked]:
    """Those of `longs` that are due beside a pass of `front_s` seconds; `load`: of the shorts, below 1."""
    spare_s = PASSES * front_s + safety_s
    return {
        tracked
        for tracked in longs
        if tracked.target_s - now_s < tracked.service_s / (1.0 - load) + spare_s and feasible(tracked)
    }


def pass_s_max(
    front_s: float,
    next_target_s: float,
    tokens_behind: int,
    tokens_per_s: float,
    now_s: float,
    settings: SchedulerSettings,
) -> float:
    """How long a pass may take that holds due requests beside shorts, so that those behind it keep their
    targets. tokens_behind: short tokens that wait for it; tokens_per_s: at which all instances serve them;
    next_target_s: of the first of them."""
    drain_s = tokens_behind / tokens_per_s
    first_s = next_target_s - now_s - settings.safety_s - min(drain_s, front_s)
    return min(first_s, settings.ttft_target_short_s - settings.safety_s - drain_s)
