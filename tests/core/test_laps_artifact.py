"""Laws of the LAPS artifact: raw length decides, the short queue goes first, a fixed window, two pools."""

from __future__ import annotations

import pytest
from helpers import GPU_COST, PACKED, dispatches, ids_of, instance, request, simulate, spec, tracked
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated import SimulatedModel
from service.core.settings import SchedulerSettings
from service.core.types import Outcome, Request, Role
from service.policies import POLICIES, make_controller, make_scheduler
from service.policies.laps_artifact import PoolRouter
from service.policies.routed import Station
from service.sim.kernel import SimResult, run

WINDOW_S = 0.005
ENGINE = spec(cost=GPU_COST, profiles=PACKED)
LOADS = st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 3000)), min_size=1, max_size=25)


def arrivals_of(drawn: list[tuple[float, int]]) -> list[Request]:
    return [request(f"r{i}", prompt, at_s, max_new_tokens=1) for i, (at_s, prompt) in enumerate(drawn)]


def starts(result: SimResult) -> list[tuple[float, list[str]]]:
    return [(now_s, ids_of(command)) for now_s, command in dispatches(result)]


@settings(max_examples=40)
@given(drawn=LOADS)
def test_short_goes_first_and_alone(drawn: list[tuple[float, int]]) -> None:
    """A pass is of one queue. A pass of longs starts only while no short has waited for the whole window and
    fewer than eight wait."""
    result, _ = simulate(arrivals_of(drawn), policy="laps_artifact", on=ENGINE)
    short = {i: r.request.prompt_tokens <= 256 for i, r in result.records.items()}
    begun: set[str] = set()
    restarted_s = 0.0  # the window starts again behind each batch of shorts
    for now_s, ids in starts(result):
        assert len({short[i] for i in ids}) == 1
        begun.update(ids)
        if short[ids[0]]:
            restarted_s = now_s
            continue
        waiting = [
            r.request.arrival_s
            for i, r in result.records.items()
            if short[i] and i not in begun and r.request.arrival_s < now_s
        ]
        assert len(waiting) < 8
        assert all(now_s < max(arrival_s, restarted_s) + WINDOW_S + 1e-9 for arrival_s in waiting)
    assert {r.outcome for r in result.records.values()} == {Outcome.COMPLETED}


def test_the_window() -> None:
    """A lone short waits for all of it; eight go at once; a long one runs meanwhile."""
    result, _ = simulate(arrivals_of([(0.0, 10)]), policy="laps_artifact", on=ENGINE)
    assert starts(result) == [(WINDOW_S, ["r0"])]
    result, _ = simulate(arrivals_of([(0.0, 10)] * 8), policy="laps_artifact", on=ENGINE)
    assert [now_s for now_s, _ in starts(result)] == [0.0]
    result, _ = simulate(arrivals_of([(0.0, 10), (0.0, 1000)]), policy="laps_artifact", on=ENGINE)
    assert [ids for _, ids in starts(result)] == [["r1"], ["r0"]]


def test_the_window_starts_again_behind_a_batch() -> None:
    """20 shorts, of which a pass takes 16: the other four wait for a whole window from its start."""
    drawn = [*[(0.0, 10)] * 7, *[(0.03, 10)] * 13]
    result, _ = simulate(arrivals_of(drawn), policy="laps_artifact:window_s=0.05", on=ENGINE)
    assert [(now_s, len(ids)) for now_s, ids in starts(result)] == [(0.03, 16), (0.08, 4)]


def test_the_cache_does_not_make_a_prompt_short() -> None:
    """The raw length counts: a long prompt that is cached but for a few tokens still goes the long way."""
    hashes = tuple(range(31))
    first = request("first", 1000, 0.0, max_new_tokens=1, block_hashes=hashes)
    again = request("again", 1000, 5.0, max_new_tokens=1, block_hashes=hashes)
    result, _ = simulate([first, again], policy="laps_artifact", on=ENGINE)
    (_, _), (again_s, _) = starts(result)
    assert result.records["again"].history_tokens > 900
    assert again_s == 5.0, "it would have waited for the window as a short one"


def overloaded_by_shorts(policy: str) -> float:
    """TTFT of a long prompt that comes into twice as many shorts as the engine can serve, for 6 s."""
    shorts = [(n / 100.0, 200) for n in range(600)]
    knobs = SchedulerSettings(queue_requests_max=10_000)
    arrivals = arrivals_of([*shorts, (1.0, 1000)])
    result, _ = simulate(arrivals, policy=policy, on=ENGINE, knobs=knobs)
    ttft_s = result.records["r600"].ttft_s
    assert ttft_s is not None
    return ttft_s


def test_it_starves_longs_as_published() -> None:
    """While shorts alone overload the server, a long prompt waits for the end of them. The later commit's
    bound of 4 short batches in a row ends that."""
    assert POLICIES["laps_artifact"].starves
    assert overloaded_by_shorts("laps_artifact") > 5.0
    assert overloaded_by_shorts("laps_artifact:short_batches_max=4") < 2.0


def test_the_router_keeps_to_its_pool() -> None:
    """A request goes to the least loaded server of its class, and to any while there are no pools."""
    router = PoolRouter(256)
    stations = [Station(instance(instance_id=f"i{n}"), policy=None) for n in range(4)]  # type: ignore[arg-type]
    short, long = (request(name, tokens, 0.0) for name, tokens in (("s", 256), ("l", 257)))

    def chosen(asked: Request) -> str:
        made = tracked(asked.request_id, asked.prompt_tokens)
        return router.choose(made, stations, 0.0).instance.instance_id

    stations[0].waiting = 1
    assert chosen(short) == chosen(long) == "i1"
    for station, role in zip(stations, (Role.SP, Role.SP, Role.LP, Role.LP), strict=True):
        station.instance.role = role
    stations[1].waiting = stations[2].waiting = 2
    assert (chosen(short), chosen(long)) == ("i0", "i3")


@pytest.mark.parametrize("count", [2, 3])
def test_pools_are_made_and_everything_is_answered(count: int) -> None:
    """Half and half from the first step on; what was placed before stays where it is and is served there."""
    made = [
        (spec(f"i{n}"), SimulatedModel(ENGINE.capabilities, ENGINE.profiles, ENGINE.cost))
        for n in range(count)
    ]
    knobs = SchedulerSettings()
    drawn = [(0.05 * n, 1500 if n % 7 == 0 else 100) for n in range(400)]
    timed = [(r.arrival_s, r) for r in arrivals_of(drawn)]
    scheduler = make_scheduler("laps_artifact", knobs)
    result = run(scheduler, made, timed, controller=make_controller("laps_artifact", knobs))
    assert {r.outcome for r in result.records.values()} == {Outcome.COMPLETED}
    split = [move for now_s, move in result.role_moves if now_s <= 1.0]
    assert [move.role for move in split] == [Role.SP] * (count // 2) + [Role.LP] * (count - count // 2)
    roles = {name: i.role for name, i in scheduler.instances.items()}
    assert {Role.SP, Role.LP} == set(roles.values())
