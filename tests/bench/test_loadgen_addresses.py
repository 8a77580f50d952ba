"""Several addresses: requests take turns, and pass over a server that is gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

from known_service import Behaviour, known_service
from test_loadgen import planned

from service.bench.loadgen import Ending, LoadGenerator


async def test_requests_take_turns() -> None:
    async with (
        known_service(Behaviour()) as one,
        known_service(Behaviour()) as two,
        LoadGenerator([one, two], channels=2) as generator,
    ):
        seen = await generator.open_loop([planned(n) for n in range(12)])
    assert Counter(each.address for each in seen) == {one: 6, two: 6}
    assert {each.ending for each in seen} == {Ending.COMPLETED}


async def test_a_server_that_is_gone_gets_no_more_requests() -> None:
    async with known_service(Behaviour()) as stays, AsyncExitStack() as stack:
        goes = await stack.enter_async_context(known_service(Behaviour()))
        async with LoadGenerator([goes, stays]) as generator:
            before = await generator.open_loop([planned(n) for n in range(6)])
            await stack.aclose()
            await asyncio.sleep(0.5)  # the connection's end arrives
            after = await generator.open_loop([planned(n) for n in range(6, 14)])
    assert {each.address for each in before} == {goes, stays}
    assert {(each.address, each.ending) for each in after} == {(stays, Ending.COMPLETED)}


async def test_with_nobody_left_requests_fail_with_a_status() -> None:
    async with AsyncExitStack() as stack:
        both = [await stack.enter_async_context(known_service(Behaviour())) for _ in range(2)]
        generator = LoadGenerator(both, timeout_s=10.0)
        async with generator:
            await stack.aclose()
            await asyncio.sleep(0.3)
            seen = await generator.open_loop([planned(n) for n in range(4)])
    assert {each.ending for each in seen} == {Ending.FAILED}
    assert {each.error.partition(":")[0] for each in seen} == {"UNAVAILABLE"}
