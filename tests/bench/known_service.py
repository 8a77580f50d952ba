"""A small gRPC service with known behaviour, for the tests of the clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from protos.plaserve.v1 import inference_pb2 as pb
from protos.plaserve.v1 import status_pb2 as status
from protos.plaserve.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from protos.plaserve.v1.status_pb2_grpc import StatusServiceServicer, add_StatusServiceServicer_to_server


@dataclass
class Behaviour:
    """`delay_s` before the first token, `gap_s` between tokens; `refuse` decides by arrival number."""

    delay_s: float = 0.0
    gap_s: float = 0.0
    refuse: Callable[[int], bool] = lambda _: False
    break_off: Callable[[int], bool] = lambda _: False
    miscount: int = 0  # this many completed requests go into the books as cancelled
    arrivals_s: list[float] = field(default_factory=list)
    books: dict[str, int] = field(
        default_factory=lambda: {"COMPLETED": 0, "REJECTED_CAPACITY": 0, "CANCELLED": 0}
    )


class KnownService(InferenceServiceServicer, StatusServiceServicer):
    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        number = len(self.behaviour.arrivals_s)
        self.behaviour.arrivals_s.append(asyncio.get_running_loop().time())
        if self.behaviour.refuse(number):
            self.behaviour.books["REJECTED_CAPACITY"] += 1
            await context.abort_with_status(rpc_status.to_status(refusal(0.25)))
        outcome = "CANCELLED"
        try:
            await asyncio.sleep(self.behaviour.delay_s)
            for token in range(request.max_tokens):
                if token:
                    await asyncio.sleep(self.behaviour.gap_s)
                if token == 2 and self.behaviour.break_off(number):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is gone")
                yield pb.GenerateResponse(token_ids=[token], text=f"{token} ")
            summary = pb.Summary(prompt_token_count=11, history_token_count=3, lane=pb.LANE_SHORT)
            yield pb.GenerateResponse(summary=summary)
            outcome = "COMPLETED"
            if self.behaviour.miscount:
                self.behaviour.miscount -= 1
                outcome = "CANCELLED"
        finally:
            self.behaviour.books[outcome] += 1

    async def GetStatus(  # noqa: N802
        self, request: status.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> status.GetStatusResponse:
        books = self.behaviour.books
        submitted = len(self.behaviour.arrivals_s)
        return status.GetStatusResponse(
            submitted_count=submitted, outcome_counts=books, running_count=submitted - sum(books.values())
        )


def refusal(retry_after_s: float) -> status_pb2.Status:
    """A full queue, as the service says it."""
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromMilliseconds(round(retry_after_s * 1e3))
    detail = any_pb2.Any()
    detail.Pack(info)
    return status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="the queue is full", details=[detail])


@asynccontextmanager
async def known_service(behaviour: Behaviour) -> AsyncIterator[str]:
    """Serve on a free loopback port; yields the address."""
    server = grpc.aio.server()
    service = KnownService(behaviour)
    add_InferenceServiceServicer_to_server(service, server)
    add_StatusServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)
