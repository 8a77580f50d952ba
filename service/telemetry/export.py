"""Which spans are kept, and how they get to the collector.

Whether a request is traced is its caller's decision (the sampled flag of the traceparent) or, without one, a
share of trace ids. A pass is the root of its own trace and is kept if it links to a request that is.

Spans wait in a bounded queue for a thread that sends them in batches over OTLP gRPC. A collector that is away
costs spans, never requests.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import (
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from service.telemetry.settings import TelemetrySettings

EXPORT_TIMEOUT_S = 5.0  # of one batch, retries included
FLUSH_S_MAX = 3.0  # a collector that is away holds up the end of the service no longer
SPANS_WAITING_MAX = 8192  # further ones are dropped, with a warning in the log
LINKS_MAX = 1024  # requests in a pass, passes of a request; the SDK keeps 128 by default


class LinkedOrShare(Sampler):
    """For spans without a parent: those that link to a sampled span, and a share of the others."""

    def __init__(self, share: float) -> None:
        self._share = TraceIdRatioBased(share)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        if any(link.context.trace_flags.sampled for link in links or ()):
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)
        return self._share.should_sample(parent_context, trace_id, name, kind, attributes, links)

    def get_description(self) -> str:
        return f"LinkedOr{{{self._share.get_description()}}}"


class Exporter:
    """Sends spans to the collector in batches, from a thread of its own."""

    def __init__(self, settings: TelemetrySettings, version: str) -> None:
        endpoint = settings.otlp_endpoint
        what = {"service.name": settings.service_name, "service.version": version}
        if settings.instance_id:
            what["service.instance.id"] = settings.instance_id
        self._exporter = OTLPSpanExporter(
            endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=EXPORT_TIMEOUT_S
        )
        self._provider = TracerProvider(
            sampler=ParentBased(LinkedOrShare(settings.sample_ratio)),
            resource=Resource.create(what),
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_links=LINKS_MAX),
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, max_queue_size=SPANS_WAITING_MAX)
        )
        self.tracer = self._provider.get_tracer("plaserve", version)

    def close(self) -> None:
        """Send what is left, within FLUSH_S_MAX."""
        give_up = threading.Timer(FLUSH_S_MAX, self._exporter.shutdown)
        give_up.daemon = True
        give_up.start()
        self._provider.shutdown()
        give_up.cancel()
        give_up.join()
