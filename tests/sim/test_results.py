"""Cases run, results written and kept: the same bytes whoever ran them, and no result that has gone stale."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_helpers import SHORT_RUNS, lane_figures, point, small_case
from scipy import stats

from service.core.types import Lane
from service.sim.bounds import Bound
from service.sim.cache import Cache, write_whole
from service.sim.case import Case, cases_of
from service.sim.code_digest import source_digest
from service.sim.estimate import estimate
from service.sim.experiment import Lab, Progress, run_case
from service.sim.goodput import Goodput, Search, SearchSettings
from service.sim.results import (
    CaseResult,
    PolicyResult,
    case_summary,
    dumped,
    goodput_interval,
    loaded,
    ratio_interval,
    read_case,
    rows,
    summary,
    t_interval,
    write_case,
    write_rows,
    write_summary,
)
from service.sim.tasks import LabSettings, SeedBounds, SeedScore
from service.sim.tuning import TuningSettings

COARSE = LabSettings(
    metric=SHORT_RUNS,
    search=SearchSettings((0.95,), (0.2,), step_ratio=0.3),
    tuning=TuningSettings(budget=2, limit_tolerance=0.3, run_ratio=1.0),
    bound_tolerance=0.1,
)
POLICIES_RUN = ("chunked", "fcfs")


CASE = small_case(seeds=[1, 2], limits={"requests_max": 2000})


@dataclass
class First:
    """The first run of the case, with its cache."""

    result: CaseResult
    directory: Path
    seen: list[Progress]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> First:
    directory = tmp_path_factory.mktemp("lab")
    seen: list[Progress] = []
    return First(run_case(CASE, POLICIES_RUN, COARSE, seen.append, cache=Cache(directory)), directory, seen)


@pytest.fixture
def result(first: First) -> CaseResult:
    return first.result


@pytest.fixture
def kept(first: First, tmp_path: Path) -> Path:
    """A copy of its cache."""
    return Path(shutil.copytree(first.directory, tmp_path / "lab"))


# --- running ---


def test_results_do_not_depend_on_the_number_of_workers(result: CaseResult) -> None:
    again = run_case(CASE, POLICIES_RUN, COARSE, workers=2)
    assert dumped(again) == dumped(result)


def test_a_case_is_bounds_knobs_and_scores(result: CaseResult) -> None:
    assert [bounds.seed for bounds in result.bounds] == [1, 2]
    assert [policy.policy for policy in result.policies] == list(POLICIES_RUN)
    for policy in result.policies:
        assert policy.tuned is not None
        assert [score.seed for score in policy.seeds] == [1, 2]
        for score, bounds in zip(policy.seeds, result.bounds, strict=True):
            assert score.search is not None
            assert 0.0 < score.search.at(0.95).low_per_s <= bounds.bounds[0].per_s
            (common,) = score.points
            assert common.complete
            assert common.rate_per_s == pytest.approx(0.5 * bounds.bounds[0].per_s)


def test_every_policy_meets_the_others_at_a_share_of_the_best_peer(result: CaseResult) -> None:
    """On each seed at one rate, that of the best peer there; the runs go to their end."""
    best = [max(policy.goodput(0.95)[n].low_per_s for policy in result.policies) for n in range(2)]
    for policy in result.policies:
        assert [point.seed for point in policy.peer_points] == [1, 2]
        assert [p.rate_per_s for p in policy.peer_points] == pytest.approx([0.7 * b for b in best])
        assert all(point.complete for point in policy.peer_points)
    assert case_summary(result)["policies"]["fcfs"]["peer_points"][1]["seed"] == 2
    assert sum(row["stage"] == "peer" for row in rows(result)) == 2 * 2 * len(Lane)


def test_no_mean_of_the_short_lane_is_below_that_of_shorts_alone(result: CaseResult) -> None:
    """The bound on the mean: every short has at least the time that it takes alone."""
    for bounds in result.bounds:
        assert bounds.short_alone_s is not None
        for policy in result.policies:
            for run in (*policy.seeds[bounds.seed - 1].points, policy.peer_points[bounds.seed - 1]):
                short = run.lanes[Lane.SHORT]
                assert short.ttft_s_mean is not None
                assert short.answered < short.arrived or short.ttft_s_mean >= bounds.short_alone_s


def test_ours_alone_have_no_peer_to_follow() -> None:
    case = replace(CASE, seeds=(1,))
    settings = replace(COARSE, tuning=None)
    seen: list[Progress] = []
    found = run_case(case, ["plaserve", "plaserve-due"], settings, seen.append)
    assert [policy.peer_points for policy in found.policies] == [(), ()]
    assert seen[-1].done == seen[-1].total == 3
    assert case_summary(found)["policies"]["plaserve"]["ours_over"]["0.95"]["value"] == 1.0


def test_a_case_with_rates_of_its_own_is_run_at_them() -> None:
    fixed = run_case(small_case(rates_per_s=[2.0, 4.0], limits={"requests_max": 1000}), ["fcfs"], COARSE)
    (score,) = fixed.policies[0].seeds
    assert [p.rate_per_s for p in score.points] == [2.0, 4.0]
    assert fixed.bounds == ()
    assert case_summary(fixed)["policies"]["fcfs"]["goodput"] == {}


def test_a_closed_loop_is_one_point_without_a_rate() -> None:
    mix = {"parts": [["lmsys_chat_1m", 0.85], ["rag", 0.15]], "arrivals": "closed", "concurrency": 8}
    closed = run_case(small_case(workload=mix, limits={"window_s": 20.0}), ["fcfs"], COARSE)
    (score,) = closed.policies[0].seeds
    assert [p.rate_per_s for p in score.points] == [None]
    assert score.points[0].requests_per_s > 1.0
    assert loaded(CaseResult, dumped(closed)) == closed


def test_what_cannot_run_is_said_before_anything_runs() -> None:
    with Lab(COARSE) as lab:
        with pytest.raises(ValueError, match="unknown policy 'nope'"):
            lab.run(small_case(), ["nope"])
        with pytest.raises(ValueError, match="unknown knob 'depth'"):
            lab.run(small_case(), ["fcfs:depth=1"])
        with pytest.raises(ValueError, match="each once"):
            lab.run(small_case(), ["fcfs", "fcfs"])
        with pytest.raises(ValueError, match=r"limits.requests_max is 4000, too few .* raise it to \d+"):
            lab.run(small_case(instances=300), ["fcfs"])
        with pytest.raises(ValueError, match=r"limits.window_s is 1, too short for lane_requests_min"):
            lab.run(small_case(limits={"window_s": 1.0}), ["fcfs"])


# --- cases ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instance": 2}, "case small: instance: Unexpected keyword argument"),
        ({"limits": {"requests": 2}}, "case small: limits.requests: Unexpected"),
        ({"workload": {"parts": [["rag", 1.0]], "arivals": "gamma"}}, "case small: workload.arivals"),
        ({"workload": {"parts": [["rag", -1.0]]}}, "case small: workload: parts: shares"),
        ({"model": "gpt-9"}, "gpt-9"),
        ({"engine": "abacus"}, "engine must be one of"),
        ({"roles": {"sp": 1, "lp": 1}}, "roles: 2 in all, but instances is 1"),
        ({"seeds": [1, 1]}, "seeds must be different"),
        ({"tuning_seed": 1}, "tuning_seed 1 is one of seeds"),
        ({"speeds": [{"from_s": 1.0, "factor": 2.0}]}, "limits.window_s must be given"),
        ({"outages": [{"instance": 3, "from_s": 1.0}]}, "outages: instance must be from 0 to 0, got 3"),
        ({"settings": {"sigma": 1.0}}, "settings: unknown key 'sigma'"),
    ],
)
def test_a_wrong_key_is_named_with_its_case(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="case small") as caught:
        small_case(**changes)
    assert message in str(caught.value)


def test_names_of_cases_are_their_own() -> None:
    table = {"name": "a", "workload": {"parts": [["rag", 1.0]]}, "model": "qwen3-32b"}
    with pytest.raises(ValueError, match="case a: the name comes twice"):
        cases_of([table, table])
    assert [case.name for case in cases_of([table, table | {"name": "b"}])] == ["a", "b"]


# --- intervals ---


@given(st.lists(st.floats(1.0, 100.0), min_size=2, max_size=8))
def test_the_interval_over_seeds_is_the_t_interval(values: list[float]) -> None:
    mean, low, high = t_interval(values)
    assert mean == pytest.approx(sum(values) / len(values))
    if max(values) - min(values) > 1e-6:
        expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
        assert (low, high) == (pytest.approx(expected.low, abs=1e-6), pytest.approx(expected.high, abs=1e-6))


def goodputs(*lows: float, width: float = 0.03) -> list[Goodput]:
    return [Goodput(0.95, low, low * (1.0 + width), True) for low in lows]


def test_with_one_seed_the_interval_is_the_bracket_and_says_so() -> None:
    found = goodput_interval(goodputs(10.0))
    assert found is not None
    assert (found.value, found.low, found.high, found.kind) == (10.0, 10.0, pytest.approx(10.3), "bracket")
    several = goodput_interval(goodputs(10.0, 11.0, 12.0))
    assert several is not None
    assert (several.kind, several.seeds) == ("t", 3)
    assert several.low < 11.0 < (several.high or 0.0)
    assert goodput_interval([Goodput(0.95, 0.0, 1.0, False)]) is None


@settings(max_examples=50)
@given(st.lists(st.floats(5.0, 50.0), min_size=2, max_size=6), st.floats(0.5, 3.0))
def test_a_ratio_is_taken_seed_by_seed(lows: list[float], factor: float) -> None:
    """What differs between seeds for both alike cancels: the interval of an exact ratio has no width."""
    found = ratio_interval(goodputs(*(factor * low for low in lows)), goodputs(*lows))
    assert found is not None
    assert (found.value, found.low, found.high) == (pytest.approx(factor),) * 3
    swapped = ratio_interval(goodputs(*lows), goodputs(*(factor * low for low in lows)))
    assert swapped is not None
    assert swapped.value == pytest.approx(1.0 / factor)


def test_a_ratio_to_nothing_is_none_and_one_seed_leaves_what_the_brackets_leave() -> None:
    assert ratio_interval(goodputs(1.0), goodputs(0.0)) is None
    single = ratio_interval(goodputs(20.0), goodputs(10.0))
    assert single is not None
    assert (single.value, single.low, single.high) == (
        2.0,
        pytest.approx(20.0 / 10.3),
        pytest.approx(20.6 / 10.0),
    )
    with pytest.raises(ValueError, match="shorter"):
        ratio_interval(goodputs(1.0, 2.0), goodputs(1.0))


# --- files ---


def leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def test_files_hold_everything_and_nothing_that_is_no_number(result: CaseResult, tmp_path: Path) -> None:
    path = write_case(result, tmp_path)
    assert path.name == "small.json"
    assert read_case(path) == result
    write_summary([result], tmp_path / "lab.json")
    for file in (path, tmp_path / "lab.json"):
        text = file.read_text()
        assert "NaN" not in text
        assert "Infinity" not in text
        numbers = [leaf for leaf in leaves(json.loads(text)) if isinstance(leaf, float)]
        assert numbers
        assert all(math.isfinite(number) for number in numbers)
    write_rows([result], tmp_path / "points.parquet")
    table = pq.read_table(tmp_path / "points.parquet").to_pylist()
    assert len(table) == len(rows(result))
    assert {row["policy"] for row in table} == set(POLICIES_RUN)
    assert {row["lane"] for row in table} == {"short", "long"}
    assert all(0.0 <= row["attainment"] <= 1.0 for row in table)
    path.write_text(path.read_text().replace('"schema_version": 2', '"schema_version": 0'))
    with pytest.raises(ValueError, match="schema_version is 0"):
        read_case(path)


def test_the_summary_has_what_a_reader_asks_for(result: CaseResult) -> None:
    found = summary([result])["cases"]["small"]["policies"]["fcfs"]
    assert found["goodput"]["0.95"]["per_s"]["kind"] == "t"
    assert 0.0 <= found["goodput"]["0.95"]["regret"] <= 1.0
    assert found["ratio_to_first"]["0.95"]["value"] > 0.0
    for common in found["points"]:
        for lane in ("short", "long"):
            assert {"attainment", "ttft_s_p50", "ttft_s_p99"} <= set(common["lanes"][lane])


def test_a_case_in_which_no_peer_has_goodput_is_listed_apart() -> None:
    def scored(policy: str, low: float) -> PolicyResult:
        found = Search((point(low or 1.0, 1.0),), (Goodput(0.95, low, low + 1.0, True),), False)
        return PolicyResult(policy, policy, None, (SeedScore(1, found, ()),), "")

    settings = replace(COARSE, tuning=None)
    bounds = (SeedBounds(1, (Bound(0.95, 50.0, 40.0),), 100),)

    def made(name: str, ours: float, theirs: float) -> CaseResult:
        policies = (scored("plaserve", ours), scored("fcfs", theirs))
        return CaseResult(small_case(name=name), settings, bounds, policies, "0")

    found = summary([made("both", 10.0, 5.0), made("ours", 10.0, 0.0), made("theirs", 0.0, 5.0)])
    assert found["without_goodput"] == ["ours"]


def test_what_is_unknown_is_null() -> None:
    unanswered = replace(lane_figures(0.0), ttft_s_mean=None, ttft_s_p99=None)
    bare = replace(point(1.0, 0.0), lanes={Lane.SHORT: unanswered}, itl_s_p99=None)
    plain = json.loads(dumped(bare))
    assert plain["lanes"]["short"]["ttft_s_p99"] is None
    assert loaded(type(bare), dumped(bare)) == bare


# --- what is kept ---


def run_again(case: Case, directory: Path) -> tuple[CaseResult, list[Progress]]:
    """With a cache; and the tasks that had to be run."""
    seen: list[Progress] = []
    found = run_case(case, POLICIES_RUN, COARSE, seen.append, cache=Cache(directory))
    return found, [task for task in seen if not task.cached]


def test_progress_counts_every_task(first: First) -> None:
    assert [task.done for task in first.seen] == list(range(1, 13))  # 2 bounds, 2 tunings, 4 scores, 4 points
    assert {task.total for task in first.seen} == {12}
    assert not any(task.cached for task in first.seen)


def test_a_second_run_finds_everything(first: First, kept: Path) -> None:
    again, ran = run_again(CASE, kept)
    assert dumped(again) == dumped(first.result)
    assert ran == []


def test_a_run_that_was_interrupted_goes_on_where_it_stopped(first: First, kept: Path) -> None:
    files = sorted((kept / "cache").glob("*/*.json"))
    assert len(files) == 12
    files[3].unlink()
    again, ran = run_again(CASE, kept)
    assert again == first.result
    assert len(ran) == 1


def test_a_change_of_one_policy_loses_only_its_own(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = source_digest
    monkeypatch.setattr(
        "service.sim.experiment.source_digest",
        lambda modules, policy=None: "changed" if policy == "fcfs" else real(modules, policy),
    )
    _, ran = run_again(CASE, kept)
    assert [task.policy for task in ran] == ["fcfs"] * 5


def test_fewer_seeds_under_another_name_are_known_already(kept: Path) -> None:
    fewer, ran = run_again(replace(CASE, seeds=(2,), name="fewer"), kept)
    assert ran == []
    assert [score.seed for score in fewer.policies[0].seeds] == [2]
    _, ran = run_again(replace(CASE, seeds=(2,), link_s=0.001), kept)
    assert len(ran) == 7


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "a.json"
    write_whole(path, b"old")

    def full(self: Path, data: bytes) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"


# --- what it will cost ---


def test_an_estimate_grows_with_policies_seeds_and_budget_and_is_of_the_right_order(first: First) -> None:
    found = estimate(CASE, POLICIES_RUN, COARSE)
    real = sum(score.requests for policy in first.result.policies for score in policy.seeds)
    real += sum(policy.tuned.requests for policy in first.result.policies if policy.tuned is not None)
    assert real / 3 < found.requests < 3 * real
    assert found.wall_s(2) == found.cpu_s / 2
    assert estimate(CASE, ("fcfs",), COARSE).requests < found.requests
    assert estimate(replace(CASE, seeds=(1,)), POLICIES_RUN, COARSE).requests < found.requests
    larger = replace(COARSE, tuning=TuningSettings(budget=6, run_ratio=1.0))
    assert estimate(CASE, POLICIES_RUN, larger).runs > found.runs
