"""What a scheduler process tells of itself: its reign's books, and nothing as a standby."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from test_processes import fleet, read, submit

from protos.plaserve.v1 import status_pb2 as pb
from protos.plaserve.v1.status_pb2_grpc import StatusServiceStub


async def status(address: str) -> pb.GetStatusResponse:
    async with grpc.aio.insecure_channel(address) as channel:
        return await StatusServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=5.0)


async def test_the_active_one_tells_its_books_and_a_standby_says_that_it_is_one() -> None:
    async with fleet() as made:
        handles = [submit(made.front_ends[f"fe{n % 2}"], f"r{n}") for n in range(6)]
        await asyncio.gather(*map(read, handles))
        active = made.active
        told = await status(active.address)
        assert told.submitted_count == told.outcome_counts["COMPLETED"] == 6
        assert told.queued_count == told.running_count == 0
        assert {instance.instance_id for instance in told.instances} == {"w0", "w1", "w2"}
        (standby,) = [one for one in made.schedulers.values() if one is not active]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await status(standby.address)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "standby" in (refused.value.details() or "")


async def test_the_books_of_the_next_reign_begin_with_it() -> None:
    async with fleet() as made:
        await read(submit(made.front_ends["fe0"], "before"))
        old = made.active
        del made.schedulers[old._place.member_id]
        await old.close()
        await read(submit(made.front_ends["fe0"], "after"))
        told = await status(made.active.address)
        assert told.submitted_count == told.outcome_counts["COMPLETED"] == 1
