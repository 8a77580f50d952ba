"""Triton's dynamic batcher: whole requests in arrival order, preferred batch sizes, a bounded queue delay.

When an instance is free, the largest preferred size that can be formed goes at once. Where none can be
formed, the batch may wait for one until its oldest request has waited `max_queue_delay_s`, and then goes as
it is. Without preferred sizes the batch is as large as the queue allows, and a delay waits for
`max_batch_size`. A batch is made when the instance is free, not before, so it grows until it starts.

A batch ends at the first request that no profile takes beside the others. The batcher does not cut prompts;
where one is too long for any profile, it is run alone in parts of the largest.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.core.policy import Instance, Plan, Wait
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Reason
from service.policies.central import CentralPolicy
from service.policies.passes import Offer, PassBuilder
from service.policies.waiting import HeadGate


@dataclass(frozen=True, slots=True)
class TritonKnobs:
    """preferred_batch_size: sizes joined by `+`, as `4+8`; empty: none. max_queue_delay_s: seconds.
    max_batch_size: requests; 0: what the engine takes. Defaults are Triton's."""

    preferred_batch_size: str = ""
    max_queue_delay_s: float = 0.0
    max_batch_size: int = 0

    def __post_init__(self) -> None:
        if self.max_queue_delay_s < 0.0 or self.max_batch_size < 0:
            raise ValueError("max_queue_delay_s and max_batch_size must be at least 0")
        if any(not size.isdecimal() or int(size) == 0 for size in self._sizes()):
            raise ValueError(
                f"preferred_batch_size must be whole numbers joined by '+', got {self.preferred_batch_size!r}"
            )

    def _sizes(self) -> list[str]:
        return self.preferred_batch_size.split("+") if self.preferred_batch_size else []

    @property
    def preferred(self) -> tuple[int, ...]:
        """Preferred sizes, ascending."""
        return tuple(sorted({int(size) for size in self._sizes()}))


class TritonDynamicPolicy(CentralPolicy):
    def __init__(self, settings: SchedulerSettings, knobs: TritonKnobs) -> None:
        super().__init__()
        self._knobs = knobs
        self._preferred = knobs.preferred

    def rank(self, tracked: Tracked) -> float:
        return tracked.seq

    def plan(self, instance: Instance, now_s: float) -> Plan:
        gate = HeadGate(instance)
        tokens_max = instance.spec.profiles.tokens_max
        builder = PassBuilder(instance, gate, tokens_max, self._knobs.max_batch_size or None)
        ended = False  # by a request that can't join
        for tracked in self._waiting.candidates(instance.instance_id, gate):
            if builder.full or ended:
                break
            offer = builder.offer(tracked, cut=not builder.items)
            ended = offer is Offer.NO_SPACE or (offer is Offer.ADDED and builder.items[-1].is_part)
        if builder.items:
            size = self._size(builder, ended or builder.full or gate.refused_any, now_s)
            if size == 0:
                oldest_s = min(item.tracked.waiting_since_s for item in builder.items)
                return Wait(oldest_s + self._knobs.max_queue_delay_s, Reason.WAITING_FOR_DEPTH)
            del builder.items[size:]
        return builder.plan(self._waiting, Reason.BUDGET_FILLED)

    def _size(self, builder: PassBuilder, can_not_grow: bool, now_s: float) -> int:
        """How many of the batch go now; 0: it waits to grow."""
        delay_s, pending = self._knobs.max_queue_delay_s, len(builder.items)
        oldest_s = min(item.tracked.waiting_since_s for item in builder.items)
        if delay_s > 0.0 and now_s >= oldest_s + delay_s:
            return pending
        formed = [size for size in self._preferred if size <= pending]
        if formed:
            return formed[-1]
        return pending if can_not_grow or delay_s == 0.0 else 0
