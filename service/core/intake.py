"""The door: a new request becomes a live record, or is refused with the reason.

Bounds and sizes are `admission`'s, lane and target `lanes`'; this puts them in order and keeps what does not
change between two requests (the summed rate of the instances) instead of working it out for each.
"""

from __future__ import annotations

from collections.abc import Collection

from service.core.admission import Admission, QueueLoad
from service.core.lanes import classify
from service.core.policy import Instance, PrefillPolicy
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Lane, Outcome, Reason, Reject, Request


class Intake:
    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._admission = Admission(settings)

    def closed(self, request: Request) -> Reject:
        """The answer to everybody while the service drains."""
        detail = "the service is shutting down"
        return Reject(request.request_id, Outcome.REJECTED_DRAINING, Reason.DRAINING, detail)

    def admit(
        self,
        request: Request,
        instances: Collection[Instance],
        policy: PrefillPolicy,
        seq: int,
        now_s: float,
    ) -> Tracked | Reject:
        """The live record of `request`, or why it is refused."""
        short, long = (policy.lane_load(lane) for lane in (Lane.SHORT, Lane.LONG))
        tokens_per_s = max(1.0, sum(i.tokens_per_s for i in instances))
        load = QueueLoad(short[0] + long[0], short[1] + long[1], tokens_per_s, *long)
        refusal = self._admission.refusal(request, load, [i.spec for i in instances], now_s)
        if refusal is not None:
            return refusal
        tracked = classify(request, instances, self._settings, seq)
        crowded = self._admission.long_refusal(request, load) if tracked.lane is Lane.LONG else None
        return crowded or tracked
