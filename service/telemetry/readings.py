"""Values that a process tells at scrape time: whatever it says of itself then, all of one moment.

As with `gauges`, a scrape runs in a thread and what it asks for belongs to the event loop, so it waits for
the loop, for a bounded time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from prometheus_client.registry import Collector

from service.telemetry import names
from service.telemetry.gauges import WAIT_S_MAX, Family, family_of
from service.telemetry.names import Metric


@dataclass(frozen=True, slots=True)
class Reading:
    """One value. labels: in the order of the metric's."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


Read = Callable[[], Iterable[Reading]]


class ReadingsCollector(Collector):
    """read: called on the loop that this is made on. lag: whether it also tells how long the loop took."""

    def __init__(self, read: Read, *, lag: bool) -> None:
        self._read = read
        self._lag = lag
        self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()

    def unbind(self) -> None:
        self._loop = None

    def describe(self) -> list[Family]:
        """Nothing: without this the registry would scrape once to learn the names."""
        return []

    def collect(self) -> Iterator[Family]:
        loop = self._loop
        if loop is None:
            return
        start_s = time.monotonic()
        future: Future[list[Reading]] = Future()
        readings: list[Reading] = []
        try:
            loop.call_soon_threadsafe(self._fill, future)
            readings = future.result(WAIT_S_MAX)
        except (TimeoutError, RuntimeError):  # it does not answer, or is closed
            pass
        if self._lag:
            yield family_of(names.LOOP_LAG, time.monotonic() - start_s)
        families: dict[str, Family] = {}
        for reading in readings:
            family = families.get(reading.metric.name)
            if family is None:
                family = families[reading.metric.name] = family_of(reading.metric)
            family.add_metric(list(reading.labels), reading.value)
        yield from families.values()

    def _fill(self, future: Future[list[Reading]]) -> None:
        try:
            future.set_result(list(self._read()))
        except Exception as error:
            future.set_exception(error)
