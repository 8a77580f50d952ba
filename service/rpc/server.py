"""The gRPC server: services, health, reflection, and messages that are no messages.

Handlers are registered by hand because the generated registration parses strictly: bytes that are no message
would end as INTERNAL inside gRPC. Here a failed parse reaches the servicer as None, which answers with
INVALID_ARGUMENT like any other bad input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from protos.plaserve.v1 import inference_pb2 as pb
from protos.plaserve.v1 import status_pb2 as status_pb
from service.rpc.inference import InferenceServicer, StatusServicer
from service.settings import ServerSettings

INFERENCE = "plaserve.v1.InferenceService"
STATUS = "plaserve.v1.StatusService"

M = TypeVar("M", bound=Message)


class RpcServer:
    """Listens once `start` returns; `port` is then the real one."""

    def __init__(
        self, settings: ServerSettings, inference: InferenceServicer, status: StatusServicer
    ) -> None:
        self._address = f"{settings.host}:{settings.port}"
        self.port = 0
        self._health = HealthServicer()
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=settings.calls_max,
            options=(
                ("grpc.max_receive_message_length", settings.message_bytes_max),
                ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a silent sharing
            ),
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    INFERENCE,
                    {
                        "Generate": grpc.unary_stream_rpc_method_handler(
                            inference.generate, _lenient(pb.GenerateRequest), _bytes
                        ),
                        "Prefill": grpc.unary_unary_rpc_method_handler(
                            inference.prefill, _lenient(pb.PrefillRequest), _bytes
                        ),
                    },
                ),
                grpc.method_handlers_generic_handler(
                    STATUS,
                    {
                        "GetStatus": grpc.unary_unary_rpc_method_handler(
                            status.get_status, _lenient(status_pb.GetStatusRequest), _bytes
                        )
                    },
                ),
            )
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (INFERENCE, STATUS, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)

    async def start(self) -> None:
        """Raises OSError where the address can't be had."""
        try:
            self.port = self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            message = (
                f"server.port: can't listen on {self._address}; choose another port, or 0 for a free one"
            )
            raise OSError(message) from error
        await self._server.start()
        for name in ("", INFERENCE, STATUS):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def not_serving(self) -> None:
        """Health checks fail from here on, so that no new work is sent; what runs goes on."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)


def _lenient(message: type[M]) -> Callable[[bytes], M | None]:
    def parse(data: bytes) -> M | None:
        try:
            return message.FromString(data)
        except DecodeError:
            return None

    return parse


def _bytes(message: Message) -> bytes:
    return message.SerializeToString()
