"""The servers of a fleet's processes."""

from __future__ import annotations

import grpc

from service.fleet.place import Place, Port
from service.rpc.tls import channel_opener


async def test_a_message_of_many_long_prompts_is_taken() -> None:
    """18 prompts of 100,000 tokens in one pass are 5.4 MB; gRPC's own limit is 4 MiB."""

    async def count(data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return str(len(data)).encode()

    handler = grpc.method_handlers_generic_handler("t", {"Count": grpc.unary_unary_rpc_method_handler(count)})
    opener = channel_opener(None, "fleet.link")
    port = Port(Place("w", "a", "127.0.0.1:0", opener), [handler])
    await port.start()
    try:
        async with opener(port.address) as channel:
            assert await channel.unary_unary("/t/Count")(bytes(20_000_000)) == b"20000000"
    finally:
        await port.stop()
