"""How peers put a pass together: offer requests one by one until the pass is full.

A pass holds at most `requests_max` requests and a budget of tokens, and some profile of the engine takes it.
What does not fit whole is cut at a chunk boundary of the engine, where the policy cuts at all.
"""

from __future__ import annotations

import math
from enum import Enum

from engines.types import Chunking, Layout
from service.core.policy import Instance, PassPlan, Plan, PlanItem, Wait
from service.core.tracked import Tracked
from service.core.types import DispatchNumbers, Lane, Reason
from service.policies.waiting import Gate, Waiting


class Offer(Enum):
    """What became of a request that was offered to a pass."""

    ADDED = "added"
    NO_SPACE = "no_space"  # of tokens, or no profile takes it beside the others
    REFUSED = "refused"  # by the gate


class PassBuilder:
    """The items of one pass on `instance`. requests_max: None for what the engine takes."""

    def __init__(
        self, instance: Instance, gate: Gate, budget_tokens: int, requests_max: int | None = None
    ) -> None:
        self._instance = instance
        self._gate = gate
        self._profiles = instance.spec.profiles
        if instance.spec.capabilities.chunking is Chunking.PREFIX_REUSE:  # or nobody might move on
            budget_tokens = max(budget_tokens, instance.spec.capabilities.block_tokens)
        self._left = min(budget_tokens, self._profiles.tokens_max)
        limit = instance.requests_max
        self._requests_max = limit if requests_max is None else min(limit, requests_max)
        self._history = 0  # summed; the largest in a rectangle
        self._longest = 0
        self.items: list[PlanItem] = []

    @property
    def full(self) -> bool:
        return self._left <= 0 or len(self.items) >= self._requests_max

    def offer(self, tracked: Tracked, tokens_max: int | None = None, *, cut: bool = True) -> Offer:
        """Add `tracked`, at most `tokens_max` tokens of it. `cut`: a part of what remains is welcome."""
        rest, history = whole = self._instance.item_of(tracked)
        limit = min(self._left, self._profiles.request_tokens_max)
        if tokens_max is not None:
            limit = min(limit, tokens_max)
        chunk = self._instance.chunk_tokens(whole, limit)
        if chunk == 0 or (chunk < rest and not cut) or not self._fits(chunk, history):
            return Offer.NO_SPACE
        if not self._gate.admits(tracked, whole=chunk == rest):
            return Offer.REFUSED
        self._left -= chunk
        self._longest = max(self._longest, chunk)
        rectangular = self._profiles.layout is Layout.RECTANGULAR
        self._history = max(self._history, history) if rectangular else self._history + history
        self.items.append(PlanItem(tracked, chunk, history))
        return Offer.ADDED

    def plan(self, waiting: Waiting, reason: Reason) -> Plan:
        """The pass that was put together; without items, why there is none."""
        if not self.items:
            return Wait(math.inf, Reason.WAITING_FOR_KV) if self._gate.refused_any else None
        parts = sum(item.is_part for item in self.items)
        predicted_s = self._instance.pricer.pass_s([item.size for item in self.items], parts)
        numbers = DispatchNumbers(
            predicted_s=predicted_s,
            queued_short_tokens=waiting.lane_load(Lane.SHORT)[1],
            queued_long_tokens=waiting.lane_load(Lane.LONG)[1],
        )
        return PassPlan(tuple(self.items), reason, predicted_s, numbers)

    def _fits(self, chunk: int, history: int) -> bool:
        """Whether some profile takes the pass with this item; only its sums matter, or its largest row."""
        if self._profiles.layout is Layout.RECTANGULAR:
            row = max(self._longest, chunk), max(self._history, history)
            return self._profiles.executed([row] * (len(self.items) + 1)) is not None
        history_max = self._profiles.history_max
        return history_max is None or self._history + history <= history_max
