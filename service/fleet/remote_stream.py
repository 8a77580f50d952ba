"""The scheduler's end of one control stream: gRPC's reading and writing, and what counts as broken."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from protos.plaserve.v1 import worker_pb2 as pb
from service.fleet.convert import BadMessage
from service.fleet.link import SERVICE, as_bytes, lenient

_FINAL = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


class Broken(Exception):  # noqa: N818 - what happened
    """The stream ended or fell silent; another one may do better."""


class Refused(Exception):  # noqa: N818 - what happened
    """The worker wants none of this, and will not want the next one either."""


class ControlStream:
    """Opened on entry, closed with its channel on exit."""

    def __init__(self, channel: grpc.aio.Channel, silence_s: float) -> None:
        self._channel = channel
        self._silence_s = silence_s
        self._queue: asyncio.Queue[pb.ControlRequest | None] = asyncio.Queue()  # bounded by the outbox
        self._call: Any = None
        self._writing: asyncio.Task[None] | None = None
        self._owed: tuple[int, float] = (-1, 0.0)  # last message acknowledged, and since when none more

    async def __aenter__(self) -> ControlStream:
        method = self._channel.stream_stream(
            f"/{SERVICE}/Control",
            request_serializer=as_bytes,
            response_deserializer=lenient(pb.ControlResponse),
        )
        self._call = method()
        self._writing = asyncio.create_task(self._write())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._writing is not None
        self._writing.cancel()
        self._call.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)
        await self._channel.close()

    def put(self, message: pb.ControlRequest) -> None:
        self._queue.put_nowait(message)

    def end(self) -> None:
        """Let a pending `read` raise Broken."""
        self._call.cancel()

    async def read(self) -> pb.ControlResponse:
        """The next message. Raises Broken, Refused, BadMessage."""
        try:
            async with asyncio.timeout(self._silence_s):
                message = await self._call.read()
        except TimeoutError:
            raise Broken(f"silent for {self._silence_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise _why(error.code(), error.details()) from error
        except asyncio.CancelledError:
            if self._call.cancelled() and not _cancelling():
                raise Broken("ended here") from None
            raise
        if message is grpc.aio.EOF:
            raise _why(await self._call.code(), await self._call.details())
        if message is None:
            raise BadMessage("ControlResponse: these bytes are none")
        return message  # type: ignore[no-any-return]

    def owes(self, kept: int, last: int) -> None:
        """The worker has not acknowledged the last `kept` of `last` messages. Raises Broken after a while."""
        acknowledged, now_s = last - kept, asyncio.get_running_loop().time()
        if kept == 0 or acknowledged != self._owed[0]:
            self._owed = (acknowledged, now_s)
        elif now_s - self._owed[1] > self._silence_s:
            raise Broken(f"{kept} messages are not acknowledged after {self._silence_s:g} s")

    async def _write(self) -> None:
        while (message := await self._queue.get()) is not None:
            await self._call.write(message)


def _why(code: grpc.StatusCode, details: str | None) -> Exception:
    text = f"{code.name}: {details}" if details else code.name
    return Refused(text) if code in _FINAL else Broken(text)


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def refuses(address: str) -> bool:
    """Whether the host says that nobody listens there. False where it can't be known."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return False
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return False
