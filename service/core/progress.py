"""Which instances have stopped answering in the middle of a pass.

A pass that runs for more than max(`hang_s_min`, `hang_ratio` x its predicted time) is not coming back. The
driver asks every `period_s`, cuts the link to those that are named and tells the scheduler that they are
down; what they had goes the way of every lost instance. What such a worker still says is of a pass that
nobody waits for.

Time counts only as far as somebody looked: between two looks at most `STEP_MAX` periods. A driver that was
stopped for a minute finds the answers of that minute when it goes on, and must not take its own silence for
that of its workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from service.core.policy import Instance
from service.core.settings import SchedulerSettings

LOOKS = 4  # in `hang_s_min`
STEP_MAX = 2.0  # periods


@dataclass(frozen=True, slots=True)
class Hung:
    """A pass that was waited for in vain. Seconds."""

    instance_id: str
    pass_id: int
    waited_s: float
    allowed_s: float


class ProgressWatch:
    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self.period_s = settings.hang_s_min / LOOKS
        self._seen: dict[str, tuple[int, float]] = {}  # instance -> its pass, and for how long it was seen
        self._looked_s = -math.inf

    def look(self, instances: Iterable[Instance], now_s: float) -> tuple[Hung, ...]:
        """Those of `instances` that hang, each named at every look until it is down."""
        step_s = min(now_s - self._looked_s, STEP_MAX * self.period_s)
        self._looked_s = now_s
        before, self._seen = self._seen, {}
        hung: list[Hung] = []
        for instance in instances:
            running = instance.running
            if running is None:
                continue
            pass_id, waited_s = running.pass_.pass_id, 0.0
            seen = before.get(instance.instance_id)
            if seen is not None and seen[0] == pass_id:
                waited_s = seen[1] + step_s
            self._seen[instance.instance_id] = pass_id, waited_s
            allowed_s = max(self._settings.hang_s_min, self._settings.hang_ratio * running.predicted_s)
            if self._settings.hang_ratio and waited_s > allowed_s:
                hung.append(Hung(instance.instance_id, pass_id, waited_s, allowed_s))
        return tuple(hung)
