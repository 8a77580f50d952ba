"""The fleet demo's plan, figures and books, without a fleet."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.bench.books import ServiceBooks
from service.bench.fleet_figures import (
    GOOD,
    Event,
    aftermaths,
    by_phase,
    client_faults,
    life_faults,
    scheduler_faults,
    stalls,
    timeline,
)
from service.bench.fleet_plan import DemoSettings, kills_of, phase_at, phases_of, plan_of, rig_settings
from service.bench.fleet_watch import Life
from service.bench.loadgen import Ending, Observation
from service.bench.workload import Label, PlannedRequest, Prompt
from service.settings import load_settings

SECONDS = 40.0


def planned(number: int, send_s: float = 0.0, tokens: int = 2) -> PlannedRequest:
    return PlannedRequest(f"r{number}", Prompt(Label.SHORT, "x", 1), send_s, 1.0, tokens)


def seen_of(request: PlannedRequest, ttft_s: float = 0.5, address: str = "a") -> Observation:
    return Observation(
        request.request_id, request.prompt.label, request.send_s, request.target_s, Ending.COMPLETED,
        ttft_s=ttft_s, end_s=request.send_s + ttft_s, output_tokens=request.max_tokens, address=address,
    )  # fmt: skip


def faults(plan: list[PlannedRequest], seen: list[Observation]) -> list[str]:
    return client_faults(plan, seen, Counter(each.request_id for each in seen))


# --- plan ---


def test_the_plan_is_seeded_ordered_and_of_the_phases() -> None:
    settings = DemoSettings(seconds=60.0)
    plan = plan_of(settings)
    assert plan == plan_of(settings)
    assert plan != plan_of(replace(settings, seed=2))
    assert [p.send_s for p in plan] == sorted(p.send_s for p in plan)
    assert len({p.request_id for p in plan}) == len(plan)
    assert plan[0].send_s >= 0.0
    assert plan[-1].send_s <= settings.seconds
    phases = phases_of(settings)
    assert phases[0].start_s == 0.0
    assert phases[-1].end_s == pytest.approx(settings.seconds)
    for phase in phases:
        inside = [p for p in plan if phase_at(phases, p.send_s) is phase]
        expected = phase.rate_per_s * (phase.end_s - phase.start_s)
        assert abs(len(inside) - expected) < 5.0 * expected**0.5
        assert phase.rate_per_s == pytest.approx(settings.load_ratio * phase.capacity_per_s)
    longs = [
        sum(p.prompt.tokens > 1000 for p in plan if phase_at(phases, p.send_s) is phase) / phase.rate_per_s
        for phase in phases
    ]
    assert longs[1] > 2 * max(longs[0], longs[2])


def test_every_kill_is_over_before_the_end() -> None:
    for seconds in (60.0, 200.0):
        settings = DemoSettings(seconds=seconds)
        kills = kills_of(settings)
        assert [kill.at_s for kill in kills] == sorted(kill.at_s for kill in kills)
        assert all(kill.at_s + settings.restart_s < seconds for kill in kills)


def test_the_fleets_settings_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rig_settings(DemoSettings(scale=3.0))
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    settings = load_settings(None, {"policy": made.policy})
    assert settings.scheduler.mode == "spatial"
    assert settings.scheduler.ttft_target_short_s == pytest.approx(1.2)
    assert settings.engine.simulated_time_scale == 3.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("seconds", 1.0), ("workers", 2), ("load_ratio", 0.0), ("scale", 0.0), ("answer_tokens", 0)],
)
def test_bad_settings_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name.partition("_")[0]):
        replace(DemoSettings(), **{name: value})


# --- figures ---


@given(st.lists(st.tuples(st.floats(0.0, 39.9), st.booleans()), max_size=60))
def test_attainment_is_a_share_and_phases_count_everyone_once(points: list[tuple[float, bool]]) -> None:
    seen = [seen_of(planned(n, at_s), 0.5 if good else 2.0) for n, (at_s, good) in enumerate(points)]
    moments = timeline(seen, SECONDS)
    for moment in moments:
        assert moment.every.requests == sum(figures.requests for figures in moment.lanes.values())
        assert moment.every.met <= moment.every.requests
    settings = DemoSettings(seconds=SECONDS)
    figures = by_phase(seen, phases_of(settings))
    assert sum(lanes["all"].requests for lanes in figures.values()) == len(seen)
    assert sum(lanes["all"].met for lanes in figures.values()) == sum(good for _, good in points)


def test_a_dip_is_seen_where_it_was_due() -> None:
    late = {20, 21, 22}
    seen = [seen_of(planned(n, float(n)), 9.0 if n in late else 0.1) for n in range(40)]
    events = [Event(10.0, "kill", "a"), Event(19.0, "kill", "b"), Event(30.0, "back", "b")]
    quiet, dip = aftermaths(seen, timeline(seen, SECONDS), events, SECONDS)
    assert (quiet.until_s, dip.until_s) == (19.0, SECONDS)
    assert quiet.below_s < 3.0  # only what the window reaches into
    assert dip.below_s >= 5.0
    assert dip.back_s is not None
    assert 3.0 <= dip.back_s <= 6.0
    assert dip.lowest < GOOD


def test_a_stall_of_the_clients_is_one_event() -> None:
    seen = [seen_of(planned(n, 0.1 * n)) for n in range(200)]
    late = [replace(s, lag_s=1.5 - 0.1 * n) for n, s in enumerate(seen[50:60])]
    (stall,) = stalls([*seen[:50], *late, *seen[60:]])
    assert stall.at_s == pytest.approx(5.0)
    assert "1.5 s late" in stall.text
    assert stalls(seen) == []


# --- books ---


def test_whole_answers_balance() -> None:
    plan = [planned(n) for n in range(5)]
    assert faults(plan, [seen_of(p) for p in plan]) == []


def test_every_bad_end_is_named() -> None:
    plan = [planned(n) for n in range(4)]
    good = [seen_of(p) for p in plan]
    assert "r0: 0 ends" in faults(plan, good[1:])[0]
    assert any("r0: 2 ends" in fault for fault in faults(plan, [*good, good[0]]))
    assert "1 tokens, asked for 2" in faults(plan, [replace(good[0], output_tokens=1), *good[1:]])[0]
    assert "3 tokens, asked for 2" in faults(plan, [replace(good[0], output_tokens=3), *good[1:]])[0]
    lost = replace(good[0], ending=Ending.FAILED, output_tokens=0)
    silent = replace(lost, error="the stream ended without a token")
    assert "without a gRPC status" in faults(plan, [silent, *good[1:]])[0]
    assert faults(plan, [replace(lost, error="UNAVAILABLE: gone"), *good[1:]]) == []
    assert "not sent" in faults(plan, [replace(lost, ending=Ending.NOT_SENT), *good[1:]])[0]
    assert "never planned" in faults(plan, [*good, seen_of(planned(9))])[0]


def test_front_ends_agree_with_their_clients() -> None:
    seen = [seen_of(planned(n, float(n)), address="x") for n in range(10)]
    addresses = {"f0": "x"}

    def check(completed: int, killed_s: float | None, told_s: float = 6.0) -> list[str]:
        life = Life("f0", 1, told_s, ServiceBooks(completed, {"COMPLETED": completed}, 0, 0))
        return life_faults({("f0", 1): life}, addresses, {("f0", 1): (0.0, killed_s)}, seen)

    assert check(10, None, 11.0) == []
    assert check(9, None, 11.0)
    assert check(6, 6.5) == []  # its last word was at 6 s; a request due at 6 s may have ended since
    assert check(2, 6.5)
    assert check(9, 6.5)
    refused = [replace(s, ending=Ending.REFUSED, error="UNAVAILABLE: no scheduler") for s in seen[:2]]
    for outcome in ("ENGINE_FAILED", "REJECTED_DRAINING"):
        books = ServiceBooks(10, {"COMPLETED": 8, outcome: 2}, 0, 0)
        life = {("f0", 1): Life("f0", 1, 11.0, books)}
        assert life_faults(life, addresses, {("f0", 1): (0.0, None)}, refused + seen[2:]) == []
        assert life_faults(life, addresses, {("f0", 1): (0.0, None)}, refused[1:] + seen[1:])
    assert life_faults({}, addresses, {("f0", 1): (0.0, None)}, seen)


def test_a_scheduler_holds_nothing_at_the_end() -> None:
    life = Life("s0", 1, 9.0, ServiceBooks(3, {"COMPLETED": 2}, 1, 0))
    assert scheduler_faults({("s0", 1): life}, "s0")
    assert scheduler_faults({}, "s0")
    done = replace(life.books, outcomes={"COMPLETED": 3}, queued=0)
    assert scheduler_faults({("s0", 1): Life("s0", 1, 9.0, done)}, "s0") == []
