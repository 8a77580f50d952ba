"""Moments at which live requests end by themselves: gRPC deadlines and the bound on time in the queue."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from service.core.lifecycle import RequestState
from service.core.tracked import Tracked
from service.core.types import Outcome, Reason

SWEEP_MIN = 256  # entries; below this a sweep is not worth its time


class Timeout(NamedTuple):
    tracked: Tracked
    outcome: Outcome
    reason: Reason

    @property
    def moot(self) -> bool:
        """It can't happen any more: the request ended, or has started before its queue age ran out."""
        state = self.tracked.state
        started = self.reason is Reason.QUEUE_AGE and state is not RequestState.QUEUED
        return started or state is RequestState.ENDED


_Entry = tuple[float, int, Timeout]  # when, order of joining, what


class Timeouts:
    """As large as what is live asks for: when it has doubled, moot entries are swept out.

    Every request has a bound on its time in the queue, and these come in the order of their times: they are a
    plain queue. Whatever does not come in order, deadlines as a rule, goes to a heap.
    """

    def __init__(self) -> None:
        self._row: deque[_Entry] = deque()
        self._heap: list[_Entry] = []
        self._joined = 0
        self._sweep_at = SWEEP_MIN

    def __len__(self) -> int:
        return len(self._row) + len(self._heap)

    def add(self, time_s: float, timeout: Timeout) -> None:
        if len(self._row) + len(self._heap) >= self._sweep_at:
            self._sweep()
        self._joined += 1
        entry = (time_s, self._joined, timeout)
        in_order = not self._row or time_s >= self._row[-1][0]
        if timeout.reason is Reason.QUEUE_AGE and in_order:
            self._row.append(entry)
        else:
            heapq.heappush(self._heap, entry)

    def due(self, now_s: float) -> Iterator[Timeout]:
        """Those that happen now."""
        while self.next_s <= now_s:
            from_row = not self._heap or (bool(self._row) and self._row[0] < self._heap[0])
            yield (self._row.popleft() if from_row else heapq.heappop(self._heap))[2]

    @property
    def next_s(self) -> float:
        """When the next one happens; moot ones in front of it are dropped."""
        row, heap = self._row, self._heap
        while row and row[0][2].moot:
            row.popleft()
        if not heap:
            return row[0][0] if row else math.inf
        while heap and heap[0][2].moot:
            heapq.heappop(heap)
        return min(row[0][0] if row else math.inf, heap[0][0] if heap else math.inf)

    def _sweep(self) -> None:
        self._row = deque(entry for entry in self._row if not entry[2].moot)
        self._heap = [entry for entry in self._heap if not entry[2].moot]
        heapq.heapify(self._heap)
        self._sweep_at = max(SWEEP_MIN, 2 * len(self))
