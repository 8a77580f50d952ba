"""What telemetry is told at construction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """Metrics are pulled from an HTTP endpoint; traces are pushed to a collector.

    enabled: keep and serve metrics. Traces have their own switch, `otlp_endpoint`.
    otlp_endpoint: OTLP gRPC collector, `host:port` (plain text) or `https://host:port`; empty: no traces.
    sample_ratio: share of requests traced, where the caller's traceparent does not decide.
    service_name: `service.name` of the traces. instance_id: `service.instance.id`, where it is set.
    metrics_host, metrics_port: where metrics are served; loopback, as there is no authentication. Port 0
        picks a free one.
    """

    enabled: bool = True
    otlp_endpoint: str = ""
    sample_ratio: float = 1.0
    service_name: str = "plaserve"
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9464
    instance_id: str = ""

    def __post_init__(self) -> None:
        if not 0.0 <= self.sample_ratio <= 1.0:
            raise ValueError(f"sample_ratio must be from 0 to 1, got {self.sample_ratio}")
        if not 0 <= self.metrics_port <= 65535:
            raise ValueError(f"metrics_port must be from 0 to 65535, got {self.metrics_port}")
        if not self.service_name:
            raise ValueError("service_name is empty: name the service as it should appear in traces")
