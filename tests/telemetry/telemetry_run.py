"""A real pump with the simulated model, watched by telemetry, and what came out of it."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent import futures
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from zlib import crc32

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from engines.blocks import chain_hashes
from engines.simulated import SimulatedModel
from engines.simulated_settings import Behaviour, Setting, small_cpu_like
from engines.types import EngineRequest
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Request
from service.policies import make_scheduler
from service.runtime.contract import Ended, RequestRecord
from service.runtime.pump import Handle, Pump
from service.runtime.worker import LocalWorker, TimedRunner
from service.telemetry import Telemetry, TelemetrySettings

MODEL = "simulated-135m"
BACKEND = "simulated"
TIME_SCALE = 0.02
QUIET = TelemetrySettings(enabled=False)

Labels = frozenset[tuple[str, str]]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP receiver that keeps what it gets."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.resource: dict[str, str] = {}
        self.spans: list[Span] = []

    def Export(self, request, context):  # noqa: N802 - the name in the proto
        for group in request.resource_spans:
            self.resource = {pair.key: pair.value.string_value for pair in group.resource.attributes}
            for scope in group.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def of_request(self, request_id: str) -> dict[str, Span]:
        """The spans of one request, by name."""
        root = next(s for s in self.named("request") if attributes(s)["plaserve.request_id"] == request_id)
        children = [span for span in self.spans if span.parent_span_id == root.span_id]
        return {span.name: span for span in (root, *children)}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def attributes(span: Span) -> dict[str, object]:
    plain = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        plain[pair.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return plain


def links(span: Span) -> set[bytes]:
    """The ids of the spans that it links to."""
    return {link.span_id for link in span.links}


@dataclass
class Watched:
    """A running service. `records` holds every request that was submitted."""

    telemetry: Telemetry
    pump: Pump
    block_tokens: int
    records: list[RequestRecord] = field(default_factory=list)

    def submit(
        self,
        request_id: str,
        prompt_tokens: int,
        max_new_tokens: int = 4,
        metadata: Mapping[str, str] | None = None,
        **wishes: object,
    ) -> Handle:
        """As the front end does: the trace context first. Prompts share no prefix unless of equal ids."""
        ids = tuple((crc32(request_id.encode()) + position) % 49_000 for position in range(prompt_tokens))
        arrival_s = asyncio.get_running_loop().time()
        request = Request(
            request_id,
            prompt_tokens,
            max_new_tokens,
            arrival_s,
            chain_hashes(ids, self.block_tokens),
            **wishes,
        )
        self.telemetry.request_context(request_id, metadata or {})
        handle = self.pump.submit(request, EngineRequest(request_id, ids, max_new_tokens))
        self.records.append(handle.record)
        return handle

    async def scrape(self) -> Scrape:
        return await asyncio.to_thread(scrape, self.telemetry.metrics_port)


@asynccontextmanager
async def watched(
    settings: TelemetrySettings,
    scheduler: SchedulerSettings | None = None,
    behaviour: Behaviour | None = None,
    *,
    setting: Setting | None = None,
    make_model: Callable[..., SimulatedModel] = SimulatedModel,
) -> AsyncIterator[Watched]:
    capabilities, profiles, cost = setting or small_cpu_like()
    telemetry = Telemetry(settings)
    telemetry.start()
    telemetry.serves(MODEL, BACKEND, profiles.t_classes)
    try:
        model = make_model(capabilities, profiles, cost, behaviour)
        spec = InstanceSpec("i0", capabilities, profiles, cost.scaled(TIME_SCALE))
        worker = LocalWorker(spec, TimedRunner(model, TIME_SCALE))
        policy = make_scheduler("plaserve", scheduler or SchedulerSettings())
        pump = Pump(policy, [worker], telemetry.observers)
        await pump.start()
        telemetry.bind(pump.snapshot)
        try:
            yield Watched(telemetry, pump, capabilities.block_tokens)
        finally:
            await pump.close()
    finally:
        telemetry.shutdown()


async def finish(*handles: Handle) -> None:
    """Read every answer to its end."""
    await asyncio.gather(*(_read(handle) for handle in handles))


async def _read(handle: Handle) -> None:
    async for item in handle:
        if isinstance(item, Ended):
            return


@dataclass(frozen=True)
class Scrape:
    """Samples by (name, labels)."""

    samples: dict[tuple[str, Labels], float]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum over all samples of `name` with these labels; KeyError where there is none."""
        wanted = set(labels.items())
        found = [value for (known, has), value in self.samples.items() if known == name and wanted <= has]
        if not found:
            raise KeyError(f"{name} {labels}")
        return sum(found)

    def by(self, name: str, label: str) -> Counter[str]:
        counts: Counter[str] = Counter()
        for (known, has), value in self.samples.items():
            if known == name:
                counts[dict(has)[label]] += int(value)
        return counts


def scrape(port: int) -> Scrape:
    """What Prometheus would get; blocks."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name, frozenset(sample.labels.items())] = sample.value
    return Scrape(samples)
