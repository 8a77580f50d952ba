"""Sizing a fleet, questions at one rate, and the page that shows a suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from service.core.types import Lane
from service.sim.cache import Cache
from service.sim.exhibits.interference import interference
from service.sim.figures import Verdict
from service.sim.page import lab_json, write_page
from service.sim.planner import plan_fleet, size_plot, split_plot
from service.sim.run_length import Load
from service.sim.suite import parse_suite
from service.sim.suite_report import case_table, policy_table, reference_table
from service.sim.suite_run import SuiteResult, run_suite
from service.sim.verdicts import best_peer, goodputs
from service.sim.whatif import ask, curve_plots, metric_for, question, rate_for, workload_of

SECONDS = 4.0
MIX = workload_of("lmsys_chat_1m:0.9,rag:0.1")


def test_a_plan_needs_no_fewer_than_capacity_and_more_for_more_load() -> None:
    case = question(MIX, model="qwen3-32b")
    found = [plan_fleet(case, ["plaserve"], rate, metric_for(SECONDS)) for rate in (15.0, 45.0)]
    needed = [plan.policies[0].needed for plan in found]
    assert None not in needed
    assert needed == sorted(needed, key=lambda n: n or 0)
    for plan in found:
        policy = plan.policies[0]
        assert policy.sizes[0].instances == plan.lowest
        assert [s.verdict for s in policy.sizes[:-1]].count(Verdict.SUSTAINED) == 0
        assert policy.sizes[-1].verdict is Verdict.SUSTAINED
        assert [(s.sp, s.lp) for s in plan.splits] == [
            (sp, policy.sizes[-1].instances - sp if sp else 0) for sp in range(policy.sizes[-1].instances)
        ]
    assert size_plot(found[1]).series[0].name == "plaserve"
    assert split_plot(found[0]) is None or split_plot(found[0]).series  # type: ignore[union-attr]


def test_a_plan_refuses_a_closed_loop() -> None:
    case = question(workload_of("rag", concurrency=4), model="qwen3-32b")
    with pytest.raises(ValueError, match="closed loop"):
        plan_fleet(case, ["fcfs"], 10.0, metric_for(SECONDS))


def test_a_question_gives_every_policy_the_same_requests() -> None:
    case = question(MIX, model="llama-3.1-8b", instances=2)
    load = Load(case, metric_for(SECONDS), seed=1)
    rate = rate_for(case, load, rate_per_s=None, rate_scale=None, load_ratio=0.4)
    assert rate == pytest.approx(0.4 * load.capacity_per_s)
    answers = ask(case, ["fcfs", "plaserve"], rate, load, log_of="plaserve")
    sent = [[r.request for r in a.result.records.values()] for a in answers]
    shared = min(map(len, sent))
    assert sent[0][:shared] == sent[1][:shared]
    assert [bool(a.result.log) for a in answers] == [False, True]
    plots = curve_plots(answers)
    assert [plot.name for plot in plots] == ["ttft_short", "ttft_long"]
    for plot in plots:
        for series in plot.series:
            assert list(series.y) == sorted(series.y)
            assert series.y[-1] <= 1.0


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rate_per_s": 3.0, "rate_scale": 2.0, "load_ratio": None}, "one of"),
        ({"rate_per_s": -1.0, "rate_scale": None, "load_ratio": None}, "above 0"),
        ({"rate_per_s": None, "rate_scale": 2.0, "load_ratio": None}, "rate-scale"),
    ],
)
def test_a_rate_that_makes_no_sense_is_refused(given: dict[str, float | None], named: str) -> None:
    case = question(MIX, model="qwen3-32b")
    with pytest.raises(ValueError, match=named):
        rate_for(case, Load(case, metric_for(SECONDS), 1), **given)


def test_workloads_by_name_get_the_arrivals_that_fit() -> None:
    assert workload_of("agent").arrivals == "sessions"
    assert workload_of("rag").arrivals == "poisson"
    assert workload_of("rag", concurrency=3).arrivals == "closed"
    assert workload_of("azure_conv").arrivals == "recorded"
    with pytest.raises(ValueError, match="rag:x"):
        workload_of("rag:x")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[SuiteResult, Path]:
    """A suite with one case that runs and one whose trace is nowhere."""
    parts = [["lmsys_chat_1m", 0.9], ["rag", 0.1]]
    case = {
        "model": "qwen3-32b",
        "seeds": [1],
        "workload": {"parts": parts},
        "limits": {"requests_max": 3000},
    }
    suite = parse_suite(
        "tiny",
        {
            "policies": ["fcfs", "plaserve"],
            "metric": {"window_s_min": 5.0, "window_targets_min": 5.0, "lane_requests_min": 30},
            "search": {"levels": [0.95], "tolerances": [0.2]},
            "tuning": {"budget": 1},
            "case": [
                {**case, "name": "mix"},
                {
                    **case,
                    "name": "gone",
                    "workload": {"parts": [["azure_conv", 1.0]], "arrivals": "recorded"},
                },
            ],
        },
    )
    folder = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.sim.traces._BESIDE", folder / "nowhere")
        patch.delenv("PLASERVE_TRACES", raising=False)
        return run_suite(suite, cache=Cache(folder), directory=folder), folder


def test_a_missing_trace_is_skipped_with_its_source_and_digest(ran: tuple[SuiteResult, Path]) -> None:
    result, folder = ran
    assert [r.case.name for r in result.results] == ["mix"]
    assert [s.case for s in result.skipped] == ["gone"]
    assert "sha256" in result.skipped[0].why
    assert "github.com" in result.skipped[0].why
    assert (folder / "cases" / "mix.json").is_file()
    assert (folder / "points.parquet").is_file()


def test_the_tables_agree_with_the_search(ran: tuple[SuiteResult, Path]) -> None:
    result, _ = ran
    summary = result.summary()
    case = summary["cases"]["mix"]
    ours = next(g for g in goodputs(case, "0.95") if g.policy == "plaserve")
    peer = best_peer(case, "0.95")
    assert peer is not None
    assert peer.policy == "fcfs"
    row = dict(zip(case_table(summary, "0.95").columns, case_table(summary, "0.95").rows[0], strict=True))
    assert row["plaserve"] == ours.per_s
    assert row["ratio"] == (ours.per_s / peer.per_s if peer.per_s else None)
    assert row["regret"] == pytest.approx(1.0 - ours.ratio)
    assert sum(int(str(r[3])) for r in policy_table(summary, "0.95").rows) >= 1
    assert [r[1] for r in reference_table(summary).rows] == ["fcfs", "plaserve"]


def test_the_page_follows_from_its_json_alone(ran: tuple[SuiteResult, Path], tmp_path: Path) -> None:
    result, _ = ran
    data = lab_json([interference()], [result])
    first = write_page(data, tmp_path / "one")
    again = json.loads((tmp_path / "one" / "lab" / "lab.json").read_text())
    second = write_page(again, tmp_path / "two")
    assert first.read_bytes() == second.read_bytes()
    for picture in (tmp_path / "one" / "lab").iterdir():
        assert picture.read_bytes() == (tmp_path / "two" / "lab" / picture.name).read_bytes()
    text = first.read_text()
    assert "gone" in text
    assert all(
        (tmp_path / "one" / part.split(")")[0]).is_file()
        for part in text.split("](")[1:]
        if part.startswith("lab/")
    )


def test_a_second_run_takes_everything_from_the_cache(ran: tuple[SuiteResult, Path]) -> None:
    result, folder = ran
    steps = []
    again = run_suite(
        result.suite, cases=[result.suite.case("mix")], cache=Cache(folder), progress=steps.append
    )
    assert all(step.cached for step in steps)
    assert again.results == result.results
    assert {Lane.SHORT, Lane.LONG} >= set(again.results[0].policies[0].seeds[0].points[0].lanes)
