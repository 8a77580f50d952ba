"""A scheduling core that fails at once: its process stays out of elections, longer each time."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_processes import fleet, read, submit, until

from service.core.types import Outcome
from service.fleet import scheduler_process
from service.fleet.reign import Reign
from service.fleet.rest import Rest


@given(st.lists(st.floats(0.0, 60.0), max_size=40))
def test_rests_grow_while_reigns_are_short_and_stop_after_a_long_one(lasted: list[float]) -> None:
    rest, before_s = Rest(), 0.0
    for lasted_s in lasted:
        rest_s = rest.after(lasted_s)
        assert 0.0 <= rest_s <= Rest.LONGEST_S
        if lasted_s >= Rest.LASTING_S:
            assert rest_s == 0.0
        else:
            assert rest_s >= max(before_s, Rest.FIRST_S)
        before_s = rest_s


class Failing(Reign):
    async def start(self) -> None:
        await super().start()
        self._end("the core failed: planted")


async def test_a_reign_that_fails_at_once_is_not_followed_by_the_next_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet(workers=1, schedulers=1, front_ends=1) as made:
        alone = made.active
        monkeypatch.setattr(scheduler_process, "Reign", Failing)
        alone.gate.reign._end("the core failed: planted")
        await asyncio.sleep(1.2)  # rests of 0.5, 1 and 2 s
        assert 1 <= alone.reigns <= 3
        monkeypatch.undo()
        await until(lambda: bool(made.used()))
        assert (await read(submit(made.front_ends["fe0"], "after")))[1].outcome is Outcome.COMPLETED
