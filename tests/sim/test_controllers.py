"""Controllers side by side: laws of the fixed split and of the figures, and a small comparison end to end."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.reconcile import FleetView, InstanceLoad, MoveReason, RoleMove
from service.core.types import Lane, Role
from service.sim.cache import Cache
from service.sim.controllers.arms import ARMS, AUTO, HALVES, MIXED, OURS, ROUTER, FixedSplit, split_of
from service.sim.controllers.asked import asked_table, hour_table, least_gain, mode_table
from service.sim.controllers.compare import CompareSettings, Comparison, Scored, Step, compare
from service.sim.controllers.report import page, read, reading, rows, spread, table, write
from service.sim.controllers.runs import Hour, hour, still_cases
from service.sim.controllers.scores import Path as RunPath
from service.sim.controllers.scores import Recovery, RunScore, changes, overshoots, pressure_moves, recoveries
from service.sim.figures import Window
from service.sim.suite import Suite, load_suite, parse_suite

SUITE = {
    "title": "small",
    "metric": {"window_s_min": 4.0, "window_targets_min": 1.0, "lane_requests_min": 20},
    "case": [
        {
            "name": "flip",
            "model": "qwen3-32b",
            "instances": 3,
            "joins": [{"instance": 2, "at_s": 3.0}],
            "limits": {"window_s": 10.0},
            "workload": {
                "parts": [["lmsys_chat_1m", 0.9], ["rag", 0.1]],
                "flips": [{"at_s": 6.0, "shares": [0.5, 0.5]}],
            },
        }
    ],
}
SETTINGS = CompareSettings(loads=(0.25,), seeds=(1, 2))


def load(name: str, role: Role) -> InstanceLoad:
    return InstanceLoad(name, role, 0.0, 0.0, 0.5, 0)


def view(roles: dict[str, Role]) -> FleetView:
    return FleetView(tuple(load(name, role) for name, role in roles.items()), 1.0, 1.0, 1.0, 1.0, 2)


@given(share=st.floats(0.0, 1.0), arrive=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_a_fixed_split_is_kept_and_nobody_moves(share: float, arrive: list[int]) -> None:
    """Newcomers bring SP as near to its share as they can; whoever has a pool stays in it."""
    controller, roles = FixedSplit(share), {}
    for batch in arrive:
        short = sum(role is Role.SP for role in roles.values())
        roles |= {f"i{len(roles) + n}": Role.MIXED for n in range(batch)}
        settled = {name for name, role in roles.items() if role is not Role.MIXED}
        moves = controller.step(view(roles), 0.0)
        assert not settled & {move.instance_id for move in moves}
        roles |= {move.instance_id: move.role for move in moves}
        assert Role.MIXED not in roles.values()
        now, wanted = sum(role is Role.SP for role in roles.values()), split_of(share, len(roles))
        assert now == min(max(short, wanted), short + batch)
    assert not controller.step(view(roles), 1.0)


@given(share=st.floats(0.0, 1.0), instances=st.integers(2, 200))
def test_a_split_is_to_the_nearest_and_leaves_both_pools_one(share: float, instances: int) -> None:
    short = split_of(share, instances)
    assert 1 <= short <= instances - 1
    assert abs(short - share * instances) <= 0.5 or short in (1, instances - 1)


def moved(*turns: tuple[float, Role]) -> list[tuple[float, RoleMove]]:
    return [(at_s, RoleMove("i", role, MoveReason.PRESSURE)) for at_s, role in turns]


def test_an_overshoot_is_a_move_taken_back_soon() -> None:
    """Moves on in one direction are none, nor is a way back after more than ten periods."""
    sp, lp = Role.SP, Role.LP
    assert overshoots(moved((1.0, sp), (2.0, sp), (3.0, sp))) == 0
    assert overshoots(moved((1.0, sp), (2.0, sp), (12.0, lp), (13.0, lp))) == 1
    assert overshoots(moved((1.0, sp), (11.5, lp))) == 0
    assert overshoots(moved((1.0, sp), (5.0, lp), (9.0, sp))) == 2
    formed = [(0.5, RoleMove("j", sp, MoveReason.SEPARATE)), *moved((2.0, lp))]
    assert overshoots(pressure_moves(formed)) == 0


def test_changes_of_the_suite_are_known() -> None:
    suite = load_suite("drift")
    known = {case.name: [at_s for at_s, _ in changes(case)] for case in suite.cases}
    assert known["burst-of-chats"] == [60.0, 90.0]
    assert known["cold-start"] == [50.0, 60.0, 80.0, 100.0]
    assert known["power-cap"] == [60.0, 100.0]
    assert known["flip-90-10"][0] == 90.0


@pytest.mark.parametrize(
    ("bad", "expected"), [(range(0), 0.0), (range(24, 33), 17.0), (range(24, 80), None), (range(3, 9), 0.0)]
)
def test_recovery_is_the_last_moment_below(bad: range, expected: float | None) -> None:
    """Of a change at 20 s: what lies before it, or reaches into what came before, does not count."""
    times = tuple(float(n) for n in range(61))
    shares = tuple(0.5 if n in bad else 1.0 for n in range(61))
    none: tuple[float | None, ...] = (None,) * 61
    path = RunPath(times, (4,) * 61, (4,) * 61, (0,) * 61, {Lane.SHORT: none, Lane.LONG: shares})
    (found,) = recoveries([(20.0, "mix"), (99.0, "rate")], path, Window(10.0, 60.0))
    assert found.periods == expected
    starved = RunPath(times, (4,) * 61, (4,) * 61, (0,) * 61, {Lane.SHORT: (0.0,) * 61, Lane.LONG: none})
    assert recoveries([(20.0, "mix")], starved, Window(10.0, 60.0))[0].periods is None


@pytest.mark.parametrize(("until", "expected"), [(40, [24.0, 12.0]), (26, [10.0, 0.0]), (80, [None, None])])
def test_what_began_before_the_next_change_may_last_past_it(until: int, expected: list[float | None]) -> None:
    times = tuple(float(n) for n in range(61))
    shares = tuple(0.5 if 24 <= n < until else 1.0 for n in range(61))
    attainment: dict[Lane, tuple[float | None, ...]] = {Lane.SHORT: (1.0,) * 61, Lane.LONG: shares}
    path = RunPath(times, (4,) * 61, (4,) * 61, (0,) * 61, attainment)
    found = recoveries([(20.0, "mix"), (32.0, "mix")], path, Window(10.0, 60.0))
    assert [each.periods for each in found] == expected


@pytest.fixture(scope="module")
def small() -> Suite:
    return parse_suite("small", SUITE)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("controllers"))


@pytest.fixture(scope="module")
def comparison(small: Suite, cache: Cache) -> Comparison:
    return compare(small, SETTINGS, cache=cache)


def test_all_arms_meet_the_same_arrivals(comparison: Comparison) -> None:
    """Only the roles differ: static arms never move, and one pool has none."""
    for n in range(len(SETTINGS.seeds)):
        arrived = [scored.runs[n].arrived for scored in comparison.scored]
        assert all(each == arrived[0] for each in arrived)
        assert sum(arrived[0].values()) > 50
    by_arm = {scored.arm: scored for scored in comparison.scored}
    assert list(by_arm) == list(ARMS)
    for arm, scored in by_arm.items():
        for run in scored.runs:
            assert run.path is not None
            assert 0.0 <= run.violations() <= 1.0
            assert len(run.recoveries) == 2
            pools = [a + b for a, b in zip(run.path.sp, run.path.lp, strict=True)]
            assert max(pools) == (3 if ARMS[arm].has_roles else 0)
            assert run.moves == 0 or arm not in (HALVES, MIXED, ROUTER)


def test_what_is_known_is_not_run_again(small: Suite, cache: Cache, comparison: Comparison) -> None:
    """A second comparison is equal, and all of it comes from the cache."""
    steps: list[Step] = []
    assert compare(small, SETTINGS, cache=cache, progress=steps.append) == comparison
    assert len(steps) == len(ARMS) * len(SETTINGS.seeds)
    assert all(step.cached for step in steps)


def test_the_report_follows_from_its_json(comparison: Comparison, tmp_path: Path) -> None:
    """Page and rows made from the JSON are those of the comparison itself; the picture is there."""
    path = write(comparison, tmp_path)
    again = read(tmp_path / "lab" / "controllers.json")
    assert page(again) == path.read_text()
    assert list(rows(again)) == list(rows(comparison))
    assert (tmp_path / "lab" / "controllers.png").stat().st_size > 10_000
    with (tmp_path / "lab" / "controllers.csv").open() as file:
        lines = list(csv.reader(file))
    assert len(lines) == 1 + len(ARMS) * len(SETTINGS.seeds)
    assert [str(cell) for cell in next(rows(comparison))] == lines[0]
    assert all(arm in path.read_text() for arm in ARMS)
    shown = table(comparison)
    assert [row[2] for row in shown.rows] == list(ARMS)
    (line,) = reading(comparison)
    assert OURS in line


def made(arm: str, short: int, long: int, *periods: float | None, overshoots: int = 0) -> Scored:
    """One run of 100 requests in each lane, so many of them missed."""
    arrived, missed = dict.fromkeys(Lane, 100), {Lane.SHORT: short, Lane.LONG: long}
    recoveries = tuple(Recovery(10.0, "mix", each) for each in periods)
    run = RunScore(1, 50.0, arrived, missed, 40.0, overshoots + 1, overshoots, recoveries, None)
    return Scored("flip", 0.25, arm, (run,))


@pytest.mark.parametrize(
    ("ours", "router", "expected"),
    [
        (made(OURS, 0, 7, 20.0), made(ROUTER, 0, 9), ("20", "yes", 0, "yes", "-30 %", "yes", "-22 %", "yes")),
        (
            made(OURS, 0, 8, 21.0, overshoots=2),
            made(ROUTER, 0, 9),
            ("21", "no", 2, "no", "-20 %", "no", "-11 %", "no"),
        ),
        (
            made(OURS, 90, 1, None),
            made(ROUTER, 0, 0),
            ("never", "no", 0, "yes", "-90 %", "yes", "it misses none", "no"),
        ),
    ],
)
def test_the_controller_is_judged_by_what_is_asked_for(
    ours: Scored, router: Scored, expected: tuple[object, ...]
) -> None:
    """Against static pools only in lanes of which they miss a twentieth: the short lane is none here."""
    halves = made(HALVES, 4, 10)
    hours = (Hour(OURS, "90:10", 50.0, 0, 3, 0.01), Hour(ROUTER, "90:10", 50.0, 1, 0, 0.0))
    found = Comparison("small", SETTINGS, {"flip": 100.0}, (ours, halves, router), {}, hours)
    (row,) = asked_table(found).rows
    assert row[2:] == expected
    assert [line[-1] for line in hour_table(found).rows] == ["yes", "no"]
    assert least_gain(ours, made(HALVES, 1, 1), router) is None


@pytest.mark.parametrize(("long", "verdict"), [(2, "yes"), (4, "yes"), (5, "no")])
def test_auto_is_judged_by_the_better_of_one_pool_and_two(long: int, verdict: str) -> None:
    arms = (made(OURS, 0, 8), made(MIXED, 0, 4), made(AUTO, 1, long))
    (row,) = mode_table(Comparison("small", SETTINGS, {"flip": 100.0}, arms, {}, ())).rows
    assert row[2:] == ("4.00", "8.00", f"{long:.2f}", f"{long - 4:+.2f}", verdict)


def test_each_mix_of_a_case_can_stand_still() -> None:
    """All that is left is a rate, so that a run scales with it."""
    mixes = [still_cases(case) for case in load_suite("drift").cases]
    assert [still.name for still in mixes[0]] == ["90:10", "10:90"]
    assert [len(found) for found in mixes] == [2, 2, 2, 1, 1]
    assert all(not changes(still) and not still.has_set_times for found in mixes for still in found)


@pytest.mark.parametrize("arm", [OURS, AUTO])
def test_nobody_moves_under_constant_load(arm: str) -> None:
    """The hour at reduced length: eight instances at half of their capacity."""
    still = still_cases(load_suite("drift").cases[0])[1]
    found = hour(still, arm, 16.0, 180.0)
    assert found.moves == 0
    assert found.violations < 0.05


def test_spreads_read_well() -> None:
    assert spread([1.0]) == "1.00"
    assert spread([1.0, 1.0, 1.0]) == "1.00 [1.00, 1.00]"
    assert spread([0.0, 1.0]).startswith("0.50 [0.00, ")


@pytest.mark.parametrize(
    ("field", "value"), [("loads", (0.0,)), ("seeds", ()), ("seeds", (1, 1)), ("hour_loads", (2.0,))]
)
def test_bad_settings_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        CompareSettings(**{field: value})  # type: ignore[arg-type]
