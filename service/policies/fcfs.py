"""First come, first served with continuous batching by token budget and chunked prefill.

What SGLang (`--chunked-prefill-size`, fcfs order) and vLLM V1 (`max_num_batched_tokens`, chunked prefill) do
by default: every pass takes requests in arrival order until its token budget is full; the one that does not
fit is cut, and goes on first in the next pass. No lanes, no targets, no window. A newcomer whose KV does not
fit holds back the newcomers behind it; those that hold KV already go on, or nobody could.
"""

from __future__ import annotations

from service.core.policy import Instance, Plan
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Reason
from service.policies.central import CentralPolicy
from service.policies.passes import Offer, PassBuilder
from service.policies.waiting import HeadGate


class FcfsPolicy(CentralPolicy):
    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__()
        self._settings = settings

    def rank(self, tracked: Tracked) -> float:
        return tracked.seq

    def plan(self, instance: Instance, now_s: float) -> Plan:
        gate = HeadGate(instance)
        builder = PassBuilder(instance, gate, self._settings.budget_tokens)
        for tracked in self._waiting.candidates(instance.instance_id, gate):
            if builder.full or builder.offer(tracked) is Offer.NO_SPACE:
                break
        return builder.plan(self._waiting, Reason.BUDGET_FILLED)
