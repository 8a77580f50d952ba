"""Earliest deadline first with chunked prefill, after QoServe / Niyama (arXiv 2503.22562).

Order: target + `length_weight` x the predicted time of what is left of the prompt; 0 is plain EDF, more
leans to the shortest, which keeps more targets under overload. A newcomer that can no longer make its
target is put behind all that still can (their eager relegation); one that holds KV is not. Requests without
a target come last, by arrival.

A pass is filled in this order to the token budget. With `slack_chunks` the budget shrinks, while requests
decode, to what is predicted to end within their slack, 20 % kept in hand for misprediction as they do.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from service.core.policy import Instance, KvGate, Plan
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Reason
from service.policies.central import CentralPolicy
from service.policies.passes import PassBuilder

LOOK_MAX = 32  # newcomers looked at for one pass; some may lack room for KV
MISPREDICTION = 1.2  # a chunk is taken to last this much longer than predicted
CHUNK_MIN = 128  # tokens, however little slack there is
BEHIND_S = 1e9  # added to the rank of a request that can't make it; without a target twice


@dataclass(frozen=True, slots=True)
class EdfKnobs:
    """length_weight: seconds of deadline that a second of prefill weighs. slack_chunks: see above."""

    length_weight: float = 0.0
    slack_chunks: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.length_weight < math.inf:
            raise ValueError(f"length_weight must be finite and at least 0, got {self.length_weight}")


class EdfChunkedPolicy(CentralPolicy):
    def __init__(self, settings: SchedulerSettings, knobs: EdfKnobs) -> None:
        super().__init__()
        self._settings = settings
        self._knobs = knobs
        self._latest_start: list[tuple[float, int, Tracked]] = []  # heap of newcomers; moot entries drop out

    def rank(self, tracked: Tracked) -> float:
        if math.isinf(tracked.target_s):
            return 2.0 * BEHIND_S + tracked.seq
        return tracked.target_s + self._knobs.length_weight * tracked.service_s

    def add(self, tracked: Tracked, now_s: float, *, arrival: bool) -> None:
        super().add(tracked, now_s, arrival=arrival)
        if tracked.instance_id is None and math.isfinite(tracked.target_s):
            heapq.heappush(self._latest_start, (tracked.latest_start_s, tracked.seq, tracked))

    def late(self, now_s: float) -> list[Tracked]:
        """Newcomers that can't make their target any more, now behind the others."""
        moved: list[Tracked] = []
        while self._latest_start and self._latest_start[0][0] < now_s:
            tracked = heapq.heappop(self._latest_start)[2]
            waits = tracked in self._waiting and tracked.instance_id is None
            if waits and self._waiting.rank_of(tracked) < BEHIND_S:
                self._waiting.rerank(tracked, BEHIND_S + self.rank(tracked))
                moved.append(tracked)
        return moved

    def plan(self, instance: Instance, now_s: float) -> Plan:
        gate = KvGate(instance, self._settings, now_s)
        builder = PassBuilder(instance, gate, self._budget(instance))
        for tracked in self._waiting.candidates(instance.instance_id, gate, LOOK_MAX):
            if builder.full:
                break
            builder.offer(tracked)
        return builder.plan(self._waiting, Reason.BUDGET_FILLED)

    def _budget(self, instance: Instance) -> int:
        """Tokens of the pass: all, or what the slack of those that decode allows."""
        budget = self._settings.budget_tokens
        allowed_s = instance.decode.pass_s_max() if self._knobs.slack_chunks else math.inf
        if math.isinf(allowed_s):
            return budget
        low, high = min(CHUNK_MIN, budget), budget
        while low < high:
            middle = (low + high + 1) // 2
            if MISPREDICTION * instance.pricer.pass_s([(middle, 0)]) <= allowed_s:
                low = middle
            else:
                high = middle - 1
        return low
