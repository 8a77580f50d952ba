"""Metrics and traces of the service: observers of the runtime, their names, and where they go.

May import the runtime's contract, core and engine types; prometheus_client and OpenTelemetry only in the
modules that a running service with them switched on loads.
"""

from service.telemetry.fleet import FleetTelemetry, FrontEndTelemetry
from service.telemetry.settings import TelemetrySettings
from service.telemetry.telemetry import Telemetry

__all__ = ["FleetTelemetry", "FrontEndTelemetry", "Telemetry", "TelemetrySettings"]
