"""What the two LAPS policies with an adaptive window have in common: two queues, passes of one class.

LAPS (arXiv 2601.11589) sorts requests by what they have to compute, L, against a boundary
L_m. Short ones are gathered into batches, depth and waiting time given by AWD (a `Window`, one for the
queue, is the part in which the printed algorithm and the slides differ). A long request runs alone in chunks
of one fixed size. A pass is of one class only.

Which class: an instance of role SP runs shorts only and one of role LP longs only, a wall. An instance with
role MIXED alternates between the classes while both wait, and runs a long chunk while the window is open.
Where no instance is left that may run a class, everyone may, or its requests would wait for ever.

The window runs from the moment at which a short request begins to wait, while the instance may still be
busy, and anew behind a batch that left others. Depth counts requests, as the captured graphs of LAPS do. The
batch is filled in order of arrival, those of the head's bucket first, as far as KV and a shape of the engine
allow; the engine pads to that shape, and runs unpadded where it never pads. Buckets are the row lengths of
the grid of the engine, or of the paper's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

from engines.profiles import Profiles
from service.core.policy import Instance, KvGate, PassPlan, Plan, PlanItem, Wait
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import DispatchNumbers, Lane, Reason, Role
from service.core.wait_depth import Go, Hold
from service.policies.passes import Offer, PassBuilder
from service.policies.waiting import Waiting

GRID_LENGTHS = (8, 16, 32, 64, 128, 256)  # row lengths of the paper's grid
GRID_DEPTH = 64  # and its largest batch
SCAN_FACTOR = 2  # requests looked at for one batch, in depths


@dataclass(frozen=True, slots=True)
class Batch:
    """The short pass as it would be now.

    pass_s: its predicted time. due_s: the earliest target among its requests and the next one behind it.
    queued: short requests that wait, in it or behind it. head_since_s: when the longest waiter came.
    """

    depth: int
    pass_s: float
    due_s: float
    queued: int
    head_since_s: float


class Window(Protocol):
    """AWD: whether the short batch goes now, and how many requests it may hold."""

    window_s: float  # W

    @property
    def depth_max(self) -> int:
        """Requests that one batch may hold."""

    def arrived(self, now_s: float) -> None: ...

    def open(self, now_s: float) -> None:
        """The window runs from now on: a short request begins to wait, or a batch has left others."""

    def decide(self, batch: Batch, now_s: float) -> Go | Hold:
        """Now, or not before `until_s`, which lies behind `now_s`."""

    def dispatched(self, depth: int, now_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Boundary:
    """L_m: the largest L that is short. `tokens` 0: where compute passes memory by the cost model."""

    tokens: int

    def holds(self, new_tokens: int, history: int, instance: Instance) -> bool:
        limit = self.tokens or instance.boundary_tokens(history)
        return new_tokens <= min(limit, instance.spec.profiles.request_tokens_max)


@dataclass(frozen=True, slots=True)
class LapsOptions:
    """boundary: see there. chunk_tokens: C_l. same_bucket: a batch holds one bucket only (`memory_first`)."""

    boundary: Boundary
    chunk_tokens: int
    same_bucket: bool = False


class LapsPolicy:
    """`service.core.policy.PrefillPolicy`; `window` makes the window for the largest depth of the engine."""

    def __init__(
        self, settings: SchedulerSettings, options: LapsOptions, window: Callable[[int], Window]
    ) -> None:
        self._settings = settings
        self._options = options
        self._make_window = window
        self._window: Window | None = None  # made for the first instance
        self._queues = {Lane.SHORT: Waiting(), Lane.LONG: Waiting()}  # by LAPS's own classes
        self._instances: dict[str, Instance] = {}
        self._last: dict[str, Lane] = {}  # class of the last pass of an instance
        self._unserved: tuple[float, frozenset[Lane]] = (-math.inf, frozenset())  # at that moment
        self._held: tuple[float, Wait | None] = (-math.inf, None)  # what the window said at that moment

    # --- the queues ---

    def instance_up(self, instance: Instance, now_s: float) -> None:
        self._instances[instance.instance_id] = instance
        if self._window is None:
            self._window = self._make_window(min(instance.requests_max, grid_depth(instance.spec.profiles)))
        self._unserved = (-math.inf, frozenset())

    def instance_down(self, instance: Instance, now_s: float) -> None:
        del self._instances[instance.instance_id]
        self._last.pop(instance.instance_id, None)
        self._unserved = (-math.inf, frozenset())

    def add(self, tracked: Tracked, now_s: float, *, arrival: bool) -> None:
        lane = self._class_of(tracked)
        if lane is Lane.SHORT and self._window is not None:
            if not self._queues[lane]:
                self._window.open(now_s)
            if arrival:
                self._window.arrived(now_s)
        self._queues[lane].add(tracked, tracked.seq)
        self._held = (-math.inf, None)

    def remove(self, tracked: Tracked) -> None:
        self._queue_of(tracked).remove(tracked)
        self._held = (-math.inf, None)

    def late(self, now_s: float) -> list[Tracked]:
        return []

    def waiting(self) -> Iterator[Tracked]:
        return chain.from_iterable(self._queues.values())

    def lane_load(self, lane: Lane) -> tuple[int, int]:
        loads = [queue.lane_load(lane) for queue in self._queues.values()]
        return sum(requests for requests, _ in loads), sum(tokens for _, tokens in loads)

    def window(self) -> tuple[float, int]:
        """W; D is left out, because here it counts requests."""
        return (self._window.window_s if self._window is not None else 0.0), 0

    def dispatched(self, plan: PassPlan, now_s: float) -> None:
        instance_id = plan.items[0].tracked.instance_id
        assert instance_id is not None
        short = plan.reason is not Reason.LONG_CHUNK
        self._last[instance_id] = Lane.SHORT if short else Lane.LONG
        if short and self._window is not None:
            self._window.dispatched(len(plan.items), now_s)
            if self._queues[Lane.SHORT]:
                self._window.open(now_s)

    # --- the plan ---

    def plan(self, instance: Instance, now_s: float) -> Plan:
        lanes = [lane for lane in self._turns(instance, now_s) if self._queues[lane]]
        gate = KvGate(instance, self._settings, now_s)
        wait: Wait | None = None
        for lane in lanes:
            if lane is Lane.LONG:
                plan = self._long_plan(instance, gate)
            else:
                plan = self._short_plan(instance, gate, now_s)
            if isinstance(plan, PassPlan):
                return plan
            wait = wait or plan
        return wait or (Wait(math.inf, Reason.WAITING_FOR_KV) if gate.refused_any else None)

    def _turns(self, instance: Instance, now_s: float) -> tuple[Lane, ...]:
        """The classes that the instance may run, the one whose turn it is first."""
        if instance.role is Role.MIXED:
            short_last = self._last.get(instance.instance_id) is Lane.SHORT
            return (Lane.LONG, Lane.SHORT) if short_last else (Lane.SHORT, Lane.LONG)
        own, other = (Lane.SHORT, Lane.LONG) if instance.role is Role.SP else (Lane.LONG, Lane.SHORT)
        parts_of_other = self._queues[other].parts(instance.instance_id)  # begun before the role changed
        if parts_of_other or (self._queues[other] and other in self._unserved_lanes(now_s)):
            return own, other
        return (own,)

    def _unserved_lanes(self, now_s: float) -> frozenset[Lane]:
        """Classes that no instance may run, looked for once at each moment."""
        if self._unserved[0] != now_s:
            roles = {instance.role for instance in self._instances.values() if instance.takes_new}
            served = {Role.SP: Lane.SHORT, Role.LP: Lane.LONG}
            open_lanes = set(Lane) if Role.MIXED in roles else {served[role] for role in roles}
            self._unserved = (now_s, frozenset(set(Lane) - open_lanes))
        return self._unserved[1]

    def _short_plan(self, instance: Instance, gate: KvGate, now_s: float) -> Plan:
        assert self._window is not None
        if self._held[0] == now_s:
            return self._held[1]  # another idle instance has asked at this moment: one batch is gathered
        items, rest = self._gather(instance, gate, self._window.depth_max)
        if not items:
            return None
        pass_s = instance.pricer.pass_s([item.size for item in items])
        queue = self._queues[Lane.SHORT]
        due_s = min(t.target_s for t in [*(item.tracked for item in items), *rest[:1]])
        head_since_s = min(item.tracked.waiting_since_s for item in items)
        batch = Batch(len(items), pass_s, due_s, len(queue), head_since_s)
        decision = self._window.decide(batch, now_s)
        if isinstance(decision, Hold):
            alone = not self._queues[Lane.LONG]  # what the other instances could run is this batch
            wait = Wait(decision.until_s, Reason.WAITING_FOR_DEPTH, everywhere=alone)
            if instance.running is None:
                self._held = (now_s, wait)
            return wait
        return self._finish(items, decision.reason, pass_s, due_s - now_s - pass_s)

    def _gather(self, instance: Instance, gate: KvGate, depth: int) -> tuple[list[PlanItem], list[Tracked]]:
        """The batch, and who was looked at and is not in it.

        The first may be cut: its cached blocks can be gone by now, and what is left then goes on as a long
        request.
        """
        queue, edges = self._queues[Lane.SHORT], grid_lengths(instance.spec.profiles)
        builder = PassBuilder(instance, gate, instance.spec.profiles.tokens_max, depth)
        bucket: int | None = None
        others: list[Tracked] = []
        found = chain(queue.parts(instance.instance_id), queue.newcomers())
        for tracked in islice(found, SCAN_FACTOR * depth):
            own = bisect_left(edges, instance.item_of(tracked)[0])
            if builder.full or bucket not in (None, own):
                others.append(tracked)
            elif builder.offer(tracked, cut=not builder.items) is Offer.ADDED:
                bucket = own
            else:
                others.append(tracked)
            if builder.full and others:
                break
        if self._options.same_bucket:
            return builder.items, others
        left = [t for t in others if builder.full or builder.offer(t, cut=False) is not Offer.ADDED]
        return builder.items, left

    def _long_plan(self, instance: Instance, gate: KvGate) -> Plan:
        """The next chunk of the one long request in progress here, or else of the first that may start."""
        queue = self._queues[Lane.LONG]
        limit = max(self._options.chunk_tokens, instance.spec.capabilities.block_tokens)
        for tracked in chain(queue.parts(instance.instance_id), queue.newcomers()):
            if not instance.may_take(tracked):
                continue
            builder = PassBuilder(instance, gate, limit)
            if builder.offer(tracked) is not Offer.ADDED:
                return None
            item = builder.items[0]
            part = item.new_tokens + item.history < tracked.request.prompt_tokens
            pass_s = instance.pricer.pass_s([item.size], parts=int(part))
            return self._finish(builder.items, Reason.LONG_CHUNK, pass_s, math.inf)
        return None

    def _finish(self, items: list[PlanItem], reason: Reason, pass_s: float, slack_s: float) -> PassPlan:
        numbers = DispatchNumbers(
            predicted_s=pass_s,
            slack_s_min=slack_s if math.isfinite(slack_s) else None,
            window_s=self.window()[0],
            queued_short_tokens=self.lane_load(Lane.SHORT)[1],
            queued_long_tokens=self.lane_load(Lane.LONG)[1],
        )
        return PassPlan(tuple(items), reason, pass_s, numbers)

    # --- classes ---

    def _class_of(self, tracked: Tracked) -> Lane:
        """By what it has to compute where most of the prompt is cached. Who has begun is long: a short one
        runs whole, and goes on as a long one where cached blocks were gone and its pass fell short."""
        boundary = self._options.boundary
        if tracked.instance_id is not None:
            return Lane.LONG
        if not self._instances:
            short = tracked.remaining <= (boundary.tokens or GRID_LENGTHS[-1])
        else:
            pool = self._instances.values()
            some = pool if tracked.request.block_hashes else islice(pool, 1)
            short = any(boundary.holds(*instance.item_of(tracked), instance) for instance in some)
        return Lane.SHORT if short else Lane.LONG

    def _queue_of(self, tracked: Tracked) -> Waiting:
        return next(queue for queue in self._queues.values() if tracked in queue)


def grid_lengths(profiles: Profiles) -> tuple[int, ...]:
    """Row lengths of the grid that the engine was built for, or of the paper's."""
    return tuple(sorted({length for length, _ in profiles.cells})) or GRID_LENGTHS


def grid_depth(profiles: Profiles) -> int:
    """Rows of its largest batch, or of the paper's."""
    return max((rows for _, rows in profiles.cells), default=GRID_DEPTH)


def clip(value: float, settings: SchedulerSettings) -> float:
    """`value` within [W_min, W_max]."""
    return min(max(value, settings.window_s_min), settings.window_s_max)
