"""LAPS as its authors published it: a fork of SGLang (Jianshu-She/LAPS, docs/laps_scheduler.md).

Each server has two queues, by the raw prompt length: short up to `threshold_tokens`. What is cached does not
count. The short queue goes first, always: it is served when it holds `window_requests`, or when `window_s`
has passed since it got its first request, or since its last batch left others behind. While neither is so,
and when it is empty, the long queue is served. A batch is filled in arrival order to `chunk_tokens`,
SGLang's budget, and its last prompt is cut. There is no deadline, no adaptive window and, in this version,
nothing against starvation: a later commit dropped the window and serves the long queue after 4 short batches
in a row (here `short_batches_max`, 0 for never).

The router keeps a pool of servers for each class and sends a request to one of its own class, whatever the
loads. A server that changes pools goes on with what it has. See `laps_controllers.PendingController`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from service.core.policy import Instance, KvGate, PassPlan, Plan, Wait
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Lane, Reason, Role
from service.policies.laps_controllers import PendingController
from service.policies.passes import Offer, PassBuilder
from service.policies.routed import Routed, Station
from service.policies.waiting import Waiting


@dataclass(frozen=True, slots=True)
class ArtifactKnobs:
    """Defaults are theirs. window_requests: --laps-wait-max-batch. chunk_tokens:
    --chunked-prefill-size as SGLang sets it on such a GPU. rebalance_*: of the router. short_batches_max: see
    the module text."""

    threshold_tokens: int = 256
    window_s: float = 0.005
    window_requests: int = 8
    chunk_tokens: int = 8192
    short_batches_max: int = 0
    rebalance_interval_s: float = 5.0
    rebalance_ratio: float = 2.0

    def __post_init__(self) -> None:
        for name in ("threshold_tokens", "window_s", "short_batches_max"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("window_requests", "chunk_tokens", "rebalance_interval_s", "rebalance_ratio"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}")


class PoolRouter:
    """The router: the pool of the request's class, and in it the server with the fewest live requests."""

    def __init__(self, threshold_tokens: int) -> None:
        self._threshold_tokens = threshold_tokens

    def joined(self, station: Station) -> None:
        pass

    def left(self, station: Station) -> None:
        pass

    def choose(self, tracked: Tracked, stations: Sequence[Station], now_s: float) -> Station:
        other = Role.LP if tracked.request.prompt_tokens <= self._threshold_tokens else Role.SP
        pool = [station for station in stations if station.instance.role is not other]
        return min(pool or stations, key=lambda station: station.requests)


class DualQueue:
    """The scheduler of one server; `service.core.policy.PrefillPolicy` for one instance."""

    def __init__(self, settings: SchedulerSettings, knobs: ArtifactKnobs) -> None:
        self._settings = settings
        self._knobs = knobs
        self._queues = {Lane.SHORT: Waiting(), Lane.LONG: Waiting()}  # by raw length
        self._opened_s: float | None = None  # since when the window runs
        self._short_batches = 0  # in a row

    # --- the queues ---

    def instance_up(self, instance: Instance, now_s: float) -> None:
        pass

    def instance_down(self, instance: Instance, now_s: float) -> None:
        pass

    def add(self, tracked: Tracked, now_s: float, *, arrival: bool) -> None:
        self._queue_of(tracked).add(tracked, tracked.seq)
        if self._opened_s is None and self._queues[Lane.SHORT]:
            self._opened_s = now_s

    def remove(self, tracked: Tracked) -> None:
        self._queue_of(tracked).remove(tracked)

    def late(self, now_s: float) -> list[Tracked]:
        return []

    def waiting(self) -> Iterator[Tracked]:
        return chain.from_iterable(self._queues.values())

    def lane_load(self, lane: Lane) -> tuple[int, int]:
        loads = [queue.lane_load(lane) for queue in self._queues.values()]
        return sum(requests for requests, _ in loads), sum(tokens for _, tokens in loads)

    def window(self) -> tuple[float, int]:
        return self._knobs.window_s, 0

    def dispatched(self, plan: PassPlan, now_s: float) -> None:
        if self._queue_of(plan.items[0].tracked) is self._queues[Lane.LONG]:
            self._short_batches = 0
            return
        self._short_batches += 1
        self._opened_s = now_s if self._queues[Lane.SHORT] else None

    # --- the plan ---

    def plan(self, instance: Instance, now_s: float) -> Plan:
        short, long = self._queues[Lane.SHORT], self._queues[Lane.LONG]
        gate = KvGate(instance, self._settings, now_s)
        open_until_s = self._open_until_s()
        due = len(short) > 0 and (len(short) >= self._knobs.window_requests or open_until_s <= now_s)
        order = [short, long] if due else [long]
        if 0 < self._knobs.short_batches_max <= self._short_batches:
            order.reverse()
        for queue in order:
            plan = self._batch(
                instance, queue, gate, Reason.LONG_CHUNK if queue is long else Reason.WINDOW_OVER
            )
            if isinstance(plan, PassPlan):
                return plan
        if short and not due:
            return Wait(open_until_s, Reason.WAITING_FOR_DEPTH)
        return Wait(math.inf, Reason.WAITING_FOR_KV) if gate.refused_any else None

    def _open_until_s(self) -> float:
        return -math.inf if self._opened_s is None else self._opened_s + self._knobs.window_s

    def _batch(self, instance: Instance, queue: Waiting, gate: KvGate, reason: Reason) -> Plan:
        tokens = max(self._knobs.chunk_tokens, instance.spec.capabilities.block_tokens)
        builder = PassBuilder(instance, gate, tokens)
        for tracked in chain(queue.parts(instance.instance_id), queue.newcomers()):
            if builder.full or builder.offer(tracked) is Offer.NO_SPACE or gate.refused_any:
                break
        return builder.plan(queue, reason)

    def _queue_of(self, tracked: Tracked) -> Waiting:
        short = tracked.request.prompt_tokens <= self._knobs.threshold_tokens
        return self._queues[Lane.SHORT if short else Lane.LONG]


def make_policy(settings: SchedulerSettings, knobs: ArtifactKnobs) -> Routed:
    return Routed(PoolRouter(knobs.threshold_tokens), lambda: DualQueue(settings, knobs))


def make_controller(settings: SchedulerSettings, knobs: ArtifactKnobs) -> PendingController:
    return PendingController(knobs.rebalance_interval_s, knobs.rebalance_ratio)
