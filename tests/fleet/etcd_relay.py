"""A relay before etcd, to cut, silence or slow one connection and not the service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from etcd_server import EtcdServer

from service.bench.chaos_relay import Relay

__all__ = ["Relay", "relay_to"]


@asynccontextmanager
async def relay_to(server: EtcdServer) -> AsyncIterator[Relay]:
    relay = Relay(server.port)
    await relay.open()
    try:
        yield relay
    finally:
        await relay.cut()
