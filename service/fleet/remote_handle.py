"""A request of a front end, as whoever asked for it holds it (`remote_runtime`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from engines.types import EngineRequest
from protos.plaserve.v1 import scheduler_pb2 as pb
from service.fleet.going_on import Prefilled
from service.fleet.uplink import Uplink
from service.runtime.contract import Ended, RequestRecord, Token


@dataclass(slots=True)
class Attempt:
    """One attempt at a request, or at the rest of its answer. base: tokens of the answer before it. accepted:
    it joined the queue of the shard. early: tokens that came before those in front of them."""

    wire_id: str
    uplink: Uplink
    base: int = 0
    accepted: bool = False
    early: dict[int, int] = field(default_factory=dict)
    ended: pb.RequestEnded | None = None


class RemoteHandle:
    """See `contract.RequestHandle`. on_cancel: told of a cancel, with its `finished`."""

    def __init__(
        self,
        on_cancel: Callable[[RemoteHandle, bool], None],
        record: RequestRecord,
        engine_request: EngineRequest,
    ) -> None:
        self.record = record
        self.engine_request = engine_request
        self.attempt: Attempt | None = None  # None: waits for a scheduler
        self.tries = 0  # attempts that were lost, or may be
        self.refused_by: set[str] = set()  # shards
        self.sent = False  # to anybody yet
        self.weight = 0  # in the load of its uplink
        self.cancelled: bool | None = None  # `finished` of the cancel
        self.timer: asyncio.TimerHandle | None = None
        self.tokens: list[int] = []  # of the answer so far
        self.went_on = 0  # times that another worker took the answer up
        self.prefilled: Prefilled | None = None  # once it went on
        self._on_cancel = on_cancel
        self._queue: asyncio.Queue[Token | Ended] = asyncio.Queue()  # at most max_new_tokens + 1 entries

    async def __aiter__(self) -> AsyncIterator[Token | Ended]:
        while True:
            item = await self._queue.get()
            yield item
            if isinstance(item, Ended):
                return

    def cancel(self, *, finished: bool = False) -> None:
        if self.record.outcome is None:
            self._on_cancel(self, finished)

    def put(self, item: Token | Ended) -> None:
        self._queue.put_nowait(item)
