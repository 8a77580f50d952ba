"""Where a controller gets loads from: channels only to those that lead, and what can't be read is no load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio

from protos.plaserve.v1 import scheduler_pb2 as pb
from service.fleet.load import METHOD, GrpcLoadSource


@asynccontextmanager
async def scheduler(answer: Callable[[], pb.GetLoadResponse]) -> AsyncIterator[str]:
    """Its address."""

    async def look(request: pb.GetLoadRequest, context: object) -> pb.GetLoadResponse:
        return answer()

    handler = grpc.unary_unary_rpc_method_handler(
        look, pb.GetLoadRequest.FromString, pb.GetLoadResponse.SerializeToString
    )
    service, method = METHOD.strip("/").split("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def active(role: str = "mixed") -> pb.GetLoadResponse:
    return pb.GetLoadResponse(active=True, instances=[pb.InstanceLoad(instance_id="w", role=role)])


class Channels:
    """All that were opened, and which of them are open."""

    def __init__(self) -> None:
        self.made: list[tuple[str, grpc.aio.Channel]] = []

    def open(self, address: str) -> grpc.aio.Channel:
        self.made.append((address, grpc.aio.insecure_channel(address)))
        return self.made[-1][1]

    @property
    def left(self) -> list[str]:
        shut = grpc.ChannelConnectivity.SHUTDOWN
        return [address for address, channel in self.made if channel.get_state() is not shut]


async def test_a_channel_is_kept_while_its_scheduler_leads_and_closed_then() -> None:
    async with scheduler(active) as one, scheduler(active) as two:
        where, channels = {"a": one, "b": two}, Channels()
        source = GrpcLoadSource("c1", where.get, channels.open)
        for _ in range(3):
            assert [(await source.load(shard)) is not None for shard in "ab"] == [True, True]
        assert [address for address, _ in channels.made] == [one, two]
        where["a"] = two
        assert await source.load("a") is not None
        assert channels.left == [two, two]
        del where["a"]  # nobody asks for its load any more
        assert await source.load("b") is not None
        assert channels.left == [two]
        await source.close()
        assert channels.left == []


async def test_a_load_that_can_not_be_read_is_none_and_said(caplog) -> None:
    roles = ["of another release", "mixed"]
    async with scheduler(lambda: active(roles.pop(0))) as address:
        source = GrpcLoadSource("c1", {"a": address}.get, grpc.aio.insecure_channel)
        assert await source.load("a") is None
        assert "the load of shard a" in caplog.text
        assert "of another release" in caplog.text
        assert await source.load("a") is not None
        await source.close()
