"""Laws of waiting for a better instance: sessions stay where their cache is, and nobody waits for ever."""

from __future__ import annotations

import pytest
from fleet_helpers import Fleet
from helpers import request, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.settings import SchedulerSettings
from service.core.types import Outcome, Request

ROW = tuple(range(60))  # 60 blocks of 32 tokens
CACHED = 1920


def turn(name: str, at_s: float, prompt: int = 2000, **more: object) -> Request:
    """The next turn of a session whose first 1920 tokens may be cached."""
    return request(name, prompt, at_s, max_new_tokens=1, block_hashes=ROW[: prompt // 32], **more)


def blocker(name: str, tokens: int, at_s: float = 0.0) -> Request:
    return request(name, tokens, at_s, max_new_tokens=1)


def two(first: str = "i0", second: str = "i1", **knobs: object) -> Fleet:
    return Fleet([spec(first), spec(second)], knobs=SchedulerSettings(**knobs))  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [("i0", "i1"), ("i1", "i0")])
def test_a_turn_goes_where_its_prefix_is(names: tuple[str, str]) -> None:
    """Both instances are idle: the one that holds the prefix takes it, whichever is asked first."""
    fleet = two(*names)
    fleet.caches("i1", ROW)
    fleet.submit(turn("t", 0.0))
    assert fleet.where("t") == "i1"


def test_a_turn_waits_for_a_busy_instance_that_would_finish_it_sooner() -> None:
    """The holder is busy for a moment: waiting there beats computing 1920 tokens again here."""
    fleet = two()
    fleet.caches("i1", ROW)
    fleet.submit(blocker("b0", 100), blocker("b1", 100))
    assert set(fleet.running) == {"i0", "i1"} or len(fleet.running) == 1
    fleet.submit(turn("t", fleet.now_s))
    for name in sorted(fleet.running):
        fleet.finish(name)
    assert fleet.where("t") == "i1"


@settings(max_examples=50)
@given(busy_tokens=st.integers(100, 2048), prompt=st.integers(1921, 2200), sooner=st.booleans())
def test_the_choice_is_the_earlier_finish(busy_tokens: int, prompt: int, sooner: bool) -> None:
    """With nobody else waiting, a turn waits for the holder exactly where that is predicted to finish it
    sooner than the idle instance would, by more than the hand-back time."""
    fleet = two(long_chunk_s_max=10.0)
    instances = fleet.scheduler.instances
    fleet.submit(blocker("b", busy_tokens))
    (holder,) = fleet.running
    other = next(name for name in instances if name != holder)
    cached = ROW if sooner else ROW[:2]
    fleet.caches(holder, cached)
    fleet.submit(turn("t", 0.0, prompt, deadline_free=True))
    history = min(len(cached), (prompt - 1) // 32) * 32
    pricer, running = instances[holder].pricer, instances[holder].running
    assert running is not None
    there_s, here_s = pricer.request_s(prompt - history, history), pricer.request_s(prompt, 0)
    waits = running.end_s + there_s + SchedulerSettings().safety_s < here_s
    assert fleet.where("t") == (None if waits else other)


def test_a_popular_prefix_does_not_draw_everybody_to_one_instance() -> None:
    """Twenty turns with one prefix at once: when the work ahead at the holder is worth more than the prefix,
    the others go elsewhere."""
    fleet = two()
    fleet.caches("i0", ROW)
    fleet.submit(*(turn(f"t{i}", 0.0, 1985 + i) for i in range(20)))
    fleet.run_out()
    places = {fleet.where(f"t{i}") for i in range(20)}
    assert places == {"i0", "i1"}
    assert fleet.scheduler.outcomes[Outcome.COMPLETED] == 20


def test_a_holder_that_hangs_is_left() -> None:
    """A pass that never ends: the turn leaves when waiting has cost what the prefix would have saved."""
    fleet = two()
    fleet.submit(blocker("b", 200))
    (holder,) = fleet.running
    fleet.caches(holder, ROW)
    fleet.submit(turn("t", 0.0))
    assert fleet.where("t") is None
    running = fleet.scheduler.instances[holder].running
    assert running is not None
    saved_s = fleet.scheduler.instances[holder].pricer.request_s(2000, 0)
    fleet.wait_until(running.end_s + 2.0 * saved_s)
    assert fleet.where("t") not in (None, holder)


def test_who_is_passed_over_looks_around_at_once() -> None:
    """The holder takes others first, one a pass: a turn that would now wait too long goes to the idle one at
    that moment, not when its own wait has run out."""
    fleet = two(group_requests_max=1)
    fleet.submit(blocker("b", 370))
    (holder,) = fleet.running
    fleet.caches(holder, ROW)
    fleet.submit(turn("t", 0.0, 640))
    fleet.submit(*(turn(f"u{i}", 0.0, 2170, ttft_target_s=0.35) for i in range(4)))
    assert [fleet.where(name) for name in ("t", "u0", "u1", "u2", "u3")] == [None] * 5
    fleet.finish(holder)
    assert fleet.where("u0") == holder
    assert fleet.started["t"] == (fleet.now_s, "i1" if holder == "i0" else "i0")


def test_a_holder_that_goes_down_is_left_at_once() -> None:
    fleet = two()
    fleet.submit(blocker("b", 200))
    (holder,) = fleet.running
    fleet.caches(holder, ROW)
    fleet.submit(turn("t", 0.0))
    assert fleet.where("t") is None
    fleet.down(holder)
    assert fleet.where("t") not in (None, holder)


def test_an_aged_request_waits_for_nobody() -> None:
    """Past the ageing bound the first free instance takes it."""
    fleet = two(age_bound_s=0.05)
    fleet.submit(blocker("b", 2000))
    (holder,) = fleet.running
    fleet.caches(holder, ROW)
    fleet.submit(turn("t", 0.0))
    fleet.wait_until(0.06)
    assert fleet.where("t") not in (None, holder)


@pytest.mark.parametrize(("target_s", "waits"), [(10.0, True), (0.115, False)])
def test_a_target_that_is_met_here_is_not_given_up_for_the_cache(target_s: float, waits: bool) -> None:
    """Waiting saves the others time: then a turn finishes later itself, but never too late for its target."""
    fleet = two(long_chunk_s_max=10.0)
    fleet.submit(blocker("b", 1050))
    (holder,) = fleet.running
    fleet.caches(holder, ROW)
    fleet.submit(*(turn(f"u{i}", 0.0) for i in range(4)))
    assert all(fleet.where(f"u{i}") is None for i in range(4))
    fleet.submit(turn("t", 0.0, 1100, ttft_target_s=target_s))
    assert (fleet.where("t") is None) == waits


def test_a_full_instance_is_not_waited_for() -> None:
    """Without room for its KV a holder is no choice."""
    fleet = Fleet([spec("i0", blocks=64), spec("i1")])
    fleet.submit(blocker("b", 500))
    holder = "i0" if "i0" in fleet.running else "i1"
    fleet = Fleet([spec(holder, blocks=64), spec("other")])
    fleet.caches(holder, ROW)
    fleet.submit(turn("t", 0.0, 1500), turn("u", 0.0, 1500))
    assert {fleet.where("t"), fleet.where("u")} == {holder, "other"}


@settings(max_examples=20, deadline=None)
@given(
    load=st.lists(
        st.tuples(st.floats(0.0, 0.3), st.integers(0, 3), st.integers(0, 40), st.integers(1, 300)),
        min_size=1,
        max_size=40,
    )
)
def test_everybody_is_served(load: list[tuple[float, int, int, int]]) -> None:
    """Any mix of sessions over three instances: all end, and none much later than the ageing bound allows."""
    knobs = SchedulerSettings(age_bound_s=1.0)
    fleet = Fleet([spec(f"i{n}") for n in range(3)], knobs=knobs)
    for n in range(3):
        fleet.caches(f"i{n}", tuple(range(1000 * n, 1000 * n + 40)))
    at_s = 0.0
    for number, (gap_s, session, blocks, tail) in enumerate(load):
        at_s += gap_s
        while (
            fleet.running
            and min(f.end_s for i in fleet.scheduler.instances.values() if (f := i.running) is not None)
            <= at_s
        ):
            ends = {n: i.running.end_s for n, i in fleet.scheduler.instances.items() if i.running is not None}
            fleet.finish(min(ends, key=lambda n: ends[n]))
        fleet.wait_until(at_s)
        row = tuple(range(1000 * session, 1000 * session + blocks))
        fleet.submit(request(f"r{number}", 32 * blocks + tail, at_s, max_new_tokens=1, block_hashes=row))
    fleet.run_out()
    assert fleet.scheduler.outcomes[Outcome.COMPLETED] == len(load)
