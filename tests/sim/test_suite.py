"""Suites as data: what the package brings loads, `vary` multiplies, mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.policies import POLICIES
from service.sim.lab_policies import is_known
from service.sim.suite import expanded, load_suite, parse_suite, suite_names

CASE = {"name": "a", "model": "qwen3-32b", "workload": {"parts": [["lmsys_chat_1m", 1.0]]}}


@pytest.mark.parametrize("name", suite_names())
def test_every_suite_of_the_package_loads(name: str) -> None:
    suite = load_suite(name)
    names = [case.name for case in suite.cases]
    assert names
    assert len(set(names)) == len(names)
    assert all(map(is_known, suite.policies))


def test_the_quick_suite_is_small_and_the_standard_one_is_the_metric_in_full() -> None:
    quick, standard = load_suite("quick"), load_suite("standard")
    assert len(quick.cases) <= 12
    assert all(case.limits.requests_max <= 20_000 and case.instances <= 8 for case in quick.cases)
    assert all(len(case.seeds) == 1 for case in quick.cases)
    metric = standard.settings.metric
    assert (metric.window_s_min, metric.window_targets_min, metric.lane_requests_min) == (60.0, 100.0, 2000)
    assert standard.settings.search.levels == (0.95, 0.99)
    assert standard.policies == tuple(POLICIES)
    assert all(len(case.seeds) == 3 for case in standard.cases)
    packed = {case.name for case in standard.cases if case.engine == "packed"}
    like = {case.name for case in standard.cases if case.engine == "trtllm_like"}
    assert len(like) >= len(packed) / 2


def test_vary_makes_every_combination_once() -> None:
    tables = list(expanded({**CASE, "vary": {"model": ["qwen3-32b", "llama-3.1-8b"], "instances": [1, 8]}}))
    assert {(t["model"], t["instances"]) for t in tables} == {
        ("qwen3-32b", 1), ("qwen3-32b", 8), ("llama-3.1-8b", 1), ("llama-3.1-8b", 8),
    }  # fmt: skip
    assert [t["name"] for t in tables] == ["a-32b-1", "a-32b-8", "a-8b-1", "a-8b-8"]
    assert all("vary" not in t for t in tables)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"case": [CASE], "policy": ["fcfs"]}, "policy"),
        ({"case": [CASE], "policies": ["fifo"]}, "fifo"),
        ({"case": [CASE], "metric": {"window": 3}}, "metric: unknown key 'window'"),
        ({"case": [CASE], "search": {"levels": [1.5]}}, "search"),
        ({"case": []}, "no \\[\\[case\\]\\]"),
        ({"case": [{**CASE, "instanzes": 3}]}, "case a: instanzes"),
        ({"case": [{**CASE, "engine": "warp"}]}, "engine"),
        ({"case": [CASE, CASE]}, "twice"),
    ],
)
def test_a_mistake_is_an_error_that_names_it(data: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_suite("mine", data)


def test_a_suite_is_also_a_file_and_an_unknown_one_says_which_exist(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[case]]\nname = "x"\nmodel = "qwen3-32b"\nworkload = {parts = [["rag", 1.0]]}\n')
    assert load_suite(str(path)).name == "mine"
    assert load_suite(str(path)).case("x").instances == 1
    with pytest.raises(ValueError, match="has no case 'y'; it has x"):
        load_suite(str(path)).case("y")
    with pytest.raises(ValueError, match="quick"):
        load_suite("slow")
    path.write_text("case = [")
    with pytest.raises(ValueError, match="suite mine"):
        load_suite(str(path))
