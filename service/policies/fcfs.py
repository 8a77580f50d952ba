"""First come, first served with continuous batching by token budget and chunked prefill.

What SGLang (`--chunked-prefill-size`, fcfs order) and vLLM V1 (`max_num_batched_tokens`, chunked prefill) do
by default: every pass takes requests in arrival order until its token budget is full; the one that does not
fit is cut, and goes on first in the next pass. No lanes, no targets, no window. A newcomer whose KV does not
fit holds back the newcomers behind it; those that hold KV already go on, or nobody could.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from sortedcontainers import SortedDict

from service.core.policy import Instance, PassPlan, Plan, PlanItem, Wait
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import DispatchNumbers, Lane, Reason


class FcfsPolicy:
    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._waiting: SortedDict = SortedDict()  # seq -> request
        self._load = {lane: [0, 0] for lane in Lane}  # requests, tokens

    def instance_up(self, instance: Instance, now_s: float) -> None:
        pass

    def instance_down(self, instance: Instance, now_s: float) -> None:
        pass

    def add(self, tracked: Tracked, now_s: float, *, arrival: bool) -> None:
        self._waiting[tracked.seq] = tracked
        self._count(tracked, 1)

    def remove(self, tracked: Tracked) -> None:
        del self._waiting[tracked.seq]
        self._count(tracked, -1)

    def late(self, now_s: float) -> list[Tracked]:
        return []

    def waiting(self) -> Iterator[Tracked]:
        return iter(self._waiting.values())

    def lane_load(self, lane: Lane) -> tuple[int, int]:
        requests, tokens = self._load[lane]
        return requests, tokens

    def window(self) -> tuple[float, int]:
        return 0.0, 0

    def dispatched(self, plan: PassPlan, now_s: float) -> None:
        pass

    def plan(self, instance: Instance, now_s: float) -> Plan:
        budget = min(self._settings.budget_tokens, instance.spec.profiles.tokens_max)
        items: list[PlanItem] = []
        for tracked in self._with_room(instance):
            if budget == 0 or len(items) == instance.requests_max:
                break
            whole = instance.item_of(tracked)
            chunk = instance.chunk_tokens(whole, min(budget, instance.spec.profiles.request_tokens_max))
            if chunk == 0:
                break
            item = PlanItem(tracked, chunk, whole[1])
            if math.isinf(instance.pricer.pass_s([*(i.size for i in items), item.size])):
                break
            items.append(item)
            budget -= item.new_tokens
        if not items:
            return Wait(math.inf, Reason.WAITING_FOR_KV) if self._waiting else None
        predicted_s = instance.pricer.pass_s([item.size for item in items])
        numbers = DispatchNumbers(
            predicted_s=predicted_s,
            queued_short_tokens=self._load[Lane.SHORT][1],
            queued_long_tokens=self._load[Lane.LONG][1],
        )
        return PassPlan(tuple(items), Reason.BUDGET_FILLED, predicted_s, numbers)

    def _with_room(self, instance: Instance) -> Iterator[Tracked]:
        """In arrival order: all up to the first newcomer without room for its KV, then those with KV here."""
        blocks = 0
        for tracked in self._waiting.values():
            if not instance.may_take(tracked):
                continue
            if tracked.instance_id is None:
                if not instance.kv.fits(tracked.kv_tokens_max, blocks):
                    held = (t for t in instance.partial.values() if t.seq > tracked.seq)
                    yield from sorted((t for t in held if t.seq in self._waiting), key=lambda t: t.seq)
                    return
                blocks += instance.kv.blocks_for(tracked.kv_tokens_max)
            yield tracked

    def _count(self, tracked: Tracked, sign: int) -> None:
        load = self._load[tracked.lane]
        load[0] += sign
        load[1] += sign * tracked.remaining
