"""The search for knobs: the same for every policy, within a budget, never worse than the default."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_helpers import SHORT_RUNS, point, small_case

from service.policies.registry import POLICIES
from service.sim.figures import PointFigures
from service.sim.goodput import Probe
from service.sim.tasks import LabSettings, tune_policy
from service.sim.tuning import TuningSettings, tune, with_knobs

Knobs = Mapping[str, tuple[float, ...]]


def knobs_of(spec: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in spec.partition(":")[2].split(",") if pair)


class Policies:
    """A policy whose limit depends on its knobs; strain is rate / limit. Notes what was run."""

    def __init__(self, limit_of: Callable[[dict[str, str]], float]) -> None:
        self._limit_of = limit_of
        self.specs: list[str] = []

    def probe_of(self, spec: str) -> Probe:
        def probe(rate_per_s: float, level: float) -> PointFigures:
            self.specs.append(spec)
            strain = rate_per_s / self._limit_of(knobs_of(spec))
            missed = min(1.0, 0.05 * strain**4)
            return point(rate_per_s, 1.0 - missed, ratio_p95=strain if strain < 5.0 else None)

        return probe


def separable(best: Mapping[str, float]) -> Callable[[dict[str, str]], float]:
    def limit_of(knobs: dict[str, str]) -> float:
        return 100.0 * (
            1.0 + sum(0.2 for key, value in best.items() if float(knobs.get(key, "nan")) == value)
        )

    return limit_of


@settings(max_examples=40)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3), min_size=1, max_size=4),
    st.floats(0.3, 3.0),
)
def test_knobs_that_do_not_interact_are_all_found(best: dict[str, int], guess: float) -> None:
    """With a budget for every value once, one coordinate after the other is enough."""
    values: Knobs = dict.fromkeys("abcd", (0, 1, 2, 3))
    policies = Policies(separable(best))
    tuned = tune("p", values, policies.probe_of, 100.0 * guess, TuningSettings(budget=40))
    assert {key: float(value) for key, value in knobs_of(tuned.spec).items()} == best
    assert tuned.limit_per_s == pytest.approx(100.0 + 20.0 * len(best), rel=0.1)
    assert tuned.runs == len(policies.specs)


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(0, 4), st.integers(0, 2**32))
def test_the_budget_is_kept_and_the_winner_is_no_worse_than_the_default(
    budget: int, knobs: int, seed: int
) -> None:
    import random

    def limit_of(knobs: dict[str, str]) -> float:
        return random.Random(f"{seed} {sorted(knobs.items())}").uniform(50.0, 150.0)

    values: Knobs = dict.fromkeys("abcd"[:knobs], (0, 1, 2, 3))
    policies = Policies(limit_of)
    tuned = tune("p", values, policies.probe_of, 100.0, TuningSettings(budget=budget))
    assert len(set(policies.specs)) <= budget
    assert limit_of(knobs_of(tuned.spec)) >= limit_of({})
    again = tune("p", values, Policies(limit_of).probe_of, 100.0, TuningSettings(budget=budget))
    assert again == tuned


def test_knobs_that_do_nothing_stay_at_the_default() -> None:
    tuned = tune("p", {"a": (5, 1, 9)}, Policies(lambda _: 100.0).probe_of, 80.0, TuningSettings())
    assert tuned.spec == "p"
    assert [trial.spec for trial in tuned.trials] == ["p", "p:a=1", "p:a=9"]


def test_the_first_other_value_of_every_knob_comes_before_the_second_of_any() -> None:
    policies = Policies(lambda _: 100.0)
    values: Knobs = {"a": (0, 1, 2), "b": (0, 1, 2)}
    tuned = tune("p", values, policies.probe_of, 80.0, TuningSettings(budget=4))
    assert [trial.spec for trial in tuned.trials] == ["p", "p:a=1", "p:b=1", "p:a=2"]


def test_a_knob_that_was_given_is_not_tuned() -> None:
    tuned = tune(
        "p:a=7",
        {"a": (0, 1), "b": (0, 1)},
        Policies(separable({"a": 1, "b": 1})).probe_of,
        80.0,
        TuningSettings(),
    )
    assert tuned.spec == "p:a=7,b=1"


def test_candidates_are_told_apart_where_none_of_them_keeps_up() -> None:
    """Nothing is sustained at any rate that is tried, and still the better one wins."""

    def probe_of(spec: str) -> Probe:
        missed = 0.2 if spec == "p:a=1" else 0.4
        return lambda rate, level: point(rate, 1.0 - missed, ratio_p95=None)

    tuned = tune("p", {"a": (0, 1, 2)}, probe_of, 80.0, TuningSettings())
    assert tuned.spec == "p:a=1"
    assert tuned.limit_per_s == 0.0


def test_what_wins_at_one_rate_must_win_at_the_limit_too() -> None:
    """a=1 is best at the common rate and falls off a cliff above it; a=2 is nearly as good and goes on."""

    def probe_of(spec: str) -> Probe:
        def probe(rate_per_s: float, level: float) -> PointFigures:
            strain = {"p": rate_per_s / 100.0, "p:a=1": 0.5, "p:a=2": 0.55}[spec]
            if spec == "p:a=1" and rate_per_s > 150.0:
                strain = 4.0
            return point(rate_per_s, 0.999 if strain <= 1.0 else 0.9, ratio_p95=strain)

        return probe

    assert tune("p", {"a": (0, 1, 2)}, probe_of, 100.0, TuningSettings()).spec == "p:a=2"


@given(st.sampled_from(sorted(POLICIES)))
def test_every_policy_names_its_default_first_and_knobs_that_exist(name: str) -> None:
    from service.core.settings import SchedulerSettings
    from service.policies.registry import parse

    usual = SchedulerSettings()
    kind = POLICIES[name]
    for key, values in kind.search.items():
        assert len(set(values)) == len(values) >= 2
        assert parse(with_knobs(name, {key: values[0]}), usual) == parse(name, usual)
        for value in values[1:]:
            assert parse(with_knobs(name, {key: value}), usual) != parse(name, usual)


def test_tuning_runs_on_its_own_seed_and_is_no_worse_than_the_default() -> None:
    case = small_case()
    lab = LabSettings(metric=SHORT_RUNS, tuning=TuningSettings(budget=3, run_ratio=1.0))
    tuned = tune_policy(case, "fcfs", lab)
    assert case.tuning_seed not in case.seeds
    assert tuned.spec.startswith("fcfs")
    assert tuned.limit_per_s > 0.0
    assert len({trial.spec for trial in tuned.trials}) <= 3
    default = [trial for trial in tuned.trials if trial.spec == "fcfs"]
    chosen = [trial for trial in tuned.trials if trial.spec == tuned.spec]
    assert (chosen[0].strain or 9.0) <= (default[0].strain or 9.0)


@pytest.mark.parametrize("wrong", [{"budget": 0}, {"finalists": 0}, {"rate_ratio": 2.0}, {"run_ratio": 0.0}])
def test_settings_that_make_no_sense_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TuningSettings(**wrong)  # type: ignore[arg-type]
