"""When an instance is given up: silence, refusals, a pass that does not end. Numbers in, verdict out.

A worker that answers is not yet one that works: the usual end of a GPU process is a forward pass that never
returns while everything around it answers. So a pass is measured against its prediction. At `suspect_factor`
times it (and `suspect_s_min` at least) the instance is suspect, which is shown and logged; at `hung_factor`
times (and `hung_s_min`) it is down. The factors are wide because a prediction is of the pass alone and knows
nothing of a first run, a clock that throttles or a neighbour on the host. All four figures are chosen, not
measured. For passes of many seconds the factors rule, for short ones the floors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Health(StrEnum):
    WELL = "well"
    SUSPECT = "suspect"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Seconds, unless they are counts or factors.

    heartbeat_s: how often a worker says how far it is. silence_s: without a word for so long a stream counts
    as broken. grace_s: after a break the worker may come back for so long with all it had. refusals_max: so
    many attempts in a row answered by "nobody listens on that port" end the grace: the process is gone.
    backoff_s_min, _max: between attempts, doubling, each times a random factor from 0.5 to 1.
    orphan_s: a worker without a scheduler for so long aborts what it holds; above grace_s, so that what a
    scheduler still hopes for is there.
    """

    heartbeat_s: float = 0.5
    silence_s: float = 2.0
    grace_s: float = 3.0
    refusals_max: int = 2
    backoff_s_min: float = 0.05
    backoff_s_max: float = 1.0
    orphan_s: float = 10.0
    settle_s: float = 30.0  # for a takeover: the pass of the scheduler before runs to its end
    suspect_factor: float = 4.0
    suspect_s_min: float = 1.0
    hung_factor: float = 20.0
    hung_s_min: float = 10.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("silence_s", "heartbeat_s", "silence_s"),
            ("orphan_s", "grace_s", "orphan_s"),
            ("backoff_s_max", "backoff_s_min", "backoff_s_max"),
            ("hung_factor", "suspect_factor", "hung_factor"),
            ("hung_s_min", "suspect_s_min", "hung_s_min"),
        ):
            if not 0.0 < getattr(self, low) <= getattr(self, high):
                raise ValueError(f"{name}: must be at least {low}, and both above 0")

    def verdict(self, predicted_s: float, running_s: float) -> Health:
        """Of a pass that has run for `running_s`; a prediction that is no number counts as 0."""
        predicted_s = predicted_s if math.isfinite(predicted_s) else 0.0
        if running_s > self.hung_limit_s(predicted_s):
            return Health.HUNG
        suspect_s = max(self.suspect_s_min, self.suspect_factor * predicted_s)
        return Health.SUSPECT if running_s > suspect_s else Health.WELL

    def hung_limit_s(self, predicted_s: float) -> float:
        return max(self.hung_s_min, self.hung_factor * (predicted_s if math.isfinite(predicted_s) else 0.0))
