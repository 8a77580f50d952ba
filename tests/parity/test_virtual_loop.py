"""The virtual clock keeps asyncio's promises: deadlines are met exactly, in order, without waiting."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_loop import run_virtually


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=20))
def test_timers_fire_in_order_at_their_deadline(deadlines: list[float]) -> None:
    async def main() -> list[tuple[float, int]]:
        loop = asyncio.get_running_loop()
        fired: list[tuple[float, int]] = []
        for index, when in enumerate(deadlines):
            loop.call_at(when, lambda i=index: fired.append((loop.time(), i)))
        await asyncio.sleep(max(deadlines) + 1.0)
        return fired

    assert run_virtually(main()) == sorted((when, index) for index, when in enumerate(deadlines))


def test_a_year_passes_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(365 * 86400.0)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == 365 * 86400.0


def test_waiting_for_nothing_raises_instead_of_hanging() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="would wait for ever"):
        run_virtually(main())
