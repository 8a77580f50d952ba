"""Where a process of a fleet is, and what all of them do alike: listen, join, say that they can't go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from service.fleet.link import OPTIONS
from service.fleet.membership import Lease, Member, MemberExists, Membership
from service.fleet.remote_worker import OpenChannel
from service.rpc.tls import TlsFiles, listen

log = logging.getLogger(__name__)

SETTING = "fleet.tls"
JOIN_TIMES_MAX = 60  # an earlier life of a member may hold its name until its lease is over
JOIN_EACH_S = 0.5
# A peer that is cut off breaks no stream: TCP waits for a quarter of an hour, and after a cut as long again
# as it took. So every connection is asked whether it still reaches anybody, and ends when no answer comes.
ALIVE_MS, ANSWER_MS = 2000, 3000
ALIVE = (
    ("grpc.keepalive_time_ms", ALIVE_MS),
    ("grpc.keepalive_timeout_ms", ANSWER_MS),
    ("grpc.http2.ping_timeout_ms", ANSWER_MS),  # of gRPC's own pings, which keep others from being sent: 60 s
    ("grpc.http2.max_pings_without_data", 0),
)
ASKED = (  # at the other end, which would take being asked so often for abuse
    ("grpc.http2.min_recv_ping_interval_without_data_ms", ALIVE_MS // 4),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is in its fleet. listen: host:port, port 0 for a free one. advertise: host that others
    reach it by; empty: that of `listen`. open_channel: how it reaches others."""

    member_id: str
    shard: str
    listen: str
    open_channel: OpenChannel
    advertise: str = ""
    tls: TlsFiles | None = None

    def address(self, port: int) -> str:
        host = self.advertise or self.listen.rpartition(":")[0]
        return f"{host}:{port}"


class Port:
    """A gRPC server with some services, on the address of a place."""

    def __init__(self, place: Place, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._place = place
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0), *OPTIONS, *ALIVE, *ASKED))
        self._server.add_generic_rpc_handlers(tuple(handlers))
        self.address = ""

    async def start(self) -> None:
        port = listen(self._server, self._place.listen, self._place.tls, SETTING)
        self.address = self._place.address(port)
        await self._server.start()

    async def stop(self, grace_s: float | None = None) -> None:
        await self._server.stop(grace_s)


async def join(membership: Membership, member: Member) -> Lease:
    """Join, after the lease of a process of this name that died. Raises MemberExists if that goes on."""
    for left in range(JOIN_TIMES_MAX, -1, -1):
        try:
            return await membership.join(member)
        except MemberExists as error:
            if not left:
                raise
            log.warning("%s; waiting for its lease to end", error)
            await asyncio.sleep(JOIN_EACH_S)
    raise AssertionError("it has returned or raised")


def tell_failure(failed: asyncio.Future[str], task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None and not failed.done():
        log.error("the process can't go on", exc_info=error)
        failed.set_result(f"{type(error).__name__}: {error}")
