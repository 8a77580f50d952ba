"""When a pass that runs is not coming back, and which instances hang by that.

A pass that runs for more than max(`hang_s_min`, `hang_ratio` x its predicted time) is given up; the driver
cuts the link and tells the scheduler that the instance is down, and what it had goes the way of every lost
instance. What such a worker still says is of a pass that nobody waits for. Well before that an instance is
*suspect*, which is shown and logged and no more. The factors are wide, because a prediction is of the pass
alone and knows nothing of a first run, a clock that throttles or a neighbour on the host; all are chosen, not
measured. For passes of many seconds the factors rule, for short ones the floors.

`HangRule` is the rule. A driver whose workers say how long their pass runs asks it directly (the worker link
of a fleet, `service/fleet/remote_worker.py`). One whose workers say nothing in between asks a `ProgressWatch`
every `period_s`, which measures for it. Its time counts only as far as somebody looked: between two looks at
most `STEP_MAX` periods. A driver that was stopped for a minute finds the answers of that minute when it goes
on, and must not take its own silence for that of its workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from service.core.policy import Instance
from service.core.settings import SchedulerSettings

LOOKS = 4  # in `hang_s_min`
STEP_MAX = 2.0  # periods


class Health(StrEnum):
    """Of the pass that an instance runs."""

    WELL = "well"
    SUSPECT = "suspect"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class HangRule:
    """Factors of the predicted time, and seconds below which they do not act. hang_ratio 0: nothing hangs."""

    hang_ratio: float = 30.0
    hang_s_min: float = 10.0
    suspect_ratio: float = 4.0
    suspect_s_min: float = 1.0

    def __post_init__(self) -> None:
        for name, low in (("hang_ratio", "suspect_ratio"), ("hang_s_min", "suspect_s_min")):
            if name == "hang_ratio" and self.hang_ratio == 0.0:
                continue
            if not 0.0 < getattr(self, low) <= getattr(self, name):
                raise ValueError(f"{name}: must be at least {low}, and both above 0")

    @classmethod
    def of(cls, settings: SchedulerSettings) -> HangRule:
        """The operator's. Nobody is suspect later than hung."""
        usual = cls()
        return cls(
            settings.hang_ratio,
            settings.hang_s_min,
            min(usual.suspect_ratio, settings.hang_ratio or math.inf),
            min(usual.suspect_s_min, settings.hang_s_min),
        )

    def limit_s(self, predicted_s: float) -> float:
        """A pass that runs for longer hangs; inf for never. A prediction that is no number counts as 0."""
        return max(self.hang_s_min, self.hang_ratio * _known(predicted_s)) if self.hang_ratio else math.inf

    def verdict(self, predicted_s: float, running_s: float) -> Health:
        """Of a pass that has run for `running_s`."""
        if running_s > self.limit_s(predicted_s):
            return Health.HUNG
        suspect_s = max(self.suspect_s_min, self.suspect_ratio * _known(predicted_s))
        return Health.SUSPECT if running_s > suspect_s else Health.WELL


def _known(predicted_s: float) -> float:
    return predicted_s if math.isfinite(predicted_s) else 0.0


@dataclass(frozen=True, slots=True)
class Hung:
    """A pass that was waited for in vain. Seconds."""

    instance_id: str
    pass_id: int
    waited_s: float
    allowed_s: float


class ProgressWatch:
    def __init__(self, settings: SchedulerSettings) -> None:
        self._rule = HangRule.of(settings)
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
            if self._rule.verdict(running.predicted_s, waited_s) is Health.HUNG:
                allowed_s = self._rule.limit_s(running.predicted_s)
                hung.append(Hung(instance.instance_id, pass_id, waited_s, allowed_s))
        return tuple(hung)
