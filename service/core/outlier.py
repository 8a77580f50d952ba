"""Instances that are slow beside their peers get no new work for a while.

Every pass gives a sample: the time that it took over the time that was predicted for it. A pass that had more
to compute than was planned (cached blocks were gone) tells nothing; one that failed counts as infinitely
slow, or an instance that fails at once would draw all the work. The *score* of an instance is the median of
its last samples, and the *bar* is `outlier_ratio` times the lower median of the scores of its peers, at least
1: where everybody is slow the prediction is wrong, not an instance.

    HEALTHY     its score passes the bar                        -> SUSPECT
    SUSPECT     still above it a pass later, and there is room  -> EJECTED;   below it -> HEALTHY
    EJECTED     after `outlier_eject_s`, doubled by each trial that failed    -> HALF_OPEN
    HALF_OPEN   may take one pass. Within half the bar          -> HEALTHY;   else -> EJECTED

An ejected instance takes nothing new; what it holds goes on. Peers are instances of a kind (same capabilities
and profiles), and of a kind at most floor(`outlier_share_max` x n) are ejected or half-open at any moment, so
somebody is always left for a request that some instance takes. Where the fleet shrinks, the least slow ones
are suspects again.

Under constant slowness nobody flaps: who is above the bar is ejected and no trial lets it back, as that takes
half the bar; who is below is never ejected.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from engines.types import PassResult
from service.core.lifecycle import HEALTH, HealthState, step
from service.core.policy import InFlight, Instance
from service.core.settings import SchedulerSettings

RETURN_RATIO = 0.5  # of the bar: what a trial must stay within
EJECT_FACTOR_MAX = 16  # times `outlier_eject_s`


@dataclass(slots=True, eq=False)
class Health:
    """What is known of one instance. until_s: end of its ejection. trials: that failed, one after another."""

    instance: Instance
    kind: Hashable
    ratios: deque[float]
    state: HealthState = HealthState.HEALTHY
    until_s: float = math.inf
    trials: int = 0
    worst: float = field(default=0.0)  # score at its ejection

    @property
    def score(self) -> float:
        """The median of the last samples, the lower of two."""
        return _lower_median(self.ratios)

    def move(self, state: HealthState) -> None:
        self.state = step(HEALTH, self.state, state, f"health of {self.instance.instance_id}")
        self.instance.on_trial = state is HealthState.HALF_OPEN
        self.instance.takes_new = state is not HealthState.EJECTED


class Outliers:
    """See the module text. Writes `takes_new` and `on_trial` of instances and nothing else."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._known: dict[str, Health] = {}
        self._out: dict[str, Health] = {}  # ejected or half-open
        self.next_s = math.inf  # when the next one is tried

    def state(self, instance_id: str) -> HealthState:
        """Of an instance that is up and does not drain. Raises KeyError for others."""
        return self._known[instance_id].state

    def joined(self, instance: Instance) -> None:
        kind = (instance.spec.capabilities, instance.spec.profiles)
        ratios: deque[float] = deque(maxlen=2 * self._settings.outlier_passes_min)
        self._known[instance.instance_id] = Health(instance, kind, ratios)

    def left(self, instance: Instance) -> list[Instance]:
        """It is gone, or about to go. Returns those that take new requests again as they are needed now."""
        gone = self._known.pop(instance.instance_id, None)
        if gone is None:
            return []
        self._out.pop(instance.instance_id, None)
        out = [health for health in self._out.values() if health.kind == gone.kind]
        out.sort(key=lambda health: (health.worst, health.instance.place))
        needed = out[: max(0, len(out) - self._allowed(gone.kind))] if out else []
        for health in needed:
            health.move(HealthState.SUSPECT)
            del self._out[health.instance.instance_id]
        self._set_next()
        return [health.instance for health in needed]

    def ran(self, instance: Instance, flight: InFlight, result: PassResult, now_s: float) -> bool:
        """A pass is over. Whether the instance is ejected with it."""
        known = 0.0 < flight.predicted_s < math.inf
        ratio = result.elapsed_s / flight.predicted_s if known else math.inf
        if not known or (ratio > self._settings.outlier_ratio and _computed_more(flight, result)):
            if instance.on_trial:
                instance.takes_new = True  # this was no trial: it may have another pass
            return False
        return self._sample(instance, ratio, now_s)

    def failed(self, instance: Instance, now_s: float) -> bool:
        """As `ran`, for a pass that failed."""
        return self._sample(instance, math.inf, now_s)

    def due(self, now_s: float) -> list[Instance]:
        """Those that may be tried from now on."""
        if now_s < self.next_s:
            return []
        due = [h for h in self._out.values() if h.state is HealthState.EJECTED and h.until_s <= now_s]
        for health in due:
            health.move(HealthState.HALF_OPEN)
        self._set_next()
        return [health.instance for health in due]

    # --- states ---

    def _sample(self, instance: Instance, ratio: float, now_s: float) -> bool:
        limit = self._settings.outlier_ratio
        if not limit:
            return False
        health = self._known.get(instance.instance_id)
        if health is None:  # it drains
            return False
        health.ratios.append(ratio)
        if health.state is HealthState.HALF_OPEN:
            return self._judge(health, ratio, now_s)
        if health.state is HealthState.EJECTED or (health.state is HealthState.HEALTHY and ratio <= limit):
            return False  # a sample below the bar takes no healthy instance over it
        slow = len(health.ratios) >= self._settings.outlier_passes_min and self._is_slow(health)
        if health.state is HealthState.HEALTHY:
            if slow:
                health.move(HealthState.SUSPECT)
        elif not slow:
            health.move(HealthState.HEALTHY)
        elif self._count_out(health.kind) < self._allowed(health.kind):
            health.worst = health.score
            self._eject(health, now_s)
            return True
        return False

    def _judge(self, health: Health, ratio: float, now_s: float) -> bool:
        """The trial of a half-open instance is over."""
        if ratio <= RETURN_RATIO * self._bar(health):
            del self._out[health.instance.instance_id]
            health.trials = 0
            health.ratios.clear()
            health.move(HealthState.HEALTHY)
            return False
        health.trials += 1
        self._eject(health, now_s)
        return True

    def _eject(self, health: Health, now_s: float) -> None:
        health.move(HealthState.EJECTED)
        factor = min(2**health.trials, EJECT_FACTOR_MAX)
        health.until_s = now_s + self._settings.outlier_eject_s * factor
        self._out[health.instance.instance_id] = health
        self._set_next()

    def _set_next(self) -> None:
        ejected = (h.until_s for h in self._out.values() if h.state is HealthState.EJECTED)
        self.next_s = min(ejected, default=math.inf)

    # --- peers ---

    def _is_slow(self, health: Health) -> bool:
        """Above the bar. One that fails is found without peers: it may be the only one that gets work."""
        score = health.score
        return math.isinf(score) or score > self._bar(health)

    def _bar(self, health: Health) -> float:
        """What its score is held against. Looks at all peers, and only for one that is slow."""
        least = self._settings.outlier_passes_min
        scores = [
            peer.score
            for name, peer in self._known.items()
            if peer is not health and name not in self._out and peer.kind == health.kind
            if len(peer.ratios) >= least
        ]
        return self._settings.outlier_ratio * max(1.0, _lower_median(scores)) if scores else math.inf

    def _count_out(self, kind: Hashable) -> int:
        return sum(health.kind == kind for health in self._out.values())

    def _allowed(self, kind: Hashable) -> int:
        peers = sum(health.kind == kind for health in self._known.values())
        return math.floor(self._settings.outlier_share_max * peers)


def _lower_median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _computed_more(flight: InFlight, result: PassResult) -> bool:
    """Whether some request had more to compute in the pass than was planned. What rides in it is behind."""
    planned = flight.pass_.items
    results = islice(result.items, len(planned))
    return any(item.computed > plan.new_tokens for plan, item in zip(planned, results, strict=False))
