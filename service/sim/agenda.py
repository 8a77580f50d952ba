"""What is due when: arrivals that are asked for one at a time, actions in a heap, and regular ticks.

Of what is due at one instant, ticks come first, then the starts and kills of instances that were planned
(`early`), then arrivals, then all else in the order in which it was scheduled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any

from service.core.types import Lane, Request

Planned = tuple[float, Request, Lane]  # seconds, what arrives, the lane that it is reported under
_ARRIVAL = 0  # its place among entries of equal time: early ones are below, the others above


class Agenda:
    def __init__(self, arrive: Callable[[Request, Lane], None]) -> None:
        self.now_s = 0.0
        self._arrive = arrive
        self._arrivals: Iterator[Planned] = iter(())
        self._next: Planned | None = None
        self._arrival_s = math.inf
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._early = -(1 << 62)
        self._late = _ARRIVAL
        self._ticks: list[tuple[float, int, float, Callable[[], None]]] = []  # due, order, period, action

    def at(self, time_s: float, action: Callable[..., None], *args: object) -> None:
        self._late += 1
        heappush(self._heap, (time_s, self._late, action, args))

    def early(self, time_s: float, action: Callable[..., None], *args: object) -> None:
        """As `at`, before the arrivals of that instant."""
        self._early += 1
        heappush(self._heap, (time_s, self._early, action, args))

    def every(self, period_s: float, action: Callable[[], None]) -> None:
        """Call `action` each `period_s`, as long as anything else is still to happen."""
        if not 0.0 < period_s < math.inf:
            raise ValueError(f"a period must be above 0 s and finite, got {period_s}")
        heappush(self._ticks, (period_s, len(self._ticks), period_s, action))

    def arrivals(self, planned: Iterator[Planned]) -> None:
        """Who arrives, in order of time. Raises ValueError, here or later, where the order is broken."""
        self._arrivals = planned
        self._look_ahead(-math.inf)

    @property
    def next_s(self) -> float:
        """When the next thing is due, ticks aside; inf when nothing is."""
        if self._heap and self._heap[0][0] < self._arrival_s:
            return self._heap[0][0]
        return self._arrival_s

    def ticks_until(self, time_s: float) -> Iterator[Callable[[], None]]:
        """The ticks due up to then, each with the clock moved to it."""
        while self._ticks and self._ticks[0][0] <= time_s:
            tick_s, order, period_s, action = heappop(self._ticks)
            heappush(self._ticks, (tick_s + period_s, order, period_s, action))
            self.now_s = max(self.now_s, tick_s)
            yield action

    def deliver(self) -> None:
        """Do everything that is due now."""
        heap, now_s = self._heap, self.now_s
        while True:
            due = bool(heap) and heap[0][0] <= now_s
            if self._arrival_s <= now_s and not (due and heap[0][:2] < (self._arrival_s, _ARRIVAL)):
                assert self._next is not None
                time_s, request, lane = self._next
                self._look_ahead(time_s)
                self._arrive(request, lane)
            elif due:
                _, _, action, args = heappop(heap)
                action(*args)
            else:
                return

    def _look_ahead(self, after_s: float) -> None:
        self._next = next(self._arrivals, None)
        self._arrival_s = math.inf if self._next is None else self._next[0]
        if self._arrival_s < after_s:
            raise ValueError(
                f"arrivals: one at {self._arrival_s} s comes after one at {after_s} s; sort them"
            )
