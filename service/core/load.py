"""How busy arrivals keep the instances: the rates of both lanes, as they were of late."""

from __future__ import annotations

from service.core.policy import Instance
from service.core.pools import Pools
from service.core.tracked import Tracked
from service.core.types import Lane
from service.core.wait_depth import RateEstimator

LOAD_MAX = 0.95  # of a lane: more is a burst, and estimates that divide by what is left stay finite


class Load:
    def __init__(self, pools: Pools, memory_s: float) -> None:
        self._pools = pools
        self._rates = {lane: RateEstimator(memory_s) for lane in Lane}

    @property
    def instances(self) -> int:
        return max(1, len(self._pools))

    def arrived(self, tracked: Tracked, now_s: float) -> None:
        self._rates[tracked.lane].add(tracked.remaining, now_s)

    def requests_per_s(self, lane: Lane, now_s: float) -> float:
        return self._rates[lane].requests_per_s(now_s)

    def of(self, lane: Lane, instance: Instance, now_s: float) -> float:
        """Share of all instances, taken to be like this one, that the tokens of a lane keep busy."""
        rate = self._rates[lane].tokens_per_s(now_s)
        return min(LOAD_MAX, rate / (instance.tokens_per_s * self.instances))
