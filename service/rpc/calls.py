"""How calls of clients end, told to whoever counts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

import grpc
import grpc.aio

from protos.plaserve.v1 import inference_pb2 as pb
from service.rpc.inference import Context, InferenceServicer

_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


class CallObserver(Protocol):
    """Called on the loop. code: the name of a gRPC status."""

    def began(self, method: str) -> None: ...

    def ended(self, method: str, code: str) -> None: ...


class CountedInference(InferenceServicer):
    """The same service, whose calls are told to `calls`."""

    def __init__(self, calls: CallObserver, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._calls = calls

    async def generate(
        self, request: pb.GenerateRequest | None, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        with _counted(self._calls, "Generate", context):
            async with aclosing(super().generate(request, context)) as answers:  # type: ignore[type-var]
                async for answer in answers:
                    yield answer

    async def prefill(self, request: pb.PrefillRequest | None, context: Context) -> pb.PrefillResponse:
        with _counted(self._calls, "Prefill", context):
            return await super().prefill(request, context)


@contextmanager
def _counted(observer: CallObserver, method: str, context: Context) -> Iterator[None]:
    """Around all that a call does, what ends it with a status included."""
    observer.began(method)
    code = grpc.StatusCode.UNKNOWN
    try:
        yield
        code = grpc.StatusCode.OK
    except (asyncio.CancelledError, GeneratorExit):
        left_s = context.time_remaining()
        late = left_s is not None and left_s <= 0.0
        code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
        raise
    finally:
        number = _number(context)
        observer.ended(method, _NAMES[number] if number else code.name)


def _number(context: Context) -> int:
    """Of the status that the call was ended with; 0: of none, or OK."""
    code = context.code()
    return code.value[0] if isinstance(code, grpc.StatusCode) else code or 0
