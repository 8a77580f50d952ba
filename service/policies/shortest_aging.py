"""Shortest predicted prefill first, with ageing, after PrefillOnly (arXiv 2505.07203) and LMCache's SPF.

Before every pass the request with the lowest

    JCT - ageing_weight x time waited

goes first; JCT is the predicted time of what is left of its prefill, given what is cached now. Waiting
lowers all scores at the same pace, so the order is that of JCT + ageing_weight x arrival, which stands
still. Only a change of the cache moves a request: when a pass has stored blocks, those waiting that begin
with the same block are priced anew, some a plan; and the first in order are checked against evictions. With
a weight w a request is overtaken only by those that arrive within JCT / w after it, so nobody starves while
w > 0.

PrefillOnly runs one request at a time, whole. `batch_tokens` > 0 packs requests in the same order into a pass
of so many tokens instead, and cuts the one that does not fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

from service.core.policy import Instance, KvGate, PassPlan, Plan
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Reason
from service.policies.central import CentralPolicy
from service.policies.passes import Offer, PassBuilder

LOOK_MAX = 32  # newcomers looked at for one pass
REFRESH_MAX = 32  # requests priced anew for one pass


@dataclass(frozen=True, slots=True)
class ShortestKnobs:
    """ageing_weight: seconds of JCT that a second of waiting makes up for. batch_tokens: tokens of a pass; 0:
    one request at a time."""

    ageing_weight: float = 0.05
    batch_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.ageing_weight < math.inf:
            raise ValueError(f"ageing_weight must be finite and at least 0, got {self.ageing_weight}")
        if self.batch_tokens < 0:
            raise ValueError(f"batch_tokens must be at least 0 (one request), got {self.batch_tokens}")


@dataclass(frozen=True, slots=True)
class _Priced:
    """What the rank of a newcomer rests on: the history found on the instance where it was longest."""

    history: int
    instance_id: str
    jct_s: float


class ShortestAgingPolicy(CentralPolicy):
    def __init__(self, settings: SchedulerSettings, knobs: ShortestKnobs) -> None:
        super().__init__()
        self._settings = settings
        self._knobs = knobs
        self._instances: dict[str, Instance] = {}
        self._priced: dict[str, _Priced] = {}  # newcomers with block hashes
        self._sharing: dict[int, dict[str, Tracked]] = {}  # those of them by first block
        self._stored: dict[str, set[int]] = {}  # first blocks of passes since the last refresh, by instance
        self._to_refresh: dict[str, dict[str, Tracked]] = {}  # by instance

    def instance_up(self, instance: Instance, now_s: float) -> None:
        self._instances[instance.instance_id] = instance

    def instance_down(self, instance: Instance, now_s: float) -> None:
        self._instances.pop(instance.instance_id, None)
        self._stored.pop(instance.instance_id, None)
        self._to_refresh.pop(instance.instance_id, None)

    def rank(self, tracked: Tracked) -> float:
        priced = self._priced.get(tracked.request_id)
        jct_s = tracked.service_s if priced is None else priced.jct_s
        return jct_s + self._knobs.ageing_weight * tracked.request.arrival_s

    def add(self, tracked: Tracked, now_s: float, *, arrival: bool) -> None:
        hashes = tracked.request.block_hashes
        if hashes and tracked.instance_id is None:
            self._price(tracked)
            self._sharing.setdefault(hashes[0], {})[tracked.request_id] = tracked
        super().add(tracked, now_s, arrival=arrival)

    def remove(self, tracked: Tracked) -> None:
        super().remove(tracked)
        if self._priced.pop(tracked.request_id, None) is not None:
            first = tracked.request.block_hashes[0]
            sharing = self._sharing[first]
            del sharing[tracked.request_id]
            if not sharing:
                del self._sharing[first]

    def dispatched(self, plan: PassPlan, now_s: float) -> None:
        for item in plan.items:
            hashes = item.tracked.request.block_hashes
            if hashes and item.tracked.instance_id in self._instances:
                self._stored.setdefault(item.tracked.instance_id, set()).add(hashes[0])

    def plan(self, instance: Instance, now_s: float) -> Plan:
        if instance.running is None:  # else its blocks are still to come
            self._refresh(instance)
        gate = KvGate(instance, self._settings, now_s)
        single = self._knobs.batch_tokens == 0
        budget = instance.spec.profiles.tokens_max if single else self._knobs.batch_tokens
        builder = PassBuilder(instance, gate, budget, 1 if single else None)
        found = list(self._waiting.candidates(instance.instance_id, gate, LOOK_MAX))
        for _, _, tracked in sorted((self._score(t, instance), t.seq, t) for t in found):
            if builder.full or (builder.offer(tracked) is Offer.NO_SPACE and not single):
                break
        return builder.plan(self._waiting, Reason.BUDGET_FILLED)

    def _score(self, tracked: Tracked, instance: Instance) -> float:
        """The rank of `tracked` on this very instance, with what is cached here now."""
        priced = self._priced.get(tracked.request_id)
        if priced is None:
            return self._waiting.rank_of(tracked)
        if priced.instance_id not in self._instances:
            priced = self._reprice(tracked)
        history = instance.history_of(tracked)
        if history == priced.history:
            return self._waiting.rank_of(tracked)
        if instance.instance_id == priced.instance_id:
            self._reprice(tracked)  # some of it was evicted, or more is cached
        jct_s = instance.pricer.request_s(tracked.request.prompt_tokens - history, history)
        return jct_s + self._knobs.ageing_weight * tracked.request.arrival_s

    def _refresh(self, instance: Instance) -> None:
        """Price those anew, some a plan, that share a first block with what has run here."""
        pending = self._to_refresh.setdefault(instance.instance_id, {})
        for first in self._stored.pop(instance.instance_id, ()):
            pending.update(self._sharing.get(first, {}))
        for request_id in list(islice(pending, REFRESH_MAX)):
            tracked = pending.pop(request_id)
            priced = self._priced.get(request_id)
            if priced is not None and instance.history_of(tracked) > priced.history:
                self._reprice(tracked)

    def _reprice(self, tracked: Tracked) -> _Priced:
        priced = self._price(tracked)
        self._waiting.rerank(tracked, self.rank(tracked))
        return priced

    def _price(self, tracked: Tracked) -> _Priced:
        """JCT where most of the prompt is cached; as at admission where there is no instance."""
        best = max(self._instances.values(), key=lambda i: i.history_of(tracked), default=None)
        if best is None:
            priced = _Priced(0, "", tracked.service_s)
        else:
            history = best.history_of(tracked)
            jct_s = best.pricer.request_s(tracked.request.prompt_tokens - history, history)
            priced = _Priced(history, best.instance_id, jct_s)
        self._priced[tracked.request_id] = priced
        return priced
