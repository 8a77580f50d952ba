"""The port of a scheduler process: its reign while it leads, a standby's answer while it does not.

Front ends look for the active one by asking; a standby says so and ends the stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from protos.plaserve.v1 import scheduler_pb2 as pb
from service.fleet.reign import Reign
from service.fleet.scheduler_service import SchedulerServicer, lenient_front_end

SERVICE = "plaserve.v1.SchedulerService"
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

    def _servicer(self) -> SchedulerServicer | None:
        servicer = self.reign.servicer if self.reign is not None else None
        return servicer if servicer is not None and servicer.active else None
