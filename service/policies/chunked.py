"""vLLM V1: requests whose prefill has begun first, then the waiting ones in arrival order, to a token budget.

`budget_tokens` is `max_num_batched_tokens`. With a `long_prefill_token_threshold` no request gets more tokens
of one pass than that, so that prompts behind a long one share its passes. Two caps that V0 had bound how many
prompts, and how many of the long ones, are prefilled in parts at a time; V1 still has both settings and
enforces neither (vllm-project/vllm#57413, #49075), so they are off by default here. A request beyond a cap is
passed over. One without room for its KV holds back those behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from engines.types import Chunking
from service.core.policy import Instance, Plan
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Reason
from service.policies.central import CentralPolicy
from service.policies.passes import Offer, PassBuilder
from service.policies.waiting import HeadGate

LOOK_MAX = 64  # newcomers looked at for one pass; caps may pass some over


@dataclass(frozen=True, slots=True)
class ChunkedKnobs:
    """0 switches a knob off.

    long_prefill_token_threshold: tokens that one request gets of a pass; longer prompts are long.
    max_num_partial_prefills: prompts that are in parts at a time, per instance.
    max_long_partial_prefills: long ones in a pass. Needs the threshold, which says what is long.
    """

    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 0
    max_long_partial_prefills: int = 0

    def __post_init__(self) -> None:
        for name in ("long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0 (off), got {getattr(self, name)}")
        if self.max_long_partial_prefills and not self.long_prefill_token_threshold:
            raise ValueError("max_long_partial_prefills needs a long_prefill_token_threshold above 0")


class ChunkedPolicy(CentralPolicy):
    def __init__(self, settings: SchedulerSettings, knobs: ChunkedKnobs) -> None:
        super().__init__()
        self._settings = settings
        self._knobs = knobs

    def rank(self, tracked: Tracked) -> float:
        return tracked.seq

    def plan(self, instance: Instance, now_s: float) -> Plan:
        gate = HeadGate(instance)
        builder = PassBuilder(instance, gate, self._settings.budget_tokens)
        threshold = self._threshold(instance)
        longs_max = self._knobs.max_long_partial_prefills
        longs = 0
        for tracked in self._waiting.parts(instance.instance_id):
            long = self._is_long(tracked)
            if longs_max and long and longs >= longs_max:
                continue
            if builder.full or builder.offer(tracked, threshold) is Offer.NO_SPACE:
                break
            longs += long
        partials = len(instance.partial)
        if instance.running is not None:
            partials += instance.running.partials_begun
        for tracked in islice(self._waiting.newcomers(), LOOK_MAX):
            long = self._is_long(tracked)
            if longs_max and long and longs >= longs_max:
                continue
            if builder.full or gate.refused_any:
                break
            may_begin = not self._knobs.max_num_partial_prefills or (
                partials < self._knobs.max_num_partial_prefills
            )
            offer = builder.offer(tracked, threshold, cut=may_begin)
            if offer is Offer.NO_SPACE and may_begin:
                break
            if offer is Offer.ADDED:
                longs += long
                partials += builder.items[-1].begins_partial
        return builder.plan(self._waiting, Reason.BUDGET_FILLED)

    def _is_long(self, tracked: Tracked) -> bool:
        return 0 < self._knobs.long_prefill_token_threshold < tracked.request.prompt_tokens

    def _threshold(self, instance: Instance) -> int | None:
        """Tokens that one request may have of a pass: never less than the engine can stop at."""
        threshold = self._knobs.long_prefill_token_threshold
        if threshold and instance.spec.capabilities.chunking is Chunking.PREFIX_REUSE:
            return max(threshold, instance.spec.capabilities.block_tokens)
        return threshold or None
