"""One pass of the `plaserve` policy, put together for one instance.

1. Lead. A request that waited past the ageing bound, with one chunk.
2. Short group. The short lane in its order, cut by predicted cost (`grouping`), trimmed until the tightest
   target in it that can be met is met; and trimmed further where long requests are due and the rest can wait.
3. Long fill. Long tokens join where they are due (`due`) or where that is predicted to lower the summed
   completion time (`fill`), and never cost a short in the pass its target. Without shorts the pass is a long
   chunk of the size with the best tokens/s among those that block an arriving short, or the next decode
   step, no longer than allowed.

Those behind the pass count as often as they lose by it: the share of this instance in the requests that wait
now, over 1 - load, since whoever comes before the queue is empty waits for it too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from engines.profiles import Profiles
from engines.types import Layout, Padding
from service.core.due import due_requests, pass_s_max
from service.core.fill import LongFill
from service.core.grouping import Cost, first_group, ordered_for
from service.core.load import Load
from service.core.order import LaneQueue
from service.core.policy import Instance, KvGate, PlanItem
from service.core.pools import serves
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Lane, Role

LOAD_MAX = 0.9  # taken for the load when newcomers are counted who will wait for a pass


class PassMaker:
    """`items` is the pass so far. `limit_s`: how long it may block arriving shorts and the next decode step
    once it holds long tokens."""

    def __init__(
        self,
        settings: SchedulerSettings,
        lanes: Mapping[Lane, LaneQueue],
        load: Load,
        instance: Instance,
        now_s: float,
        aside: Collection[Tracked] = (),
    ) -> None:
        self._settings = settings
        self._aside = aside
        self._lanes = lanes
        self._load = load
        self.instance = instance
        self._now_s = now_s
        self._pricer = instance.pricer
        self._waiting_share: float | None = None  # worked out when it is asked for
        self.gate = KvGate(instance, settings, now_s)
        self.items: list[PlanItem] = []
        limit_s = settings.long_chunk_s_max
        if instance.role is Role.SP:
            limit_s = min(limit_s, settings.spill_chunk_s_max)
        self.limit_s = min(limit_s, instance.decode.pass_s_max())

    def lead(self, candidates: Iterable[Tracked]) -> bool:
        """Open the pass with one chunk of the first that can run here."""
        fill = LongFill(self.instance, self.limit_s)
        for tracked in candidates:
            new_tokens, history = size = self.instance.item_of(tracked)
            chunk = fill.alone(size)
            if (
                chunk
                and math.isfinite(self._pricer.pass_s(((chunk, history),)))
                and self.gate.admits(tracked, whole=chunk == new_tokens)
            ):
                self.items.append(PlanItem(tracked, chunk, history))
                return True
        return False

    def short_group(self, candidates: list[Tracked]) -> list[PlanItem]:
        """Those of the short lane that should join what is in the pass."""
        instance, lead = self.instance, self.items
        found: list[PlanItem] = []
        requests_max = instance.requests_max - len(lead)
        looked_at_max = min(self._settings.group_requests_max, requests_max)
        for tracked in candidates:
            if len(found) == looked_at_max:
                break
            if self.gate.admits(tracked):
                found.append(PlanItem(tracked, *instance.item_of(tracked)))
        if not found:
            return []
        order = ordered_for(instance.spec.profiles, [item.size for item in found])
        found = [found[index] for index in order]
        sizes, fixed = [item.size for item in found], [item.size for item in lead]
        if lead and self._mixing_loses(fixed, sizes[0]):
            return []
        row = self._pricer.row(sizes, fixed, parts=sum(item.is_part for item in lead))
        size = first_group(
            sizes,
            row.cost,
            requests_max,
            self._settings.grouping,
            behind=self._behind(len(found) + len(lead)) if len(found) > 1 else 0.0,
            convex=_cost_is_convex(instance.spec.profiles),
        )
        group = found[:size]
        return group[: self._size_within_targets(group, row.cost)]

    def make_room(self, group: list[PlanItem], shorts: list[Tracked], due: set[Tracked]) -> tuple[int, float]:
        """How many of `group` go beside the requests that are due, and how long the pass may take then.
        Those who can wait for the next pass stay out where all would take more than half of the time."""
        row = self._pricer.row([item.size for item in group])
        whole = len(group)
        half = next((n for n in range(whole, 1, -1) if row.cost(0, n) <= 0.5 * self.limit_s), 1)
        taken = {item.tracked for item in group}
        next_s = min((t.target_s for t in shorts if t not in taken and self.is_feasible(t)), default=math.inf)
        left = self._lanes[Lane.SHORT].tokens - sum(item.new_tokens for item in group)
        best, best_limit_s, best_room_s = whole, 0.0, -math.inf
        for size in (whole, half):
            for item in group[size:]:
                left += item.new_tokens
                if self.is_feasible(item.tracked):
                    next_s = min(next_s, item.tracked.target_s)
            front_s, speed = row.cost(0, size), self.instance.tokens_per_s * self._load.instances
            limit_s = pass_s_max(front_s, next_s, left, speed, self._now_s, self._settings)
            limit_s = min(self.limit_s, limit_s, self.slack_s(group[:size]))
            if limit_s - front_s > best_room_s:
                best, best_limit_s, best_room_s = size, limit_s, limit_s - front_s
        return best, best_limit_s

    def due_of(self, longs: Iterable[Tracked], group: list[PlanItem]) -> set[Tracked]:
        """The long requests that are due beside `group`."""
        front_s = self._pricer.pass_s([item.size for item in group])
        load = self._load.of(Lane.SHORT, self.instance, self._now_s)
        return due_requests(longs, self.is_feasible, front_s, load, self._now_s, self._settings.safety_s)

    def alone(self, tracked: Tracked, group: list[PlanItem], limit_s: float) -> bool:
        """Give a due request the pass, where it can't join the group and the group can wait that long."""
        size = self.instance.item_of(tracked)
        row, tokens = self._pricer.row([i.size for i in group]), sum(i.new_tokens for i in group)
        left_s = limit_s - row.cost(0, len(group))
        fill = LongFill(self.instance, left_s)
        chunk = fill.alone(size)
        if self.items or not chunk or fill.most(row, tokens, size, limit_s):
            return False
        if self._pricer.pass_s(((chunk, size[1]),)) > left_s:
            return False
        if not self.gate.admits(tracked, whole=chunk == size[0]):
            return False
        self.items.append(PlanItem(tracked, chunk, size[1]))
        return True

    def fill(self, longs: list[Tracked], limit_s: float, due: set[Tracked], due_limit_s: float) -> None:
        """Add long tokens where they are due or it pays; the first chunk of all to an empty pass."""
        if not longs:
            return
        instance, items = self.instance, self.items
        row = self._pricer.row([i.size for i in items], parts=sum(i.is_part for i in items))
        tokens, fill = sum(i.new_tokens for i in items), LongFill(instance, limit_s)
        visiting = not serves(instance, Lane.LONG)
        refused = (math.inf, math.inf)  # gained nothing: nor will one that is no smaller
        for tracked in longs:
            if len(items) == instance.requests_max:
                break
            new_tokens, history = size = instance.item_of(tracked)
            if tracked in due:
                chunk = fill.most(row, tokens, size, due_limit_s)
            elif items:
                if new_tokens >= refused[0] and history >= refused[1]:
                    continue
                only_whole = visiting and tracked.instance_id is None
                chunk = fill.beside(row, tokens, self._behind(len(items)), size, only_whole=only_whole)
                refused = refused if chunk else size
            else:
                chunk = fill.alone(size)
            if chunk and self.gate.admits(tracked, whole=chunk == new_tokens):
                items.append(PlanItem(tracked, chunk, history))
                row.append(chunk, history, part=chunk < new_tokens)
                tokens += chunk
                if chunk == new_tokens and self.is_feasible(tracked):
                    fill.end_within(max(row.cost(0, len(row)), self.slack_s(items[-1:])))

    def slack_s(self, group: list[PlanItem]) -> float:
        """Seconds until the tightest target in reach is due, hand-back time taken off; inf without one."""
        targets = (item.tracked.target_s for item in group if self.is_feasible(item.tracked))
        return min(targets, default=math.inf) - self._now_s - self._settings.safety_s

    def is_feasible(self, tracked: Tracked) -> bool:
        """Whether its target counts: it is in reach, and the request is not set aside."""
        return tracked not in self._aside and self._lanes[tracked.lane].is_feasible(tracked)

    def _size_within_targets(self, group: list[PlanItem], cost: Cost) -> int:
        """How many from the front stay: less while the pass would miss a target that a smaller one meets."""
        allowed_s = self.slack_s(group)
        if math.isinf(allowed_s) or cost(0, len(group)) <= allowed_s:
            return len(group)
        targets = [i.tracked.target_s if self.is_feasible(i.tracked) else math.inf for i in group]
        tightest = targets.index(min(targets)) + 1
        fitting = (n for n in range(len(group), tightest - 1, -1) if cost(0, n) <= allowed_s)
        return next(fitting, len(group))

    def _mixing_loses(self, front: list[tuple[int, int]], size: tuple[int, int]) -> bool:
        """Whether two passes are predicted to be shorter than one (rows padded to the longest, say)."""
        pass_s = self._pricer.pass_s
        return pass_s([*front, size]) > pass_s(front) + pass_s((size,))

    def _behind(self, taken: int) -> float:
        """Requests behind a pass with `taken` of them (see the module text)."""
        waiting = sum(map(len, self._lanes.values())) - taken
        if self._waiting_share is None:
            self._waiting_share = self._share_of_waiting()
        return waiting * self._waiting_share

    def _share_of_waiting(self) -> float:
        load = sum(self._load.of(lane, self.instance, self._now_s) for lane in self._lanes)
        return 1.0 / self._load.instances / (1.0 - min(LOAD_MAX, load))


def _cost_is_convex(profiles: Profiles) -> bool:
    """Whether a pass costs a convex function of sums over its items, and takes every short one alone."""
    packed = profiles.layout is Layout.PACKED and profiles.padding is Padding.NOTHING
    return packed and not profiles.h_classes
