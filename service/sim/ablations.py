"""`plaserve` without one of its mechanisms, for the lab only: what each is worth.

`plaserve-due` is `plaserve` without what `ABLATIONS["due"]` names. Some are a knob; the others put another
part in the place of the one that decides. Nothing that serves reads this module. The digest of code counts it
for these policies alone, so a change here leaves the results of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from service.core.fair_share import FairShare
from service.core.length_aware import LengthAwarePolicy
from service.core.order import LaneQueue
from service.core.pass_maker import PassMaker
from service.core.placement import Placement
from service.core.policy import Instance, PlanItem
from service.core.settings import SchedulerSettings
from service.core.spill import Spill
from service.core.tracked import Tracked
from service.core.types import Lane
from service.core.wait_depth import ShortQueue, WaitDepth

NEVER_S = 1e9  # a time that no run lasts


@dataclass(frozen=True, slots=True)
class Ablation:
    """off: the mechanism that is left out, and what stands in its place. knobs: settings that say so.
    make: the policy without it, where no setting does."""

    off: str
    knobs: Mapping[str, float | str] = field(default_factory=dict)
    make: Callable[[SchedulerSettings], LengthAwarePolicy] = LengthAwarePolicy


# --- parts of a pass ---


class _FillsWithDueOnly(PassMaker):
    def fill(self, longs: list[Tracked], limit_s: float, due: set[Tracked], due_limit_s: float) -> None:
        beside = [tracked for tracked in longs if tracked in due] if self.items else longs
        super().fill(beside, limit_s, due, due_limit_s)


class _NothingIsDue(PassMaker):
    def due_of(self, longs: object, group: list[PlanItem]) -> set[Tracked]:
        return set()


class _NobodyBehind(PassMaker):
    def _behind(self, taken: int) -> float:
        return 0.0


class WithoutFill(LengthAwarePolicy):
    pass_maker = _FillsWithDueOnly


class WithoutDue(LengthAwarePolicy):
    pass_maker = _NothingIsDue


class WithoutBehind(LengthAwarePolicy):
    pass_maker = _NobodyBehind


# --- the window ---


class FixedWindow(WaitDepth):
    """W = W_max whatever comes, and D = the knee: what a sweep over fixed windows sets."""

    def _window(self, queue: ShortQueue, now_s: float) -> float:
        return self._settings.window_s_max

    def _gains(self, queue: ShortQueue, now_s: float, pass_s: Callable[[int], float]) -> bool:
        return True

    def dispatched(self, tokens: int, slack_depth_tokens: int, now_s: float) -> None:
        self._opened_s = None


class WithoutAdaptation(LengthAwarePolicy):
    def instance_up(self, instance: Instance, now_s: float) -> None:
        if self._awd is None:
            self._awd = FixedWindow(self._settings, instance.pricer.knee_tokens)
        super().instance_up(instance, now_s)


# --- order and place ---


class _OneOrder(LaneQueue):
    """By priority and deadline alone, those that can't make it among the others."""

    def demote(self, now_s: float) -> list[Tracked]:
        return []


class WithoutHopeless(LengthAwarePolicy):
    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._lanes.update({lane: _OneOrder(settings.age_bound_s, FairShare.of(settings)) for lane in Lane})


class _AnyInstance(Placement):
    def waits_elsewhere(self, tracked: Tracked, instance: Instance, now_s: float) -> bool:
        return False

    def may_choose(self, tracked: Tracked) -> bool:
        return False


class WithoutPlacement(LengthAwarePolicy):
    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._placement = _AnyInstance(settings, self._lanes, self.pools)


class _Walls(Spill):
    """An instance takes the other lane only where that has no instance."""

    def taken(self, instance: Instance, lane: Lane, now_s: float) -> Iterator[Tracked]:
        self._pools.look(now_s)
        return iter(()) if self._pools.size(lane) else super().taken(instance, lane, now_s)


class WithoutSpill(LengthAwarePolicy):
    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._spill = _Walls(settings, self._lanes, self.pools, self._load)


ABLATIONS: Mapping[str, Ablation] = {
    "window": Ablation("the waiting window: a pass goes as soon as it can", {"window_s_max": 0.0}),
    "adaptation": Ablation("the choice of the window: always W_max", make=WithoutAdaptation),
    "grouping": Ablation("the cut by cost: all shorts in one pass", {"grouping": "latency_first"}),
    "costs": Ablation("the cut by cost: one padded length a pass", {"grouping": "memory_first"}),
    "fill": Ablation("long tokens beside shorts because it pays; those that are due join", make=WithoutFill),
    "due": Ablation("long requests beside shorts because they are due", make=WithoutDue),
    "chunk_limit": Ablation(
        "the limit on passes with long tokens", {"long_chunk_s_max": NEVER_S, "spill_chunk_s_max": NEVER_S}
    ),
    "ageing": Ablation("ageing: nobody leads for having waited", {"age_bound_s": NEVER_S}),
    "hopeless": Ablation("the hopeless last: one order, by deadline", make=WithoutHopeless),
    "placement": Ablation("waiting for the instance that holds the prefix", make=WithoutPlacement),
    "spill": Ablation("spill: with two pools a role is a wall", make=WithoutSpill),
    "behind": Ablation("the count of those behind a pass", make=WithoutBehind),
}
