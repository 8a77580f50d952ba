"""StreamTokens: the worker's end of a token stream. The first message names the front end, later ones
acknowledge.

Acknowledgements are the credit too: so many messages may be unread, and then sending waits. gRPC's own flow
control would let some hundred kilobytes pass unseen.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from protos.plaserve.v1 import worker_pb2 as pb
from service.fleet.convert import BadMessage
from service.fleet.tokens import CutOff, TokenBook, messages

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]


class TokenServicer:
    """boot_id: of this process, so that a front end knows whether its positions still mean anything."""

    def __init__(self, book: TokenBook, boot_id: str) -> None:
        self._book = book
        self._boot_id = boot_id

    async def stream(self, requests: object, context: Context) -> None:
        acks: asyncio.Task[None] | None = None
        number = 0

        def opened(stream: int) -> None:
            nonlocal acks, number
            number = stream
            acks = asyncio.create_task(self._acknowledgements(name, stream, context))

        try:
            first = await context.read()
            name, positions, credit = self._reader(first)
            async with aclosing(messages(self._book, name, positions, credit, opened)) as sent:
                async for message in sent:
                    if not message.sequence:
                        message.boot_id = self._boot_id
                    await context.write(message)
        except BadMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except CutOff as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        finally:
            if acks is not None:
                acks.cancel()

    def _reader(self, first: pb.StreamTokensRequest | None) -> tuple[str, dict[str, int], int]:
        if not isinstance(first, pb.StreamTokensRequest) or not first.front_end:
            raise BadMessage(
                "StreamTokensRequest.front_end: is missing; the first message names the front end"
            )
        positions = {position.request_id: position.token_count for position in first.positions}
        if first.boot_id != self._boot_id:
            positions = {}  # of another process
        return first.front_end, positions, first.credit_count or self._book.settings.credit

    async def _acknowledgements(self, front_end: str, stream: int, context: Context) -> None:
        """Until the front end ends its side; a bad one ends the stream."""
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                if message is None:
                    raise BadMessage("StreamTokensRequest: these bytes are none")
                self._book.acknowledge(front_end, stream, message.acknowledged)
        except BadMessage as error:
            log.error("the token stream of %s ends: %s", front_end, error)
        self._book.detach(front_end, stream, asyncio.get_running_loop().time())
