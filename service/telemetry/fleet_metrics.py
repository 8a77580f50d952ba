"""What a front end counts where it happens: calls by status, first tokens and gaps as its clients see them.

Without a lane (the scheduler has not accepted the request yet, which a token can't precede) nothing is lost:
the label says `none`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from service.core.types import Lane
from service.runtime.contract import RequestRecord
from service.telemetry import fleet_names as names
from service.telemetry.names import NO_LANE, Metric

METHODS = ("Generate", "Prefill")


class FrontEndMetrics:
    """`service.rpc.calls.CallObserver`, and told of every token that a front end has for a client."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry
        calls, flight = names.CALLS, names.CALLS_IN_FLIGHT
        self._calls = Counter(calls.name, calls.meaning, calls.labels, registry=registry)
        in_flight = Gauge(flight.name, flight.meaning, flight.labels, registry=registry)
        self._in_flight = {method: in_flight.labels(method) for method in METHODS}
        self._ttft_s = self._by_lane(names.CLIENT_TTFT)
        self._itl_s = self._by_lane(names.CLIENT_ITL)

    def began(self, method: str) -> None:
        self._in_flight[method].inc()

    def ended(self, method: str, code: str) -> None:
        self._in_flight[method].dec()
        self._calls.labels(method, code).inc()

    def token(self, record: RequestRecord) -> None:
        """After the times of the record are those of the token."""
        if record.output_tokens > 1:
            self._itl_s[record.lane].observe(record.itl_s[-1])
        elif record.first_token_s is not None:
            self._ttft_s[record.lane].observe(record.first_token_s - record.request.arrival_s)

    def _by_lane(self, metric: Metric) -> dict[Lane | None, Histogram]:
        family = Histogram(
            metric.name, metric.meaning, metric.labels, registry=self._registry, buckets=metric.buckets
        )
        bound: dict[Lane | None, Histogram] = {lane: family.labels(lane.value) for lane in Lane}
        bound[None] = family.labels(NO_LANE)
        return bound
