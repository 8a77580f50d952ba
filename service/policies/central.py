"""What the peers with one central queue have in common; each adds its rank and its plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from service.core.policy import Instance, PassPlan, Plan
from service.core.tracked import Tracked
from service.core.types import Lane
from service.policies.waiting import Waiting


class CentralPolicy(ABC):
    """`service.core.policy.PrefillPolicy` over one `Waiting`, for all instances."""

    def __init__(self) -> None:
        self._waiting = Waiting()

    @abstractmethod
    def rank(self, tracked: Tracked) -> float:
        """Its place in the order, lowest first; it holds while `tracked` waits."""

    @abstractmethod
    def plan(self, instance: Instance, now_s: float) -> Plan: ...

    def instance_up(self, instance: Instance, now_s: float) -> None:  # noqa: B027 - most need no more
        pass

    def instance_down(self, instance: Instance, now_s: float) -> None:  # noqa: B027
        pass

    def add(self, tracked: Tracked, now_s: float, *, arrival: bool) -> None:
        self._waiting.add(tracked, self.rank(tracked))

    def remove(self, tracked: Tracked) -> None:
        self._waiting.remove(tracked)

    def late(self, now_s: float) -> list[Tracked]:
        return []

    def waiting(self) -> Iterator[Tracked]:
        return iter(self._waiting)

    def lane_load(self, lane: Lane) -> tuple[int, int]:
        return self._waiting.lane_load(lane)

    def window(self) -> tuple[float, int]:
        return 0.0, 0

    def dispatched(self, plan: PassPlan, now_s: float) -> None:  # noqa: B027
        pass
