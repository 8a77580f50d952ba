"""Verdicts on summaries made by hand, and those of a suite of ablations that was run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_helpers import SHORT_RUNS, lane_figures, point, small_case

from service.core.types import Lane
from service.sim.ablation_report import ablation_table, is_ablation, worth_table
from service.sim.bounds import Bound
from service.sim.exhibits.exhibit import Table
from service.sim.figures import PointFigures
from service.sim.goodput import Goodput, Search, SearchSettings
from service.sim.results import CaseResult, PolicyResult, summary
from service.sim.tasks import LabSettings, SeedBounds, SeedScore
from service.sim.verdicts import (
    against_best,
    at_peer_rate,
    decode_table,
    means_table,
    peer_rate_table,
    verdict_table,
)

SETTINGS = LabSettings(metric=SHORT_RUNS, search=SearchSettings((0.95,), (0.05,)), tuning=None)
BOUND = 100.0


def at(
    short_s: float,
    long_p99_s: float | None = 1.0,
    attainment: float = 1.0,
    decode: tuple[float, float] = (0, 0),
) -> PointFigures:
    """A run at the common rate. decode: tokens/s, P99 of the gaps."""
    short = replace(lane_figures(attainment), ttft_s_mean=short_s)
    long = replace(lane_figures(attainment), ttft_s_p99=long_p99_s)
    lanes = {Lane.SHORT: short, Lane.LONG: long}
    return replace(point(50.0, 1.0), lanes=lanes, decode_tokens_per_s=decode[0], itl_s_p99=decode[1] or None)


def policy(name: str, lows: tuple[float, ...], common: PointFigures | None = None) -> PolicyResult:
    scores = []
    for seed, low in enumerate(lows, 1):
        found = Search((point(low or 1.0, 1.0),), (Goodput(0.95, low, 1.04 * low or 1.0, True),), False)
        scores.append(SeedScore(seed, found, (at(0.1),)))
    return PolicyResult(name, name, None, tuple(scores), "", () if common is None else (common,) * len(lows))


def summed(*cases: list[PolicyResult], alone_s: float = 0.01) -> dict[str, Any]:
    results = []
    for number, policies in enumerate(cases):
        seeds = tuple(score.seed for score in policies[0].seeds)
        bounds = tuple(SeedBounds(seed, (Bound(0.95, BOUND, None),), 100, alone_s) for seed in seeds)
        case = small_case(name=f"c{number}", seeds=list(seeds))
        results.append(CaseResult(case, SETTINGS, bounds, tuple(policies), "0"))
    return summary(results)


def column(table: Table, name: str) -> list[object]:
    return [row[table.columns.index(name)] for row in table.rows]


@pytest.mark.parametrize(
    ("ours", "peer", "no_worse", "far_better", "regret_ratio"),
    [
        (80.0, 50.0, "yes", "yes", 0.4),
        (50.0, 50.0, "yes", "no", 1.0),
        (49.0, 50.0, "yes", "no", 1.02),  # the brackets of both searches overlap
        (40.0, 50.0, "no", "no", 1.2),
        (92.0, 91.0, "yes", "yes", 8 / 9),
        (10.0, 0.0, "yes", "yes", 0.9),
        (0.0, 10.0, "no", "no", 10 / 9),
    ],
)
def test_goodput_is_judged_against_the_best_peer(
    ours: float, peer: float, no_worse: str, far_better: str, regret_ratio: float
) -> None:
    """The best of all peers, by the ratio, its interval and the bound."""
    policies = [policy("plaserve", (ours,)), policy("fcfs", (0.5 * peer,)), policy("chunked", (peer,))]
    found = against_best(summed(policies)["cases"]["c0"], "0.95")
    assert found is not None
    assert (found.peer.per_s, found.no_worse, found.far_better) == (peer, no_worse, far_better)
    assert found.regret_ratio == pytest.approx(regret_ratio)


def test_an_ablation_is_no_peer() -> None:
    policies = [policy("plaserve", (10.0,)), policy("plaserve-due", (90.0,)), policy("fcfs", (5.0,))]
    found = against_best(summed(policies)["cases"]["c0"], "0.95")
    assert found is not None
    assert found.peer.policy == "fcfs"


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(1.0, 90.0), st.floats(0.5, 3.0)), min_size=2, max_size=5),
    st.integers(1, 3),
)
def test_means_are_geometric_and_their_interval_holds_them(
    cases: list[tuple[float, float]], seeds: int
) -> None:
    """Over cases; of seeds where there are two or more, else of cases. An equal ratio leaves no width."""
    made = [
        [policy("plaserve", (ratio * low,) * seeds), policy("fcfs", (low,) * seeds)] for low, ratio in cases
    ]
    table = means_table(summed(*made), "0.95")
    row = dict(zip(table.columns, table.rows[0], strict=True))
    mean = math.exp(sum(math.log(ratio) for _, ratio in cases) / len(cases))
    assert row["geometric mean"] == pytest.approx(mean)
    assert row["of"] == (f"{seeds} seeds" if seeds > 1 else "cases, bootstrap")
    low, high = (float(end) for end in str(row["95 % interval"]).strip("[]").split(","))
    assert 0.99 * low <= mean <= 1.01 * high
    if seeds > 1:
        assert low == pytest.approx(high, rel=1e-2)
    ratios = [ratio for _, ratio in cases]
    assert min(ratios) * 0.99 <= low <= high <= max(ratios) * 1.01


def test_cases_without_goodput_are_counted_and_not_averaged() -> None:
    made = [[policy("plaserve", (20.0,)), policy("fcfs", (low,))] for low in (10.0, 10.0, 0.0)]
    table = means_table(summed(*made), "0.95")
    assert column(table, "over") == ["fcfs", "best peer"]
    assert column(table, "cases") == [2, 2]
    assert column(table, "left out") == [1, 1]
    assert column(table, "geometric mean") == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(
    ("ours_s", "peer_s", "alone_s", "attainment", "verdict"),
    [
        (0.06, 0.1, 0.01, 1.0, "yes"),
        (0.08, 0.1, 0.01, 1.0, "no"),
        (0.08, 0.1, 0.075, 1.0, "bound"),
        (0.06, 0.1, 0.01, 0.9, "no"),  # quick, but one in ten is late
    ],
)
def test_the_short_lane_is_judged_where_both_attain(
    ours_s: float, peer_s: float, alone_s: float, attainment: float, verdict: str
) -> None:
    """Against the quickest of the peers that meet both targets: one that starves the long lane is none."""
    policies = [
        policy("plaserve", (60.0,), at(ours_s, attainment=attainment)),
        policy("fcfs", (50.0,), at(2 * peer_s)),
        policy("chunked", (40.0,), at(peer_s)),
        policy("shortest_aging", (10.0,), at(0.1 * peer_s, attainment=0.5)),
    ]
    data = summed(policies, alone_s=alone_s)
    found = at_peer_rate(data["cases"]["c0"], "0.95")
    assert found is not None
    assert (found.peer, found.short) == ("chunked", verdict)
    assert column(peer_rate_table(data, "0.95"), "<= 0.7") == [verdict]


@pytest.mark.parametrize(
    ("ours", "base", "verdict"),
    [(1.1, 1.0, "yes"), (1.2, 1.0, "no"), (9.0, None, "yes"), (None, 1.0, "no"), (None, None, "")],
)
def test_the_tail_of_the_long_lane_is_judged_against_fcfs(
    ours: float | None, base: float | None, verdict: str
) -> None:
    """A P99 that is infinite, since too many got no answer, loses to any that is not."""
    data = summed([policy("plaserve", (60.0,), at(0.1, ours)), policy("fcfs", (50.0,), at(0.2, base))])
    found = at_peer_rate(data["cases"]["c0"], "0.95")
    assert found is not None
    assert found.long == verdict
    assert peer_rate_table(data, "0.95").rows


def test_decode_is_judged_by_tokens_and_gaps() -> None:
    def made(ours: tuple[float, float]) -> dict[str, Any]:
        base = policy("fcfs", (50.0,), at(0.2, decode=(100.0, 0.2)))
        return summed([policy("plaserve", (60.0,), at(0.1, decode=ours)), base])

    for ours, verdict in (((100.0, 0.2), "yes"), ((95.0, 0.1), "no"), ((120.0, 0.3), "no")):
        assert column(decode_table(made(ours), "0.95"), "no worse") == [verdict]
    assert not decode_table(made((0.0, 0.0)), "0.95").rows
    assert verdict_table(made((100.0, 0.2)), "0.95").rows[-1][:3] == (
        "decode tokens/s and ITL P99 no worse",
        1,
        1,
    )


def test_the_count_of_cases_is_that_of_the_tables() -> None:
    far = [policy("plaserve", (80.0,), at(0.05)), policy("fcfs", (50.0,), at(0.2))]
    near = [policy("plaserve", (51.0,), at(0.19, 2.0)), policy("fcfs", (50.0,), at(0.2))]
    table = verdict_table(summed(far, near), "0.95")
    assert column(table, "of") == [2] * 5
    assert column(table, "holds in") == [2, 1, 1, 1, 1]
    assert "0.69: no" in str(table.rows[2][-1])


def test_worth_is_without_over_with() -> None:
    """By case and over the cases; what is off is told, and where most is lost."""
    data = summed(
        [policy("plaserve", (40.0,)), policy("plaserve-due", (20.0,)), policy("plaserve-spill", (40.0,))],
        [policy("plaserve", (10.0,)), policy("plaserve-due", (9.0,)), policy("plaserve-spill", (0.0,))],
    )
    assert is_ablation(data)
    table = worth_table(data, "0.95")
    assert column(table, "without") == ["due", "spill"]
    assert column(table, "goodput x") == pytest.approx([math.sqrt(0.45), 1.0])
    assert column(table, "short mean x") == pytest.approx([1.0, 1.0])
    assert column(table, "most lost in") == ["c0, 0.5", None]
    assert column(table, "left out") == [0, 1]
    by_case = ablation_table(data, "0.95")
    assert column(by_case, "goodput") == [40.0, 20.0, 40.0, 10.0, 9.0, 0.0]
    assert str(by_case.rows[1][4]).startswith("[0.48")
    assert not data["without_goodput"]
    assert not is_ablation(summed([policy("plaserve", (1.0,)), policy("fcfs", (1.0,))]))
