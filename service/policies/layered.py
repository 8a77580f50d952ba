"""Layered prefill: groups of layers instead of chunks (arXiv 2510.08055; code scale-snu/layered-prefill).

A batch of prompts in arrival order, up to `batch_tokens`, the last one cut where it does not fit, goes
through the model in G groups of layers, one an iteration, and every iteration also steps what decodes. As in
their scheduler,

    G = 1 up to 512 tokens, 2 up to 1024, 4 up to 2048, 8 up to 4096, else 16

so an iteration holds about as much prefill as a chunk of 512 tokens, but the weights are read once for the
whole batch. A new batch is taken only when the one before it is through. What arrives meanwhile waits for
that: the method keeps decode smooth, and short prompts behind long ones gain nothing from it.

Decode steps are passes of their own here, by the rule that is the same for all policies, not one with each
group. An engine that can't stop between layers gets chunks of `stage_tokens`, which is what the paper
compares with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from service.core.policy import Instance, PassPlan, Plan, Wait
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import DispatchNumbers, Lane, Reason
from service.policies.central import CentralPolicy
from service.policies.layer_groups import LayerGroups
from service.policies.passes import Offer, PassBuilder
from service.policies.waiting import HeadGate


@dataclass(frozen=True, slots=True)
class LayeredKnobs:
    """batch_tokens: theirs (--max-num-batched-tokens). stage_tokens: of prefill in an iteration.
    stages_max: the largest G (--num-stages)."""

    batch_tokens: int = 8192
    stage_tokens: int = 512
    stages_max: int = 16

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "stage_tokens", "stages_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class LayeredPolicy(CentralPolicy):
    def __init__(self, settings: SchedulerSettings, knobs: LayeredKnobs) -> None:
        super().__init__()
        self._knobs = knobs
        self._groups = LayerGroups()

    def rank(self, tracked: Tracked) -> float:
        return tracked.seq

    def instance_down(self, instance: Instance, now_s: float) -> None:
        self._groups.drop_instance(instance.instance_id)

    def add(self, tracked: Tracked, now_s: float, *, arrival: bool) -> None:
        super().add(tracked, now_s, arrival=arrival)
        if not arrival:
            self._groups.came_back(tracked)

    def dispatched(self, plan: PassPlan, now_s: float) -> None:
        self._groups.dispatched(plan)

    def plan(self, instance: Instance, now_s: float) -> Plan:
        if self._groups.hold_staging(instance, self._waiting):
            return None
        for group in self._groups.waiting(instance, self._waiting):
            if group.items:
                return group.next_block(Reason.BUDGET_FILLED, self._numbers(group.pass_s / group.blocks))
        gate = HeadGate(instance)
        builder = PassBuilder(instance, gate, self._budget(instance))
        for tracked in self._waiting.candidates(instance.instance_id, gate):
            if builder.full or builder.offer(tracked) is Offer.NO_SPACE:
                break
        if not builder.items:
            return Wait(math.inf, Reason.WAITING_FOR_KV) if gate.refused_any else None
        items = tuple(builder.items)
        parts = sum(i.new_tokens + i.history < i.tracked.request.prompt_tokens for i in items)
        pass_s = instance.pricer.pass_s([item.size for item in items], parts)
        stages = self._stages(sum(item.new_tokens for item in items), instance)
        return PassPlan(
            items, Reason.BUDGET_FILLED, pass_s / stages, self._numbers(pass_s / stages), 0, stages
        )

    def _budget(self, instance: Instance) -> int:
        whole = instance.spec.capabilities.layer_blocks_max == 1
        tokens = self._knobs.stage_tokens if whole else self._knobs.batch_tokens
        return max(tokens, instance.spec.capabilities.block_tokens)

    def _stages(self, tokens: int, instance: Instance) -> int:
        """G: the power of two from which a stage holds at most `stage_tokens`, as far as it goes."""
        wanted = 1 << max(0, math.ceil(tokens / self._knobs.stage_tokens) - 1).bit_length()
        return min(wanted, self._knobs.stages_max, instance.spec.capabilities.layer_blocks_max)

    def _numbers(self, predicted_s: float) -> DispatchNumbers:
        return DispatchNumbers(
            predicted_s=predicted_s,
            queued_short_tokens=self.lane_load(Lane.SHORT)[1],
            queued_long_tokens=self.lane_load(Lane.LONG)[1],
        )
