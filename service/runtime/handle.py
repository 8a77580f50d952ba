"""A request as its reader holds it: tokens come out, a cancel goes in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from engines.types import EngineRequest
from service.core.types import Cancel, Event
from service.runtime.contract import Ended, RequestRecord, Token


class Handle:
    """A submitted request; see `contract.RequestHandle`."""

    def __init__(
        self, send: Callable[[Event], None], record: RequestRecord, engine_request: EngineRequest
    ) -> None:
        self.record = record
        self.engine_request = engine_request
        self.known_on: str | None = None  # the instance whose engine holds the request
        self._send = send
        self._queue: asyncio.Queue[Token | Ended] = asyncio.Queue()  # at most max_new_tokens + 1 entries

    async def __aiter__(self) -> AsyncIterator[Token | Ended]:
        while True:
            item = await self._queue.get()
            yield item
            if isinstance(item, Ended):
                return

    def cancel(self, *, finished: bool = False) -> None:
        if self.record.outcome is None:
            self._send(Cancel(self.record.request.request_id, finished))

    def put(self, item: Token | Ended) -> None:
        self._queue.put_nowait(item)
