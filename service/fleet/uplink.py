"""A front end's streams to the active schedulers of its shards, and in which order shards are asked.

Each stream is kept up by itself: a scheduler that is lost is followed by the next one of its shard, and one
of a lower epoch than the highest heard there is not listened to. What is said on a stream, and that it came
or went, is the owner's to deal with (`remote_runtime`).

A shard takes new requests while it has a scheduler, is not retired, and serves the model and bundle of the
first scheduler that this front end found, since that is what its clients are told and its texts are read by.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from random import Random
from typing import Protocol

from protos.plaserve.v1 import scheduler_pb2 as pb
from service.core.types import Request
from service.fleet.scheduler_link import LinkDown, SchedulerLink, Welcome
from service.fleet.shard_choice import by_load, by_session

log = logging.getLogger(__name__)

FAILED_S = 1.0  # after something that should not fail
OLD_S = 0.1  # until a scheduler is looked for again, after one that no longer leads


class Owner(Protocol):
    """Who has the requests. Called on the loop."""

    def connected(self, uplink: Uplink) -> None: ...

    def disconnected(self, uplink: Uplink, why: str) -> None: ...

    def hear(self, message: pb.SchedulerMessage) -> None: ...


class Uplink:
    """One shard. welcome: of the scheduler that is connected now. load: what this front end has there, in
    prompt tokens that have given no token yet, and one for each request."""

    def __init__(self, shard: str, front_end_id: str, link: SchedulerLink, owner: Owner) -> None:
        self.shard = shard
        self.welcome: Welcome | None = None
        self.load = 0
        self._front_end_id = front_end_id
        self._link = link
        self._owner = owner
        self._epoch = 0
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._running = asyncio.create_task(self._run(), name=f"scheduler-link {self.shard}")

    def send(self, message: pb.FrontEndMessage) -> None:
        self._link.send(message)

    def follow(self, epoch: int) -> None:
        """A scheduler with this epoch leads. An older one that is connected may not know, or may stand still
        without breaking its stream."""
        self._epoch = max(self._epoch, epoch)
        if self.welcome is not None and self.welcome.epoch < epoch:
            self._link.cut()

    async def close(self, why: str) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._lose(why)
        await self._link.close()

    async def _run(self) -> None:
        """Keep a scheduler; hear what it says. Ends by cancellation only."""
        while True:
            try:
                welcome = await self._link.connect(self._front_end_id)
                if welcome.epoch < self._epoch:
                    log.warning("scheduler %s has the old epoch %d", welcome.scheduler_id, welcome.epoch)
                    await self._link.drop()
                    await asyncio.sleep(OLD_S)
                    continue
                log.info("scheduler %s, epoch %d, shard %s", welcome.scheduler_id, welcome.epoch, self.shard)
                self._epoch, self.welcome = welcome.epoch, welcome
                self._owner.connected(self)
                async for message in self._link:
                    self._owner.hear(message)
                raise LinkDown("the scheduler ended the stream")
            except LinkDown as error:
                self._lose(str(error))
            except Exception as error:  # a bug must not leave every request waiting
                log.exception("the link to the scheduler failed")
                self._lose(f"{type(error).__name__}: {error}")
                await asyncio.sleep(FAILED_S)  # it may fail at once, for good

    def _lose(self, why: str) -> None:
        if self.welcome is None:
            return
        log.warning("scheduler %s is gone: %s", self.welcome.scheduler_id, why)
        self.welcome = None
        self._owner.disconnected(self, why)


class Uplinks:
    """All shards of a front end. first: the first scheduler that was found, whose model is served."""

    def __init__(self, front_end_id: str, owner: Owner, random: Random | None = None) -> None:
        self._front_end_id = front_end_id
        self._owner = owner
        self._random = random or Random()
        self._uplinks: dict[str, Uplink] = {}
        self._capacities: Mapping[str, float] = {}
        self._retired: Collection[str] = ()
        self._started = False
        self.first: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(self._uplinks)

    @property
    def down(self) -> tuple[str, ...]:
        """Those without a scheduler now."""
        return tuple(name for name, uplink in self._uplinks.items() if uplink.welcome is None)

    @property
    def retired(self) -> bool:
        """All of them are out of service."""
        return bool(self._uplinks) and all(shard in self._retired for shard in self._uplinks)

    @property
    def welcome(self) -> Welcome | None:
        """Of some scheduler that is connected now."""
        return next((uplink.welcome for uplink in self._uplinks.values() if uplink.welcome), None)

    def start(self) -> None:
        self._started = True
        for uplink in self._uplinks.values():
            uplink.start()

    def add(self, shard: str, link: SchedulerLink) -> None:
        self._uplinks[shard] = uplink = Uplink(shard, self._front_end_id, link, self._owner)
        if self._started:
            uplink.start()

    async def drop(self, shard: str, why: str) -> None:
        """What is there is lost to it, as with a scheduler that died."""
        uplink = self._uplinks.pop(shard, None)
        if uplink is not None:
            await uplink.close(why)

    def tell(
        self, capacities: Mapping[str, float], retired: Collection[str], epochs: Mapping[str, int]
    ) -> None:
        """What membership knows. capacities: of the workers of each shard that take work; not named: 1.
        epochs: of who leads each shard."""
        self._capacities, self._retired = capacities, retired
        for shard, epoch in epochs.items():
            if shard in self._uplinks:
                self._uplinks[shard].follow(epoch)

    def order(self, request: Request) -> list[Uplink]:
        """Who takes new requests now, in the order in which this one should ask."""
        open_now = {shard: uplink for shard, uplink in self._uplinks.items() if self._takes(uplink)}
        if len(open_now) < 2:
            return list(open_now.values())
        capacities = {shard: self._capacities.get(shard, 1.0) for shard in open_now}
        if request.session:
            names = by_session(f"{request.tenant}\0{request.session}", capacities)
        else:
            loads = {shard: float(uplink.load) for shard, uplink in open_now.items()}
            names = by_load(loads, capacities, self._random)
        return [open_now[name] for name in names]

    def serves(self, uplink: Uplink) -> bool:
        """Whether it has what this front end is for. Call when it is connected."""
        welcome = uplink.welcome
        assert welcome is not None, "it is connected"
        if not self.first.done():
            self.first.set_result(welcome)
        first = self.first.result()
        same = (welcome.model, welcome.bundle_id) == (first.model, first.bundle_id)
        if not same:
            log.error(
                "shard %s serves %s %s, this front end %s %s; nothing is sent there",
                uplink.shard,
                welcome.model,
                welcome.bundle_id[:12],
                first.model,
                first.bundle_id[:12],
            )
        return same

    def _takes(self, uplink: Uplink) -> bool:
        welcome = uplink.welcome
        if welcome is None or uplink.shard in self._retired:
            return False
        first = self.first.result() if self.first.done() else welcome
        return (welcome.model, welcome.bundle_id) == (first.model, first.bundle_id)
