"""The load of a shard, from its scheduler to whoever decides on roles.

Rates count from one look to the next of the same observer, so each observer has counters of its own; those of
observers that no longer look are dropped. A shard that does not answer in time has no load to decide on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import grpc.aio

from protos.plaserve.v1 import scheduler_pb2 as pb
from service.core.fleet_view import Totals, observe, totals
from service.core.reconcile import FleetView, InstanceLoad
from service.core.scheduler import PrefillScheduler
from service.core.types import Role
from service.fleet.requests_convert import BadMessage

log = logging.getLogger(__name__)

METHOD = "/plaserve.v1.SchedulerService/GetLoad"
OBSERVERS_MAX = 16
TIMEOUT_S = 1.0
LOOK_S_MAX = 10.0  # rates over a longer time are not of now: such a look is a first one


class LoadSource(Protocol):
    """Where a controller gets what it looks at."""

    async def load(self, shard: str) -> FleetView | None:
        """None: the shard has no active scheduler, or it does not answer."""


class LoadReport:
    """On the side of the scheduler. Call in the loop that drives it."""

    def __init__(self, scheduler: PrefillScheduler, epoch: int, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._epoch = epoch
        self._clock = clock
        self._before: OrderedDict[str, Totals] = OrderedDict()
        self.active = True

    def look(self, observer_id: str) -> pb.GetLoadResponse:
        now_s = self._clock()
        before = self._before.pop(observer_id, None)
        first = before is None or now_s - before.at_s > LOOK_S_MAX
        since = totals(self._scheduler, now_s) if before is None or first else before
        view, self._before[observer_id] = observe(self._scheduler, since, now_s)
        view = replace(view, first_look=first)
        if len(self._before) > OBSERVERS_MAX:
            self._before.popitem(last=False)
        return to_proto(view, self._epoch, active=self.active)


class GrpcLoadSource:
    """locate: the address of a shard's active scheduler, None where there is none."""

    def __init__(
        self,
        observer_id: str,
        locate: Callable[[str], str | None],
        open_channel: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self._observer_id = observer_id
        self._locate = locate
        self._open_channel = open_channel
        self._channels: dict[str, tuple[str, grpc.aio.Channel]] = {}  # by shard, with the address

    async def load(self, shard: str) -> FleetView | None:
        await self._drop_others()
        address = self._locate(shard)
        if address is None:
            return None
        call = self._channel(shard, address).unary_unary(
            METHOD,
            request_serializer=pb.GetLoadRequest.SerializeToString,
            response_deserializer=pb.GetLoadResponse.FromString,
        )
        try:
            answer = await call(pb.GetLoadRequest(observer_id=self._observer_id), timeout=TIMEOUT_S)
            return from_proto(answer) if answer.active else None
        except grpc.aio.AioRpcError:
            return None
        except BadMessage as error:
            log.warning("the load of shard %s from %s can't be read: %s", shard, address, error)
            return None

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for _, channel in channels.values()))

    async def _drop_others(self) -> None:
        """Channels to where no scheduler of their shard is active any more."""
        others = [shard for shard, (address, _) in self._channels.items() if self._locate(shard) != address]
        dropped = [self._channels.pop(shard)[1] for shard in others]
        await asyncio.gather(*(channel.close(TIMEOUT_S) for channel in dropped))

    def _channel(self, shard: str, address: str) -> grpc.aio.Channel:
        if shard not in self._channels:
            self._channels[shard] = address, self._open_channel(address)
        return self._channels[shard][1]


def to_proto(view: FleetView, epoch: int, *, active: bool) -> pb.GetLoadResponse:
    return pb.GetLoadResponse(
        epoch=epoch,
        active=active,
        instances=[
            pb.InstanceLoad(
                instance_id=load.instance_id,
                role=load.role.value,
                backlog_s=load.backlog_s,
                at_risk_ratio=load.at_risk_ratio,
                utilisation=load.utilisation,
                waiting_count=load.requests_waiting,
                cached_s=load.cached_s,
            )
            for load in view.instances
        ],
        short_requests_per_s=view.short_requests_per_s,
        long_requests_per_s=view.long_requests_per_s,
        short_work_s_per_s=view.short_work_s_per_s,
        long_work_s_per_s=view.long_work_s_per_s,
        arrival_count=view.arrivals,
        first_look=view.first_look,
    )


def from_proto(answer: pb.GetLoadResponse) -> FleetView:
    """Raises BadMessage."""
    try:
        instances = tuple(
            InstanceLoad(
                load.instance_id,
                Role(load.role),
                load.backlog_s,
                load.at_risk_ratio,
                load.utilisation,
                load.waiting_count,
                load.cached_s,
            )
            for load in answer.instances
        )
    except ValueError as error:
        raise BadMessage(f"instances.role: {error}") from None
    return FleetView(
        instances,
        answer.short_requests_per_s,
        answer.long_requests_per_s,
        answer.short_work_s_per_s,
        answer.long_work_s_per_s,
        answer.arrival_count,
        answer.first_look,
    )
