"""Telemetry of a process of a fleet: that of one process, and what only front ends, workers and controllers
tell. What is off is not imported and costs nothing a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from service.runtime.contract import Observer, RequestRecord
from service.telemetry.settings import TelemetrySettings
from service.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from service.telemetry.fleet_metrics import FrontEndMetrics
    from service.telemetry.fleet_traces import WorkerTraces
    from service.telemetry.readings import Read, ReadingsCollector

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrontEndTelemetry:
    """Where a front end tells what. None: nobody listens. observers: of its runtime. calls: of its surface.
    token: after a token. called: the metadata of a call, before its request is submitted. carrier: the trace
    context that goes with a request to its scheduler."""

    observers: tuple[Observer, ...] = ()
    calls: FrontEndMetrics | None = None
    token: Callable[[RequestRecord], None] | None = None
    called: Callable[[str, Mapping[str, str]], None] | None = None
    carrier: Callable[[str], Mapping[str, str]] | None = None


class FleetTelemetry(Telemetry):
    """`start` first. A scheduler goes on as one process does (`serves`, `bind`), and has `carrier`."""

    def __init__(self, settings: TelemetrySettings) -> None:
        super().__init__(settings)
        self._readings: ReadingsCollector | None = None

    @property
    def traces(self) -> bool:
        return bool(self._settings.otlp_endpoint)

    def front_end(self) -> FrontEndTelemetry:
        """Call once, on the event loop."""
        metrics = None
        if self._registry is not None:
            from service.telemetry.fleet_metrics import FrontEndMetrics

            metrics = FrontEndMetrics(self._registry)
        token = metrics.token if metrics is not None else None
        if not self.traces:
            return FrontEndTelemetry(calls=metrics, token=token)
        from service.telemetry.fleet_traces import FrontEndTraces

        made = FrontEndTraces(self._tracer(), asyncio.get_running_loop().time())
        return FrontEndTelemetry((made,), metrics, token, made.called, made.carrier)

    def worker(self, instance_id: str) -> WorkerTraces | None:
        """An observer of its engine; None without traces. Call once, on the event loop."""
        if not self.traces:
            return None
        from service.telemetry.fleet_traces import WorkerTraces

        return WorkerTraces(self._tracer(), instance_id, asyncio.get_running_loop().time())

    def carrier(self, request_id: str) -> Mapping[str, str]:
        """Of a scheduler: the trace context that goes to a worker with a request; empty where it is not
        sampled."""
        span = self._traces.span_of(request_id) if self._traces is not None else None
        if span is None:
            return {}
        from service.telemetry.fleet_traces import carrier_of

        return carrier_of(span)

    def tell(self, read: Read) -> None:
        """What is read at scrape time. Call once, on the event loop."""
        if self._registry is not None:
            from service.telemetry.readings import ReadingsCollector

            self._readings = ReadingsCollector(read, lag=True)
            self._registry.register(self._readings)

    def shutdown(self) -> None:
        if self._readings is not None:
            self._readings.unbind()
        super().shutdown()

    def _tracer(self) -> Tracer:
        from service.telemetry.export import Exporter

        self._exporter = Exporter(self._settings, metadata.version("plaserve"))
        log.info("traces to %s", self._settings.otlp_endpoint)
        return self._exporter.tracer
