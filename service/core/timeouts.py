"""Moments at which live requests end by themselves: gRPC deadlines and the bound on time in the queue."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from service.core.lifecycle import RequestState
from service.core.tracked import Tracked
from service.core.types import Outcome, Reason

SWEEP_MIN = 256  # entries; below this a sweep is not worth its time


@dataclass(frozen=True, slots=True)
class Timeout:
    tracked: Tracked
    outcome: Outcome
    reason: Reason

    @property
    def moot(self) -> bool:
        """It can't happen any more: the request ended, or has started before its queue age ran out."""
        started = self.reason is Reason.QUEUE_AGE and self.tracked.state is not RequestState.QUEUED
        return started or self.tracked.state is RequestState.ENDED


class Timeouts:
    """A heap as large as what is live asks for: when it has doubled, moot entries are swept out."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timeout]] = []
        self._order = count()
        self._sweep_at = SWEEP_MIN

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, time_s: float, timeout: Timeout) -> None:
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[2].moot]
            heapq.heapify(self._heap)
            self._sweep_at = max(SWEEP_MIN, 2 * len(self._heap))
        heapq.heappush(self._heap, (time_s, next(self._order), timeout))

    def due(self, now_s: float) -> Iterator[Timeout]:
        """Those that happen now; moot ones at the front are dropped, so `next_s` is a real one."""
        while self._heap and (self._heap[0][2].moot or self._heap[0][0] <= now_s):
            _, _, timeout = heapq.heappop(self._heap)
            if not timeout.moot:
                yield timeout

    @property
    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else math.inf
