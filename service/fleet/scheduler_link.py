"""The stream from a front end to the active scheduler of its shard.

`connect` finds out where that is (`locate`: from membership, or fixed), opens the stream and waits for the
welcome. A standby says that it is one, and the search goes on. Attempts back off up to a second, with jitter,
so that a thousand front ends don't come at once. What is sent waits in a bounded queue; a scheduler that
takes nothing for that long is a link that is down.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from engines.types import Capabilities
from protos.plaserve.v1 import scheduler_pb2 as pb
from service.fleet.requests_convert import BadMessage, capabilities_of

METHOD = "/plaserve.v1.SchedulerService/Requests"
QUEUE_MAX = 16_384
BACKOFF_S, BACKOFF_S_MAX = 0.05, 1.0
WELCOME_S = 5.0


class LinkDown(Exception):  # noqa: N818 - what happened
    """There is no stream to the scheduler any more; the message says why."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a scheduler says of itself."""

    scheduler_id: str
    epoch: int
    model: str
    backend: str
    policy: str
    bundle_id: str
    capabilities: Capabilities


class SchedulerLink(Protocol):
    """One stream at a time. Iterating yields what the scheduler says, until it raises LinkDown."""

    async def connect(self, front_end_id: str) -> Welcome:
        """Wait until there is an active scheduler, however long that takes."""

    def send(self, message: pb.FrontEndMessage) -> None:
        """In order, never blocking. Lost where the link is down, which the iterator says."""

    def __aiter__(self) -> AsyncIterator[pb.SchedulerMessage]: ...

    def cut(self) -> None:
        """Break the present stream, which the iterator says."""

    async def drop(self) -> None:
        """End the present stream."""

    async def close(self) -> None: ...


Locate = Callable[[], Awaitable[str | None]]  # address of the scheduler that is thought to be active


class GrpcSchedulerLink:
    """open_channel: makes a channel to an address, plain or with TLS (service/rpc/tls.py)."""

    def __init__(
        self, locate: Locate, open_channel: Callable[[str], grpc.aio.Channel], *, seed: int | None = None
    ) -> None:
        self._locate = locate
        self._open_channel = open_channel
        self._jitter = random.Random(seed)
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None
        self._out: asyncio.Queue[pb.FrontEndMessage] = asyncio.Queue(QUEUE_MAX)
        self._sender: asyncio.Task[None] | None = None

    async def connect(self, front_end_id: str) -> Welcome:
        backoff_s = BACKOFF_S
        while True:
            await self.drop()
            address = await self._locate()
            if address is not None:
                try:
                    async with asyncio.timeout(WELCOME_S):
                        welcome = await self._open(address, front_end_id)
                    if welcome is not None:
                        return welcome
                except (grpc.aio.AioRpcError, BadMessage, TimeoutError):
                    pass  # not there, or not one of ours: look again
            await asyncio.sleep(backoff_s * self._jitter.uniform(0.5, 1.0))
            backoff_s = min(BACKOFF_S_MAX, 2 * backoff_s)

    def send(self, message: pb.FrontEndMessage) -> None:
        try:
            self._out.put_nowait(message)
        except asyncio.QueueFull:
            self.cut()

    def cut(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[pb.SchedulerMessage]:
        call = self._call
        if call is None:
            raise LinkDown("it was never up")
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                yield message
        except grpc.aio.AioRpcError as error:
            raise LinkDown(f"{error.code().name}: {error.details()}") from None
        except asyncio.CancelledError:
            if call.cancelled() and not _cancelling():
                raise LinkDown("it takes nothing, or another one leads") from None
            raise

    async def drop(self) -> None:
        sender, self._sender = self._sender, None
        call, self._call = self._call, None
        channel, self._channel = self._channel, None
        if sender is not None:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
        if call is not None:
            call.cancel()
        if channel is not None:
            await channel.close()
        self._out = asyncio.Queue(QUEUE_MAX)

    async def close(self) -> None:
        await self.drop()

    async def _open(self, address: str, front_end_id: str) -> Welcome | None:
        """None: a standby. Raises AioRpcError, BadMessage."""
        self._channel = self._open_channel(address)
        self._call = self._channel.stream_stream(
            METHOD,
            request_serializer=pb.FrontEndMessage.SerializeToString,
            response_deserializer=pb.SchedulerMessage.FromString,
        )()
        self.send(pb.FrontEndMessage(hello=pb.FrontEndHello(front_end_id=front_end_id)))
        self._sender = asyncio.create_task(self._send_all(self._call, self._out))
        message = await self._call.read()
        if message is grpc.aio.EOF or message.WhichOneof("kind") != "welcome":
            raise BadMessage("welcome: the first message is none")
        said = message.welcome
        if not said.active:
            return None
        return Welcome(
            said.scheduler_id,
            message.epoch,
            said.model,
            said.backend,
            said.policy,
            said.bundle_id,
            capabilities_of(said.capabilities_json),
        )

    async def _send_all(self, call: Any, out: asyncio.Queue[pb.FrontEndMessage]) -> None:
        try:
            while True:
                await call.write(await out.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader hears why


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
