"""The face of telemetry: what the composition root starts, binds and stops.

Metrics and traces are two observers of the runtime with a switch each. What is off is not imported, holds no
thread and costs nothing a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from service.runtime.contract import Observer, Snapshot
from service.telemetry.settings import TelemetrySettings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from service.telemetry.endpoint import MetricsEndpoint
    from service.telemetry.export import Exporter
    from service.telemetry.gauges import SnapshotCollector
    from service.telemetry.role_moves import RoleMoveMetrics
    from service.telemetry.traces import TraceObserver

log = logging.getLogger(__name__)


class Telemetry:
    """`start`, `serves`, hand `observers` to the runtime, `bind` its snapshot; `shutdown` in the end.

    A process that learns later what it serves, or serves nothing, has an endpoint with what is known before.
    """

    def __init__(self, settings: TelemetrySettings) -> None:
        self._settings = settings
        self._observers: list[Observer] = []
        self._gauges: SnapshotCollector | None = None
        self._endpoint: MetricsEndpoint | None = None
        self._registry: CollectorRegistry | None = None
        self._exporter: Exporter | None = None
        self._traces: TraceObserver | None = None

    @property
    def observers(self) -> tuple[Observer, ...]:
        """After `serves`."""
        return tuple(self._observers)

    @property
    def metrics_port(self) -> int:
        """Where metrics are served, after `start`; 0: nowhere."""
        return self._endpoint.port if self._endpoint is not None else 0

    def start(self) -> None:
        """Serve metrics. Call on the event loop. Raises OSError where the address can't be had."""
        if self._settings.enabled:
            self._start_metrics()

    def serves(self, model: str, backend: str, t_classes: tuple[int, ...]) -> None:
        """What the labels say from here on; begins to export traces. Only the first call counts."""
        if self._observers:
            return
        if self._registry is not None:
            from service.telemetry.metrics import MetricsObserver

            self._observers.append(MetricsObserver(self._registry, model, backend, t_classes))
        if self._settings.otlp_endpoint:
            self._start_traces(model, backend)

    def bind(self, snapshot: Callable[[], Snapshot]) -> None:
        """Where gauges are read from at scrape time. Call on the event loop of the runtime."""
        if self._gauges is not None:
            self._gauges.bind(snapshot)

    def role_moves(self, phases: tuple[str, ...], ends: tuple[str, ...]) -> RoleMoveMetrics | None:
        """Metrics of a worker that loads engines, after `start`; None where none are served. Call once."""
        if self._registry is None:
            return None
        from service.telemetry.role_moves import RoleMoveMetrics

        return RoleMoveMetrics(self._registry, phases, ends)

    def request_context(self, request_id: str, metadata: Mapping[str, str]) -> None:
        """The metadata of an incoming call, before its request is submitted: its span gets that parent."""
        if self._traces is not None:
            self._traces.called(request_id, metadata)

    def shutdown(self) -> None:
        """Send the last spans and stop serving; a few seconds at most. Harmless when called again."""
        if self._gauges is not None:
            self._gauges.unbind()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = self._traces = None

    def _start_metrics(self) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector

        from service.telemetry.endpoint import MetricsEndpoint
        from service.telemetry.gauges import SnapshotCollector

        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._gauges = SnapshotCollector()
        registry.register(self._gauges)
        settings = self._settings
        self._endpoint = MetricsEndpoint(registry, settings.metrics_host, settings.metrics_port)
        log.info("metrics on http://%s:%d/metrics", settings.metrics_host, self._endpoint.port)

    def _start_traces(self, model: str, backend: str) -> None:
        from service.telemetry.export import Exporter
        from service.telemetry.traces import TraceObserver

        self._exporter = Exporter(self._settings, metadata.version("plaserve"))
        now_s = asyncio.get_running_loop().time()
        self._traces = TraceObserver(self._exporter.tracer, model, backend, now_s)
        self._observers.append(self._traces)
        log.info("traces to %s", self._settings.otlp_endpoint)
