"""What a comparison says: the document's schema, the goals, and the order of the turns."""

from __future__ import annotations

import json
import math

import pytest
from rich.console import Console
from test_capacity import COST, PROFILES
from test_workload import count_tokens

from service.bench import stats
from service.bench.compare import Plan, Served, Settings, make_plan
from service.bench.loadgen import Ending, Observation
from service.bench.render import render
from service.bench.report import GOALS, Report, make_report, to_json
from service.bench.stats import Round
from service.bench.workload import Label, PlannedRequest

SERVED = Served(COST, PROFILES, count_tokens)


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "RESAMPLES", 50)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(Settings(rounds=3, seconds=10.0), SERVED)


def answered(planned: PlannedRequest, ttft_s: float) -> Observation:
    return Observation(
        planned.request_id,
        planned.prompt.label,
        planned.send_s,
        planned.target_s,
        Ending.COMPLETED,
        ttft_s=ttft_s,
        itl_s=(0.02,) * 7,
        end_s=planned.send_s + ttft_s + 0.14,
        output_tokens=8,
    )


def report_of(plan: Plan, short_s: dict[str, float], long_s: float = 2.0) -> Report:
    """Every request of a lane takes the same time under a policy."""
    rounds = {
        policy: [
            Round(tuple(answered(p, short if p.prompt.label is Label.SHORT else long_s) for p in part))
            for part in plan.rounds
        ]
        for policy, short in short_s.items()
    }
    return make_report(plan, rounds)


def test_the_document_has_the_keys_that_readers_rely_on(plan: Plan) -> None:
    document = json.loads(
        json.dumps(to_json(report_of(plan, {"fcfs": 0.5, "plaserve": 0.1})), allow_nan=False)
    )
    for policy, short_s, attainment in (("fcfs", 0.5, 0.0), ("plaserve", 0.1, 1.0)):
        arm = document[policy]
        for lane in ("short", "long"):
            assert set(arm[lane]["ttft_s"]) == {"mean", "p50", "p90", "p99"}
            assert 0.0 <= arm[lane]["attainment"] <= 1.0
        assert arm["short"]["ttft_s"]["p90"] == pytest.approx(short_s)
        assert arm["short"]["attainment"] == attainment
        assert arm["itl_s_p99"] == pytest.approx(0.02)
        assert arm["requests_per_s"] > 0.0
    assert document["ratios"]["plaserve"]["short_ttft_p90"]["value"] == pytest.approx(0.2)
    assert {goal["name"] for goal in document["goals"]} == {goal.ratio for goal in GOALS}


def test_what_was_not_measured_is_null(plan: Plan) -> None:
    nothing = Report(plan, {"fcfs": []}, make_report(plan, {"fcfs": [], "plaserve": []}).arms, {})
    document = json.loads(json.dumps(to_json(nothing), allow_nan=False))
    assert document["fcfs"]["short"]["ttft_s"]["p99"] is None
    assert document["fcfs"]["requests_per_s"] is None


@pytest.mark.parametrize(("short_s", "met"), [(0.20, True), (0.26, False)])
def test_a_missed_goal_is_called_missed(plan: Plan, short_s: float, met: bool) -> None:
    report = report_of(plan, {"fcfs": 0.5, "plaserve": short_s})
    verdict = next(v for v in report.verdicts() if v.goal.ratio == "short_ttft_p90")
    assert verdict.met is met
    assert verdict.certain
    console = Console(width=100)
    with console.capture() as shown:
        console.print(render(report))
    assert f"goal {'met   ' if met else 'missed'}  short TTFT p90" in shown.get()


def test_a_request_without_an_answer_breaks_the_comparison(plan: Plan) -> None:
    report = report_of(plan, {"fcfs": 0.5, "plaserve": 0.1})
    assert report.broken() == []
    first, *others = report.rounds["plaserve"][0].observations
    lost = Observation(
        first.request_id, first.label, first.send_s, first.target_s, Ending.FAILED, error="INTERNAL: x"
    )
    rounds = {**report.rounds, "plaserve": [Round((lost, *others)), *report.rounds["plaserve"][1:]]}
    assert make_report(plan, rounds).broken() == [f"plaserve {first.request_id}: failed, INTERNAL: x"]


def test_turns_alternate_and_each_policy_gets_every_round(plan: Plan) -> None:
    assert list(plan.turns()) == [
        (0, "fcfs"), (0, "plaserve"), (1, "plaserve"), (1, "fcfs"), (2, "fcfs"), (2, "plaserve"),
    ]  # fmt: skip


def test_a_plan_repeats_no_prompt_between_rounds_and_warm_up(plan: Plan) -> None:
    texts = [p.prompt.text for part in (plan.warm_up, *plan.rounds) for p in part]
    assert len(set(texts)) == len(texts)
    assert make_plan(plan.settings, SERVED) == plan


def test_long_targets_follow_the_cost_model(plan: Plan) -> None:
    longs = [p for part in plan.rounds for p in part if p.prompt.label is Label.LONG]
    assert longs
    by_size = sorted(longs, key=lambda p: p.prompt.tokens)
    assert by_size[-1].target_s > by_size[0].target_s > 0.4
    assert all(p.target_s == 0.4 for part in plan.rounds for p in part if p.prompt.label is Label.SHORT)


def test_bad_settings_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="policies"):
        Settings(policies=("fcfs", "fcfs"))
    with pytest.raises(ValueError, match="rounds"):
        Settings(rounds=0)
    with pytest.raises(ValueError, match="seconds"):
        Settings(seconds=math.inf)
