"""InferenceService and StatusService on top of the runtime."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.rpc import code_pb2

from protos.plaserve.v1 import inference_pb2 as pb
from protos.plaserve.v1 import status_pb2 as status_pb
from service.core.types import Outcome
from service.rpc.convert import Wishes, duration_of, summary_of, wishes_of
from service.rpc.errors import InvalidField, RequestError, explained, raise_unless_completed
from service.rpc.intake import Intake
from service.rpc.text import Detokenizer, StopFilter, TextCodec
from service.runtime.contract import Ended, RequestHandle, Runtime
from service.settings import LimitSettings

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
TraceHook = Callable[[str, Mapping[str, str]], None]  # request id, incoming metadata


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients may know of what is served."""

    name: str
    backend: str
    policy: str
    bundle_id: str
    version: str


class InferenceServicer:
    def __init__(
        self,
        runtime: Runtime,
        codec: TextCodec,
        intake: Intake,
        model: ServedModel,
        limits: LimitSettings,
        trace: TraceHook | None = None,
    ) -> None:
        self._runtime = runtime
        self._codec = codec
        self._intake = intake
        self._model = model
        self._limits = limits
        self._trace = trace

    async def generate(
        self, request: pb.GenerateRequest | None, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        async with explained(context):
            handle, wishes = await self._submit(request, "GenerateRequest", context)
            try:
                async for response in self._answer(handle, wishes):
                    yield response
            finally:
                self._let_go(handle)

    async def prefill(self, request: pb.PrefillRequest | None, context: Context) -> pb.PrefillResponse:
        async with explained(context):
            handle, _ = await self._submit(request, "PrefillRequest", context)
            token_id = 0
            try:
                async for item in handle:
                    if isinstance(item, Ended):
                        raise_unless_completed(item.record)
                    else:
                        token_id = item.token_id
            finally:
                self._let_go(handle)
            text = "" if token_id == self._codec.eos_id else self._codec.decode([token_id])
            return pb.PrefillResponse(
                first_token_id=token_id,
                text=text,
                summary=summary_of(handle.record),
                pass_duration=duration_of(handle.record.first_pass_s),
            )
        raise AssertionError("explained ends the call")

    async def _answer(self, handle: RequestHandle, wishes: Wishes) -> AsyncIterator[pb.GenerateResponse]:
        """One message a token, whole characters only, and the summary. Raises RequestError."""
        text, stop = Detokenizer(self._codec), StopFilter(wishes.stops)
        async for item in handle:
            if isinstance(item, Ended):
                raise_unless_completed(item.record)
                rest = stop.add(text.rest(), last=True)
                yield pb.GenerateResponse(text=rest, summary=summary_of(item.record))
            elif not stop.hit():  # after it only tokens come that were on their way
                shown = "" if item.token_id == self._codec.eos_id else text.add(item.token_id)
                shown = stop.add(shown)
                if stop.hit():
                    handle.cancel(finished=True)
                yield pb.GenerateResponse(token_ids=[item.token_id], text=shown)

    async def _submit(
        self, request: pb.GenerateRequest | pb.PrefillRequest | None, message: str, context: Context
    ) -> tuple[RequestHandle, Wishes]:
        """Check, tokenise and queue. Raises RequestError."""
        arrival_s = asyncio.get_running_loop().time()
        left_s = context.time_remaining()
        deadline_s = None if left_s is None else arrival_s + left_s
        if request is None:
            raise InvalidField("message", f"these bytes are no plaserve.v1.{message}; check the schema")
        if deadline_s is not None and deadline_s <= arrival_s:
            raise RequestError(
                code_pb2.DEADLINE_EXCEEDED,
                "the deadline is in the past; send a later one",
                Outcome.DEADLINE_EXCEEDED.value,
            )
        wishes = wishes_of(request, self._model.name, self._limits)
        core_request, engine_request = await self._intake.prepare(wishes, arrival_s, deadline_s)
        if self._trace is not None:
            metadata = {
                key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)
            }
            self._trace(wishes.request_id, metadata)
        try:
            return self._runtime.submit(core_request, engine_request), wishes
        except ValueError as error:
            raise RequestError(
                code_pb2.ALREADY_EXISTS,
                f"request_id: {error}; use another id",
                "REQUEST_ID_IN_USE",
                "request_id",
            ) from error

    def _let_go(self, handle: RequestHandle) -> None:
        """The call is over. If the request is not, the client left: cancel, unless its deadline passed,
        which the scheduler sees by itself and books as such."""
        record = handle.record
        deadline_s = record.request.deadline_s
        late = deadline_s is not None and asyncio.get_running_loop().time() >= deadline_s
        if record.outcome is None and not late:
            handle.cancel()


class StatusServicer:
    """start_s: since when the runtime is up, on the event loop's clock; None: since now."""

    def __init__(self, runtime: Runtime, model: ServedModel, start_s: float | None = None) -> None:
        self._runtime = runtime
        self._model = model
        self._start_s = asyncio.get_running_loop().time() if start_s is None else start_s

    async def get_status(
        self, request: status_pb.GetStatusRequest | None, context: Context
    ) -> status_pb.GetStatusResponse:
        snapshot, model = self._runtime.snapshot(), self._model
        return status_pb.GetStatusResponse(
            version=model.version,
            model=model.name,
            backend=model.backend,
            policy=model.policy,
            bundle_id=model.bundle_id,
            uptime_duration=duration_of(asyncio.get_running_loop().time() - self._start_s),
            draining=snapshot.draining,
            submitted_count=snapshot.submitted,
            outcome_counts={outcome.value: n for outcome, n in snapshot.outcomes.items()},
            queued_count=snapshot.queued,
            running_count=snapshot.running,
            lanes=[
                status_pb.LaneStatus(
                    lane=lane.value, queued_count=n, queued_token_count=snapshot.lane_queued_tokens[lane]
                )
                for lane, n in snapshot.lane_queued.items()
            ],
            instances=[
                status_pb.InstanceStatus(
                    instance_id=i.instance_id,
                    state=i.state,
                    pass_count=i.stats.passes_done,
                    decoding_count=i.decoding,
                    kv_blocks_total=i.stats.kv_blocks_total,
                    kv_blocks_free=i.stats.kv_blocks_free,
                    kv_blocks_cached=i.stats.kv_blocks_cached,
                )
                for i in snapshot.instances
            ],
            window_duration=duration_of(snapshot.window_s),
            depth_tokens=snapshot.depth_tokens,
            boundary_tokens=snapshot.boundary_tokens,
            knee_tokens=snapshot.knee_tokens,
        )
