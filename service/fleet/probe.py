"""Health on a plain port of its own: probes of Kubernetes speak no TLS, the links of a fleet nothing else.

The answer comes from the event loop that does the work, so a process whose loop is stuck does not answer; and
`works` says whether what the process is there for goes on: for a worker, that no pass hangs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

log = logging.getLogger(__name__)


class HealthPort(health_pb2_grpc.HealthServicer):
    """grpc.health.v1.Health with one service, the whole process (""). It tells no more than that."""

    def __init__(self, works: Callable[[], bool]) -> None:
        self._works = works
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        health_pb2_grpc.add_HealthServicer_to_server(self, self._server)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError naming the setting where that can't be had."""
        try:
            bound: int = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise OSError(f"fleet.health_port: can't listen on {host}:{port}; choose another port") from error
        await self._server.start()
        return bound

    async def stop(self) -> None:
        await self._server.stop(None)

    async def Check(  # noqa: N802 - the name is gRPC's
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.HealthCheckResponse:
        if request.service:
            await context.abort(grpc.StatusCode.NOT_FOUND, 'service: ask for "", the process as a whole')
        status = pb.HealthCheckResponse
        return status(status=status.SERVING if self._works() else status.NOT_SERVING)
