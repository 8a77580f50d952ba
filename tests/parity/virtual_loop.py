"""An asyncio event loop whose clock jumps to the next timer instead of waiting for it.

Everything else is the stock selector loop, so code under it runs as it does in production, only in no time.
Timers of equal deadlines fire in the order in which they were set (the stock loop leaves that open), so a run
is repeatable. Not for code that uses threads or sockets: their answers take real time, and a loop with
nothing but them to wait for raises instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heappush
from itertools import count
from math import ulp
from typing import Any


class _Timer(asyncio.TimerHandle):
    """Ordered by (deadline, order of creation)."""

    __slots__ = ("order",)

    order: int

    def __lt__(self, other: Any) -> bool:
        return (self._when, self.order) < (other._when, other.order)


class _JumpingSelector(selectors.SelectSelector):
    """Moves the clock on by the timeout that it is asked to wait."""

    loop: VirtualClockLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("the virtual loop would wait for ever: no timer is set and nothing is ready")
        if not ready and timeout:
            self.loop.jump()
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = _JumpingSelector()
        selector.loop = self
        self._now_s = 0.0
        self._order = count()
        super().__init__(selector)
        self._clock_resolution = ulp(0.0)

    def time(self) -> float:
        return self._now_s

    def jump(self) -> None:
        """To the next timer. The loop has dropped the cancelled ones at the head of its heap."""
        self._now_s = max(self._now_s, self._scheduled[0].when())
        # The loop fires what is due before now + resolution: one step further, so exactly what is due now.
        self._clock_resolution = ulp(self._now_s)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        timer.order = next(self._order)
        timer._scheduled = True
        heappush(self._scheduled, timer)
        return timer


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` on a virtual clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
