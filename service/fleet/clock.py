"""Time for membership: now, and a call at a later time. The wall clock, and one that a test moves by hand.

Only differences of one process's own clock are used (lease reckoning, ages, backoff), so clocks of machines
need not agree. Times of day that people read are kept apart: `time_s`, written by whoever writes a record.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> object: ...


class Clock(Protocol):
    """now_s: seconds that only grow. time_s: seconds since 1970, of this machine. call_at: on `now_s`."""

    def now_s(self) -> float: ...

    def time_s(self) -> float: ...

    def call_at(self, when_s: float, call: Callable[[], None]) -> Timer: ...


class WallClock:
    """The machine's clocks; timers run in the event loop of the caller."""

    def now_s(self) -> float:
        return time.monotonic()

    def time_s(self) -> float:
        return time.time()

    def call_at(self, when_s: float, call: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0.0, when_s - self.now_s()), call)


class _VirtualTimer:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class VirtualClock:
    """Stands still until `advance`. Timers of equal time run in the order in which they were set."""

    def __init__(self, now_s: float = 0.0, time_s: float = 1_700_000_000.0) -> None:
        self._now_s = now_s
        self._offset_s = time_s - now_s
        self._timers: list[tuple[float, int, _VirtualTimer]] = []
        self._count = 0

    def now_s(self) -> float:
        return self._now_s

    def time_s(self) -> float:
        return self._now_s + self._offset_s

    def call_at(self, when_s: float, call: Callable[[], None]) -> Timer:
        timer = _VirtualTimer(call)
        self._count += 1
        heapq.heappush(self._timers, (max(when_s, self._now_s), self._count, timer))
        return timer

    async def advance(self, seconds: float) -> None:
        """Move on, stopping at each timer on the way, so that what it wakes runs at its own time."""
        end_s = self._now_s + seconds
        await settle()
        while self._timers and self._timers[0][0] <= end_s:
            when_s, _, timer = heapq.heappop(self._timers)
            self._now_s = max(self._now_s, when_s)
            if timer.call is not None:
                timer.call()
                await settle()
        self._now_s = end_s
        await settle()


async def settle(turns: int = 30) -> None:
    """Let tasks that are ready run, and those that they wake."""
    for _ in range(turns):
        await asyncio.sleep(0)


class Signal:
    """Wakes whoever waits for it, without a task for each. Stays set until cleared."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: set[asyncio.Future[None]] = set()

    def set(self) -> None:
        self._is_set = True
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self, clock: Clock, seconds: float) -> bool:
        """Until it is set (true), or so many seconds of `clock` are over (false)."""
        if self._is_set:
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end() -> None:
            if not future.done():
                future.set_result(None)

        timer = clock.call_at(clock.now_s() + seconds, end)
        self._waiting.add(future)
        try:
            await future
            return self._is_set
        finally:
            self._waiting.discard(future)
            timer.cancel()


async def sleep(clock: Clock, seconds: float) -> None:
    """So many seconds of `clock`."""
    await Signal().wait(clock, seconds)
