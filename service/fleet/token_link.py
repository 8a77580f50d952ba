"""The front end's end of a token stream: one link to each worker, which comes back by itself.

It knows how many tokens of each answer it has handed on. Repeated ones are left out, a gap ends the stream,
and the next stream begins with these numbers, so each token is handed on once while the worker lives. A
worker that was started again has none of it; what its requests come to is the scheduler's to say.

The name of a front end must be its own and new with each process: two of one name take the stream from each
other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
import grpc.aio

from protos.plaserve.v1 import worker_pb2 as pb
from service.fleet.link import SERVICE, as_bytes, lenient

log = logging.getLogger(__name__)

ANSWERS_MAX = 65_536  # positions kept: far more than are ever under way; the stalest go
# Request id, index of the first token, token ids -> whether somebody waits for the answer.
Deliver = Callable[[str, int, Sequence[int]], bool]


@dataclass(frozen=True, slots=True)
class TokenLinkSettings:
    """Seconds and counts. silence_s: without a message for so long a stream counts as broken; above the
    worker's `beat_s`. ack_every: messages; below the credit, or the worker waits for nothing."""

    silence_s: float = 3.0
    ack_every: int = 16
    credit: int = 64
    backoff_s_min: float = 0.05
    backoff_s_max: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.ack_every <= self.credit:
            raise ValueError(f"ack_every: must be from 1 to credit ({self.credit}), not {self.ack_every}")


class Broken(Exception):  # noqa: N818 - what happened
    """The stream is of no more use; the next one may be."""


class TokenLink:
    """deliver: called on the loop with tokens of one answer, in order, each once.
    messages: that came with tokens. connected: whether a stream is open."""

    def __init__(
        self,
        address: str,
        front_end: str,
        deliver: Deliver,
        open_channel: Callable[[str], grpc.aio.Channel],
        settings: TokenLinkSettings | None = None,
        random: Random | None = None,
    ) -> None:
        self.address = address
        self.messages = 0
        self.connected = False
        self._front_end = front_end
        self._deliver = deliver
        self._open_channel = open_channel
        self._settings = settings or TokenLinkSettings()
        self._random = random or Random()
        self._positions: dict[str, int] = {}  # of answers that the worker may still have tokens of
        self._ended: deque[tuple[int, str]] = (
            deque()
        )  # of those, complete ones, by the message that ended them
        self._boot_id = ""
        self._said = False  # that it broke
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._running = asyncio.create_task(self._run(), name=f"token-link {self.address}")

    @property
    def positions(self) -> int:
        """Answers of which a next stream would say how far they are here."""
        return len(self._positions)

    def forget(self, request_id: str) -> None:
        """The request is over, by whatever way."""
        self._positions.pop(request_id, None)

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def take(self, message: pb.StreamTokensResponse) -> None:
        """Hand on what is new in `message`. Raises Broken for a gap."""
        for delta in message.deltas:
            request_id, first = delta.request_id, delta.first_index
            position = self._positions.get(request_id, first)
            if first > position:
                raise Broken(f"token {position} of {request_id} is missing; {first} came")
            new = delta.token_ids[position - first :]
            self.forget(request_id)
            self._positions[request_id] = position + len(new)  # the latest last
            if len(self._positions) > ANSWERS_MAX:
                del self._positions[next(iter(self._positions))]
            if delta.finish_reason:
                self._ended.append((message.sequence, request_id))
            if new and not self._deliver(request_id, position, new):
                self.forget(request_id)  # late tokens of one that is over
        while self._ended and self._ended[0][0] <= message.sequence - self._settings.credit:
            self.forget(self._ended.popleft()[1])  # it was acknowledged, else there was no credit for this

    def begun(self, boot_id: str) -> None:
        """The worker has read our positions; what had ended by then it has let go."""
        if boot_id != self._boot_id:
            self._boot_id = boot_id
            self._positions.clear()
        for _, request_id in self._ended:
            self.forget(request_id)
        self._ended.clear()

    async def _run(self) -> None:
        pause_s = self._settings.backoff_s_min
        while True:
            try:
                await self._converse()
            except Broken as error:
                self._broke(str(error))
            except grpc.aio.AioRpcError as error:
                self._broke(error.details() or error.code().name)
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    self._positions.clear()  # the two disagree; the worker knows what was acknowledged
            except Exception:  # certificates that can't be read, for one: they may be later
                log.exception("the token stream from %s has a fault", self.address)
            pause_s = self._settings.backoff_s_min if self.connected else pause_s
            self.connected = False
            await asyncio.sleep(pause_s * self._random.uniform(0.5, 1.0))
            pause_s = min(2.0 * pause_s, self._settings.backoff_s_max)

    def _broke(self, why: str) -> None:
        """Said once, until it is back: a worker may be gone for as long as its lease lasts."""
        log.log(logging.DEBUG if self._said else logging.WARNING, "no tokens from %s: %s", self.address, why)
        self._said = True

    async def _converse(self) -> None:
        """One stream, until it breaks."""
        channel = self._open_channel(self.address)
        call: Any = channel.stream_stream(
            f"/{SERVICE}/StreamTokens",
            request_serializer=as_bytes,
            response_deserializer=lenient(pb.StreamTokensResponse),
        )()
        try:
            await call.write(self.first())
            self.begun((await self._read(call)).boot_id)
            self.connected = True
            if self._said:
                log.info("tokens from %s again", self.address)
            self._said = False
            acknowledged = last = 0
            while True:
                message = await self._read(call)
                if message.sequence:
                    self.messages += 1
                    self.take(message)
                    last = message.sequence
                due = self._settings.ack_every if message.sequence else 1
                if last - acknowledged >= due:
                    await call.write(pb.StreamTokensRequest(acknowledged=last))
                    acknowledged = last
        finally:
            call.cancel()
            await channel.close()

    def first(self) -> pb.StreamTokensRequest:
        """What a stream begins with."""
        positions = [pb.TokenPosition(request_id=r, token_count=n) for r, n in self._positions.items()]
        return pb.StreamTokensRequest(
            front_end=self._front_end,
            boot_id=self._boot_id,
            positions=positions,
            credit_count=self._settings.credit,
        )

    async def _read(self, call: Any) -> pb.StreamTokensResponse:
        try:
            async with asyncio.timeout(self._settings.silence_s):
                message = await call.read()
        except TimeoutError:
            raise Broken(f"silent for {self._settings.silence_s:g} s") from None
        if message is grpc.aio.EOF:
            raise Broken("the worker ended it")
        if message is None:
            raise Broken("these bytes are no StreamTokensResponse")
        return message  # type: ignore[no-any-return]
