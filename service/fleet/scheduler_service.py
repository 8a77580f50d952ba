"""SchedulerService: a runtime in this process, offered to front ends over gRPC.

Each front end has one stream. What it submits on it becomes a request of the runtime; what becomes of that
goes back: accepted, where it was placed, and how it ended. Tokens are relayed only where the engine is in
this process (`relay`); else they go from worker to front end, and their number in the last message says when
all are there.

A stream that ends takes its requests with it: nobody is there to read them. Messages to a front end wait in a
bounded queue; one that does not read is cut off, so that it can't fill this process.

Wire ids are unique over all front ends, which make them so; an id that is still live ends the stream that
sends it again, because the two would not know whose tokens are whose.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from engines.types import Capabilities, Pass, PassResult
from protos.plaserve.v1 import scheduler_pb2 as pb
from service.core.types import Dispatch, Outcome, Reason
from service.fleet.load import LoadReport
from service.fleet.requests_convert import (
    BadMessage,
    accepted_of,
    capabilities_json,
    ended_of,
    requests_of,
)
from service.runtime.contract import Ended, RequestHandle, RequestRecord, Runtime

log = logging.getLogger(__name__)

MESSAGES_MAX = 65_536  # to one front end: some seconds of tokens of a whole shard
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class SchedulerIdentity:
    """What a front end may know. epoch: of this scheduler's leadership; later ones are larger."""

    scheduler_id: str
    epoch: int
    model: str
    backend: str
    policy: str
    bundle_id: str
    capabilities: Capabilities


@dataclass(slots=True)
class _FrontEnd:
    """One stream. lagging: it did not read, and is being cut off."""

    name: str
    out: asyncio.Queue[pb.SchedulerMessage]
    handles: dict[str, RequestHandle] = field(default_factory=dict)
    readers: set[asyncio.Task[None]] = field(default_factory=set)
    lagging: bool = False


class SchedulerServicer:
    """The servicer of `SchedulerService`, and an observer of the runtime (it must hear of dispatches)."""

    def __init__(
        self,
        runtime: Runtime,
        identity: SchedulerIdentity,
        *,
        relay: bool,
        load: LoadReport | None = None,
        called: Callable[[str, Mapping[str, str]], None] | None = None,
    ) -> None:
        self._runtime = runtime
        self._load = load
        self._called = called
        self.identity = identity
        self._relay = relay
        self._owner: dict[str, _FrontEnd] = {}  # wire id -> whose
        self._placed: dict[str, str] = {}  # wire id -> instance
        self.active = True  # False: new streams are told to look for another scheduler
        self.retired = False  # True: new requests are sent away; those that are here go on
        self._over = asyncio.Event()

    @property
    def front_ends(self) -> int:
        """Streams with live requests."""
        return len({id(owner) for owner in self._owner.values()})

    def step_down(self) -> None:
        """End every stream: front ends take what nobody has seen a token of to the next scheduler."""
        self.active = False
        self._over.set()

    # --- gRPC ---

    @property
    def handlers(self) -> grpc.GenericRpcHandler:
        """To be registered with a server. Bytes that are no message reach `requests` as None."""
        method = grpc.stream_stream_rpc_method_handler(
            self.requests, lenient_front_end, pb.SchedulerMessage.SerializeToString
        )
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Requests": method}
        if self._load is not None:
            methods["GetLoad"] = grpc.unary_unary_rpc_method_handler(
                self.get_load, pb.GetLoadRequest.FromString, pb.GetLoadResponse.SerializeToString
            )
        return grpc.method_handlers_generic_handler("plaserve.v1.SchedulerService", methods)

    async def get_load(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        assert self._load is not None
        self._load.active = self.active
        return self._load.look(request.observer_id)

    async def requests(
        self, messages: AsyncIterator[pb.FrontEndMessage | None], context: Context
    ) -> AsyncIterator[pb.SchedulerMessage]:
        front_end = _FrontEnd("", asyncio.Queue(MESSAGES_MAX))
        self._say(front_end, welcome=self._welcome())
        reading = asyncio.create_task(self._read(front_end, messages))
        try:
            while True:
                message = await self._next(front_end, reading)
                if message is None:
                    break
                yield message
            await self._explain(front_end, reading, context)
        finally:
            reading.cancel()
            self._gone(front_end)

    async def _next(self, front_end: _FrontEnd, reading: asyncio.Task[None]) -> pb.SchedulerMessage | None:
        """The next message to it; None when its side of the stream has ended, it lags, or all is over."""
        if not front_end.out.empty():
            return None if front_end.lagging or self._over.is_set() else front_end.out.get_nowait()
        waiting = asyncio.ensure_future(front_end.out.get())
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait({waiting, over, reading}, return_when=asyncio.FIRST_COMPLETED)
            return waiting.result() if waiting.done() and not over.done() else None
        finally:
            waiting.cancel()
            over.cancel()

    async def _explain(self, front_end: _FrontEnd, reading: asyncio.Task[None], context: Context) -> None:
        """End the stream with what was wrong with it, if anything was."""
        if front_end.lagging:
            text = f"front end {front_end.name} left {MESSAGES_MAX} messages unread"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        error = reading.exception() if reading.done() and not reading.cancelled() else None
        if isinstance(error, BadMessage):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if error is not None:
            raise error

    async def _read(self, front_end: _FrontEnd, messages: AsyncIterator[pb.FrontEndMessage | None]) -> None:
        """Take what it says. Raises BadMessage."""
        async for message in messages:
            if message is None or not message.ByteSize():
                raise BadMessage(
                    "kind: these bytes are no plaserve.v1.FrontEndMessage; is it of this release?"
                )
            kind = message.WhichOneof("kind")
            if kind is None:
                log.warning("front end %s says what is not known here; it is ignored", front_end.name)
            elif kind == "hello":
                front_end.name = message.hello.front_end_id
            elif not front_end.name:
                raise BadMessage("hello: must come first")
            elif kind == "submit":
                self._submit(front_end, message.submit)
            else:
                handle = front_end.handles.get(message.cancel.request_id)
                if handle is not None:
                    handle.cancel(finished=message.cancel.finished)

    # --- requests ---

    def _submit(self, front_end: _FrontEnd, submit: pb.SubmitRequest) -> None:
        request, engine_request = requests_of(submit, asyncio.get_running_loop().time())
        wire_id = request.request_id
        if wire_id in self._owner:
            raise BadMessage(f"request_id: {wire_id} is still live; use an id once")
        if self.retired:
            self._say(front_end, ended=_sent_away(wire_id))
            return
        self._owner[wire_id] = front_end
        try:
            if self._called is not None:
                self._called(wire_id, submit.trace_context)
            handle = self._runtime.submit(request, engine_request)
        except ValueError as error:
            del self._owner[wire_id]
            raise BadMessage(f"request_id: {error}") from None
        front_end.handles[wire_id] = handle
        self._say(front_end, accepted=accepted_of(handle.record))
        reader = asyncio.create_task(self._follow(front_end, wire_id, handle))
        front_end.readers.add(reader)
        reader.add_done_callback(front_end.readers.discard)

    async def _follow(self, front_end: _FrontEnd, wire_id: str, handle: RequestHandle) -> None:
        index = 0
        async for item in handle:
            if isinstance(item, Ended):
                self._forget(wire_id)
                front_end.handles.pop(wire_id, None)
                self._say(front_end, ended=ended_of(item.record))
            else:
                if self._relay:
                    tokens = pb.RequestTokens(
                        request_id=wire_id, first_index=index, token_ids=[item.token_id]
                    )
                    self._say(front_end, tokens=tokens)
                index += 1

    def _gone(self, front_end: _FrontEnd) -> None:
        """Its stream is over: its requests are cancelled, and read to their end by nobody but us."""
        for wire_id, handle in list(front_end.handles.items()):
            self._forget(wire_id)
            handle.cancel()
        front_end.handles.clear()
        for reader in front_end.readers:
            reader.cancel()

    def _forget(self, wire_id: str) -> None:
        self._owner.pop(wire_id, None)
        self._placed.pop(wire_id, None)

    def _welcome(self) -> pb.SchedulerWelcome:
        identity = self.identity
        return pb.SchedulerWelcome(
            scheduler_id=identity.scheduler_id,
            model=identity.model,
            backend=identity.backend,
            policy=identity.policy,
            bundle_id=identity.bundle_id,
            capabilities_json=capabilities_json(identity.capabilities),
            active=self.active,
        )

    def _say(self, front_end: _FrontEnd, **kind: Any) -> None:
        try:
            front_end.out.put_nowait(pb.SchedulerMessage(epoch=self.identity.epoch, **kind))
        except asyncio.QueueFull:
            if not front_end.lagging:
                log.warning("front end %s does not read; it is cut off", front_end.name)
            front_end.lagging = True

    # --- service.runtime.contract.Observer: where requests are placed ---

    def submitted(self, record: RequestRecord) -> None: ...

    def dispatched(self, command: Dispatch, now_s: float) -> None:
        for item in command.pass_.items:
            owner = self._owner.get(item.request_id)
            if owner is not None and self._placed.get(item.request_id) != command.instance_id:
                self._placed[item.request_id] = command.instance_id
                placed = pb.RequestPlaced(request_id=item.request_id, instance_id=command.instance_id)
                self._say(owner, placed=placed)

    def pass_finished(self, pass_: Pass, result: PassResult, start_s: float, end_s: float) -> None: ...

    def pass_lost(self, pass_: Pass, reason: Reason, detail: str, start_s: float, end_s: float) -> None: ...

    def ended(self, record: RequestRecord) -> None: ...


def _sent_away(wire_id: str) -> pb.RequestEnded:
    """To a front end that does not know yet. It asks another shard."""
    ended = pb.RequestEnded(
        request_id=wire_id,
        outcome=Outcome.REJECTED_DRAINING.value,
        reason=Reason.DRAINING.value,
        detail="the shard is retired",
    )
    ended.retry_after.FromSeconds(1)
    return ended


def lenient_front_end(data: bytes) -> pb.FrontEndMessage | None:
    try:
        return pb.FrontEndMessage.FromString(data)
    except DecodeError:
        return None
