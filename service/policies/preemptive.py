"""Prefill that stops between layers: FlowPrefill (arXiv 2602.16603; code HSIEHCHIACHI/FlowPrefill).

Order. With slack = target - now - predicted time of what is left, the requests that still have slack go by
earliest target (S-EDF). The others come after them, until they have waited

    limit = min(k(U) x SLO, 20 s),    k(U) = min(2 / (1.01 - U), 20)

and from then on before all, by waited / limit. U is the load: the largest of min(1, predicted work / SLO)
over the classes of SLO, here the two lanes.

Events. Whose turn it is, is decided when a request arrives or a group is done, and never between. If the
first in order is not the one that runs, the latter is suspended where it is and the former starts, or goes
on from where it was suspended.

Batches. A newcomer of at most `batch_tokens`, with more than a tenth of its SLO left, takes others along, in
order, while all are at most `batch_tokens` together and the time left to it stays above that tenth. A longer
one, or one that is late, runs alone. Without room for its KV, those that have begun go on instead.

Preemption. They stop between operators and measure waits below 4.5 ms. Here a pass is run in blocks of layers
of about `block_s`, so the mean wait is half of it, and between two blocks anything else can be run. An engine
that only runs whole passes gets chunks of `whole_tokens`, and can be interrupted between them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from sortedcontainers import SortedDict

from service.core.policy import Instance, KvGate, PassPlan, Plan, Wait
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import DispatchNumbers, Lane, Reason
from service.policies.central import CentralPolicy
from service.policies.layer_groups import Group, LayerGroups, blocks_of
from service.policies.passes import Offer, PassBuilder
from service.policies.waiting import HeadGate

SLACK_SHARE = 0.1  # of its SLO, what a batch leaves to its head
PATIENCE, PATIENCE_MAX, LIMIT_S_MAX = 2.0, 20.0, 20.0  # k at U = 0, the largest k, the largest limit
LOOK_MAX = 64  # newcomers looked at for one batch
SWEEP_MIN = 256  # entries; below this a sweep is not worth its time
LATE_MAX = 16  # late requests of each lane, oldest first, compared by how long they have waited
UNTARGETED, LATE = 1e9, 2e9  # added to the rank (seconds): after those with slack, and after all

Key = tuple[float, float, int]  # tier, order in it, seq


@dataclass(frozen=True, slots=True)
class PreemptiveKnobs:
    """batch_tokens: of a batch of several. pass_tokens: of one prompt in a pass. Both defaults are theirs.
    block_s: how often a pass can be interrupted. whole_tokens: see the module text.
    groups_max: batches begun and not done, per instance (they allow 128; each holds its KV).
    """

    batch_tokens: int = 2048
    pass_tokens: int = 8192
    block_s: float = 0.01
    whole_tokens: int = 512
    groups_max: int = 32

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "pass_tokens", "block_s", "whole_tokens", "groups_max"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}")


class PreemptivePolicy(CentralPolicy):
    """Newcomers wait in one queue for all instances; a group belongs to one."""

    def __init__(self, settings: SchedulerSettings, knobs: PreemptiveKnobs) -> None:
        super().__init__()
        self._settings = settings
        self._knobs = knobs
        self._groups = LayerGroups()
        self._runs: dict[str, tuple[Group, int]] = {}  # on an instance: what was chosen, after which event
        self._events = 0
        self._latest_start: list[tuple[float, int, Tracked]] = []  # heap of newcomers; the moot drop out
        self._late: dict[Lane, SortedDict] = {
            lane: SortedDict() for lane in Lane
        }  # (arrival, seq) -> newcomer
        self._work = {lane: [0.0, 0.0, 0.0] for lane in Lane}  # newcomers: predicted seconds, SLOs, requests

    # --- the queue ---

    def rank(self, tracked: Tracked) -> float:
        return tracked.target_s if math.isfinite(tracked.target_s) else UNTARGETED + tracked.seq

    def instance_down(self, instance: Instance, now_s: float) -> None:
        self._runs.pop(instance.instance_id, None)
        self._groups.drop_instance(instance.instance_id)

    def add(self, tracked: Tracked, now_s: float, *, arrival: bool) -> None:
        super().add(tracked, now_s, arrival=arrival)
        if not arrival:
            self._groups.came_back(tracked)
        if tracked.instance_id is None:
            self._events += 1
            self._count(tracked, 1)
            if math.isfinite(tracked.target_s):
                self._watch(tracked)

    def remove(self, tracked: Tracked) -> None:
        super().remove(tracked)
        if tracked.instance_id is None:
            self._count(tracked, -1)
            self._late[tracked.lane].pop((tracked.request.arrival_s, tracked.seq), None)

    def late(self, now_s: float) -> list[Tracked]:
        moved: list[Tracked] = []
        while self._latest_start and self._latest_start[0][0] < now_s:
            _, _, tracked = heapq.heappop(self._latest_start)
            if self._is_timely(tracked) and tracked.latest_start_s < now_s:
                self._waiting.rerank(tracked, LATE + tracked.request.arrival_s)
                self._late[tracked.lane][(tracked.request.arrival_s, tracked.seq)] = tracked
                moved.append(tracked)
        return moved

    def dispatched(self, plan: PassPlan, now_s: float) -> None:
        group = self._groups.dispatched(plan)
        instance_id = plan.items[0].tracked.instance_id
        assert instance_id is not None
        self._runs[instance_id] = (group, self._events)

    # --- whose turn ---

    def plan(self, instance: Instance, now_s: float) -> Plan:
        if self._groups.hold_staging(instance, self._waiting):
            return None
        groups = self._groups.waiting(instance, self._waiting)
        chosen, event = self._runs.get(instance.instance_id, (None, -1))
        if chosen in groups and event == self._events:
            assert chosen is not None
            return self._go_on(instance, chosen)
        patience = self._patience()
        first = min(groups, key=lambda g: self._key(g.head, g.left_s, now_s, patience), default=None)
        gate = KvGate(instance, self._settings, now_s)
        if len(groups) < self._knobs.groups_max:
            above = None if first is None else self._key(first.head, first.left_s, now_s, patience)
            plan = self._begin(instance, gate, above, now_s, patience)
            if plan is not None:
                return plan
        if first is not None:
            return self._go_on(instance, first)
        return Wait(math.inf, Reason.WAITING_FOR_KV) if gate.refused_any else None

    def _key(self, tracked: Tracked, left_s: float, now_s: float, patience: float) -> Key:
        """Its place in the order, lowest first."""
        if math.isinf(tracked.target_s):
            return 2.0, 0.0, tracked.seq
        if tracked.target_s - now_s - left_s > 0.0:
            return 1.0, tracked.target_s, tracked.seq
        arrival_s = tracked.request.arrival_s
        limit_s = min(patience * (tracked.target_s - arrival_s), LIMIT_S_MAX)
        waited = (now_s - arrival_s) / max(limit_s, 1e-9)
        return (0.0 if waited >= 1.0 else 3.0), -waited, tracked.seq

    def _patience(self) -> float:
        """k(U), from the work of the newcomers of each lane over their mean SLO."""
        loads = [work_s * count / slo_s for work_s, slo_s, count in self._work.values() if slo_s > 0.0]
        return min(PATIENCE / (1.01 - min(1.0, max(loads, default=0.0))), PATIENCE_MAX)

    def _in_order(self, now_s: float, patience: float) -> Iterator[Tracked]:
        """Newcomers, first in order first; of the late ones only the oldest are compared."""
        oldest = [t for row in self._late.values() for t in islice(row.values(), LATE_MAX)]
        keyed = sorted((self._key(t, t.service_s, now_s, patience), t) for t in oldest)
        before = [t for key, t in keyed if key[0] == 0.0]
        behind: list[Tracked] | None = [t for key, t in keyed if key[0] != 0.0]
        yield from before
        seen = {t.request_id for t in oldest}
        for tracked in self._waiting.newcomers():
            if behind is not None and self._waiting.rank_of(tracked) >= LATE:
                yield from behind
                behind = None
            if tracked.request_id not in seen:
                yield tracked

    # --- passes ---

    def _go_on(self, instance: Instance, group: Group) -> PassPlan:
        """The next block of the pass under way, or the first of the next pass of the same prompts."""
        if group.items:
            return group.next_block(Reason.BUDGET_FILLED, self._numbers(group.pass_s / group.blocks))
        gate = HeadGate(instance)
        builder = PassBuilder(instance, gate, self._pass_tokens(instance))
        for tracked in group.members.values():
            builder.offer(tracked)
        return self._first_block(instance, builder)

    def _begin(
        self, instance: Instance, gate: KvGate, above: Key | None, now_s: float, patience: float
    ) -> PassPlan | None:
        """The first block of a new batch, if a newcomer goes before `above` and has room for its KV.

        `above` None: nothing has begun here, so the first newcomer that has room goes.
        """
        row = islice((t for t in self._in_order(now_s, patience) if instance.may_take(t)), LOOK_MAX)
        for head in row:
            if above is not None and self._key(head, head.service_s, now_s, patience) > above:
                return None
            tokens = instance.item_of(head)[0]
            left_s = head.target_s - now_s
            kept_s = SLACK_SHARE * (head.target_s - head.request.arrival_s)
            alone = tokens > self._batch_tokens(instance) or left_s < kept_s
            budget = self._pass_tokens(instance) if alone else self._batch_tokens(instance)
            builder = PassBuilder(instance, gate, budget)
            if builder.offer(head) is Offer.ADDED:
                if not alone:
                    self._take_along(instance, builder, row, left_s - kept_s)
                return self._first_block(instance, builder)
            if above is not None:
                return None
        return None

    def _take_along(
        self, instance: Instance, builder: PassBuilder, others: Iterator[Tracked], allowed_s: float
    ) -> None:
        row = instance.pricer.row([item.size for item in builder.items])
        for tracked in others:
            size = instance.item_of(tracked)
            if builder.full or row.cost_with(*size) > allowed_s:
                return
            if builder.offer(tracked, cut=False) is Offer.ADDED:
                row.append(*size)

    def _first_block(self, instance: Instance, builder: PassBuilder) -> PassPlan:
        items = tuple(builder.items)
        parts = sum(i.new_tokens + i.history < i.tracked.request.prompt_tokens for i in items)
        pass_s = instance.pricer.pass_s([item.size for item in items], parts)
        blocks = blocks_of(instance, pass_s, self._knobs.block_s)
        block_s = pass_s / blocks
        return PassPlan(items, Reason.BUDGET_FILLED, block_s, self._numbers(block_s), 0, blocks)

    def _pass_tokens(self, instance: Instance) -> int:
        """Largest pass of one prompt: never less than a block of KV, where the engine can stop."""
        whole = instance.spec.capabilities.layer_blocks_max == 1
        tokens = self._knobs.whole_tokens if whole else self._knobs.pass_tokens
        return max(tokens, instance.spec.capabilities.block_tokens)

    def _batch_tokens(self, instance: Instance) -> int:
        return min(self._knobs.batch_tokens, self._pass_tokens(instance))

    def _numbers(self, predicted_s: float) -> DispatchNumbers:
        return DispatchNumbers(
            predicted_s=predicted_s,
            queued_short_tokens=self.lane_load(Lane.SHORT)[1],
            queued_long_tokens=self.lane_load(Lane.LONG)[1],
        )

    # --- books ---

    def _is_timely(self, tracked: Tracked) -> bool:
        """Whether it is a newcomer that has not been found late yet."""
        return (
            tracked in self._waiting and tracked.instance_id is None and self._waiting.rank_of(tracked) < LATE
        )

    def _watch(self, tracked: Tracked) -> None:
        """Note its latest start; when the heap has outgrown the queue, the moot entries are swept out."""
        if len(self._latest_start) > 2 * len(self._waiting) + SWEEP_MIN:
            self._latest_start = [entry for entry in self._latest_start if self._is_timely(entry[2])]
            heapq.heapify(self._latest_start)
        heapq.heappush(self._latest_start, (tracked.latest_start_s, tracked.seq, tracked))

    def _count(self, tracked: Tracked, sign: int) -> None:
        if math.isfinite(tracked.target_s):
            work = self._work[tracked.lane]
            work[0] += sign * tracked.service_s
            work[1] += sign * (tracked.target_s - tracked.request.arrival_s)
            work[2] += sign
