"""Metrics read from the service at scrape time, all of one snapshot, so that its books hold in every scrape.

A scrape runs in the thread of the HTTP endpoint, the state belongs to the event loop: the snapshot is taken
there and waited for, at most `WAIT_S_MAX`. A loop that does not answer in time is what the lag gauge shows;
the scrape then does without the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from service.core.lifecycle import InstanceState
from service.core.types import Outcome
from service.runtime.contract import InstanceSnapshot, Snapshot
from service.telemetry import names
from service.telemetry.names import Metric, MetricKind

WAIT_S_MAX = 1.0

Family = CounterMetricFamily | GaugeMetricFamily


class SnapshotCollector(Collector):
    """Empty until it is bound to a service."""

    def __init__(self) -> None:
        self._take: Callable[[], Future[Snapshot]] | None = None

    def bind(self, snapshot: Callable[[], Snapshot]) -> None:
        """`snapshot` is called on the running event loop. Call on that loop."""
        loop = asyncio.get_running_loop()

        def take() -> Future[Snapshot]:
            future: Future[Snapshot] = Future()
            loop.call_soon_threadsafe(_fill, future, snapshot)
            return future

        self._take = take

    def unbind(self) -> None:
        self._take = None

    def describe(self) -> list[Family]:
        """Nothing: without this the registry would scrape once to learn the names."""
        return []

    def collect(self) -> Iterator[Family]:
        take = self._take
        if take is None:
            return
        start_s = time.monotonic()
        try:
            snapshot = take().result(WAIT_S_MAX)
        except (TimeoutError, RuntimeError):  # it does not answer, or is closed
            snapshot = None
        yield family_of(names.LOOP_LAG, time.monotonic() - start_s)
        if snapshot is not None:
            yield from _totals(snapshot)
            yield from _by_lane(snapshot)
            yield from _by_instance(snapshot.instances)


def _fill(future: Future[Snapshot], snapshot: Callable[[], Snapshot]) -> None:
    try:
        future.set_result(snapshot())
    except Exception as error:
        future.set_exception(error)


def family_of(metric: Metric, value: float | None = None) -> Family:
    labels = metric.labels if value is None else None
    if metric.kind is MetricKind.COUNTER:
        return CounterMetricFamily(metric.name, metric.meaning, value, labels)
    return GaugeMetricFamily(metric.name, metric.meaning, value, labels)


def _totals(snapshot: Snapshot) -> Iterator[Family]:
    yield family_of(names.SUBMITTED, snapshot.submitted)
    ended = family_of(names.ENDED)
    for outcome in Outcome:
        ended.add_metric([outcome.value], snapshot.outcomes.get(outcome, 0))
    yield ended
    yield family_of(names.QUEUED, snapshot.queued)
    yield family_of(names.RUNNING, snapshot.running)
    yield family_of(names.WINDOW, snapshot.window_s)
    yield family_of(names.DEPTH, snapshot.depth_tokens)
    yield family_of(names.BOUNDARY, snapshot.boundary_tokens)
    yield family_of(names.KNEE, snapshot.knee_tokens)
    yield family_of(names.DRAINING, float(snapshot.draining))


def _by_lane(snapshot: Snapshot) -> Iterator[Family]:
    for metric, values in (
        (names.LANE_QUEUED, snapshot.lane_queued),
        (names.LANE_TOKENS, snapshot.lane_queued_tokens),
    ):
        family = family_of(metric)
        for lane, value in values.items():
            family.add_metric([lane.value], value)
        yield family


def _by_instance(instances: tuple[InstanceSnapshot, ...]) -> Iterator[Family]:
    metrics = (names.INSTANCE_UP, names.DECODING, names.CORRECTION, names.KV_BLOCKS, names.INCIDENTS)
    up, decoding, corrections, blocks, incidents = (family_of(metric) for metric in metrics)
    for instance in instances:
        instance_id, stats = instance.instance_id, instance.stats
        up.add_metric([instance_id], float(instance.state == InstanceState.UP))
        decoding.add_metric([instance_id], instance.decoding)
        for side, factor in zip(("memory", "compute"), instance.correction, strict=True):
            corrections.add_metric([instance_id, side], factor)
        held = stats.kv_blocks_total - stats.kv_blocks_free - stats.kv_blocks_cached
        blocks.add_metric([instance_id, names.HELD], held)
        blocks.add_metric([instance_id, names.CACHED], stats.kv_blocks_cached)
        blocks.add_metric([instance_id, names.FREE], stats.kv_blocks_free)
        for incident, count in stats.incidents:
            incidents.add_metric([instance_id, incident], count)
    yield from (up, decoding, corrections, blocks, incidents)
