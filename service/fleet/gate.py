"""The port of a scheduler process: its reign while it leads, a standby's answer while it does not.

Front ends look for the active one by asking; a standby says so and ends the stream. Operators get its status,
which is of the present reign: counts begin with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib import metadata
from typing import Any

import grpc
import grpc.aio

from protos.plaserve.v1 import scheduler_pb2 as pb
from protos.plaserve.v1 import status_pb2
from service.fleet.reign import Reign
from service.fleet.scheduler_service import SchedulerServicer, lenient_front_end
from service.rpc.inference import ServedModel, StatusServicer

SERVICE = "plaserve.v1.SchedulerService"
STATUS = "plaserve.v1.StatusService"
Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerGate:
    """reign: the present one, None for a standby."""

    def __init__(self, scheduler_id: str) -> None:
        self._scheduler_id = scheduler_id
        self.reign: Reign | None = None

    @property
    def handlers(self) -> grpc.GenericRpcHandler:
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Requests": grpc.stream_stream_rpc_method_handler(
                self.requests, lenient_front_end, pb.SchedulerMessage.SerializeToString
            ),
            "GetLoad": grpc.unary_unary_rpc_method_handler(
                self.get_load, pb.GetLoadRequest.FromString, pb.GetLoadResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    @property
    def status_handlers(self) -> grpc.GenericRpcHandler:
        method = grpc.unary_unary_rpc_method_handler(
            self.get_status,
            status_pb2.GetStatusRequest.FromString,
            status_pb2.GetStatusResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(STATUS, {"GetStatus": method})

    async def requests(
        self, messages: AsyncIterator[pb.FrontEndMessage | None], context: Context
    ) -> AsyncIterator[pb.SchedulerMessage]:
        servicer = self._servicer()
        if servicer is None:
            standby = pb.SchedulerWelcome(scheduler_id=self._scheduler_id, active=False)
            yield pb.SchedulerMessage(welcome=standby)
            return
        async for message in servicer.requests(messages, context):
            yield message

    async def get_load(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        servicer = self._servicer()
        if servicer is None:
            return pb.GetLoadResponse(active=False)
        return await servicer.get_load(request, context)

    async def get_status(
        self, request: status_pb2.GetStatusRequest, context: Context
    ) -> status_pb2.GetStatusResponse:
        reign, servicer = self.reign, self._servicer()
        if reign is None or servicer is None:
            text = f"{self._scheduler_id} is a standby; ask the active scheduler of the shard"
            await context.abort(grpc.StatusCode.UNAVAILABLE, text)
            raise AssertionError("abort raises")
        identity = servicer.identity
        model = ServedModel(
            identity.model,
            identity.backend,
            identity.policy,
            identity.bundle_id,
            metadata.version("plaserve"),
        )
        status = StatusServicer(reign.pump, model, reign.start_s)
        return await status.get_status(request, context)

    def _servicer(self) -> SchedulerServicer | None:
        servicer = self.reign.servicer if self.reign is not None else None
        return servicer if servicer is not None and servicer.active else None
