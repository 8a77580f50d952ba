"""The benchmark of the simulator runs, and its load is what it says."""

from __future__ import annotations

import math

import pytest

from service.sim.speed import MU, SIGMA, LmsysLike, main, measure


def test_the_load_has_its_rate_and_its_lengths() -> None:
    source = LmsysLike(20_000, requests_per_s=50.0, seed=3)
    requests = []
    while (arrival := source.next_arrival()) is not None:
        requests.append(arrival.request)
    assert len(requests) == 20_000
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)
    assert len(requests) / requests[-1].arrival_s == pytest.approx(50.0, rel=0.05)
    middle = sorted(r.prompt_tokens for r in requests)[10_000]
    assert middle == pytest.approx(math.exp(MU), rel=0.05)
    mean = sum(r.prompt_tokens for r in requests) / 20_000
    assert mean == pytest.approx(math.exp(MU + SIGMA**2 / 2), rel=0.08)


@pytest.mark.parametrize("policy", ["plaserve", "fcfs:budget_tokens=512"])
def test_it_says_what_it_measured(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--requests", "60", "--instances", "2", "--policy", policy, "--load", "0.5"])
    line = capsys.readouterr().out
    for words in (policy, "2 instances", "load 0.50", "60 requests", "us a request", "passes", "P99"):
        assert words in line


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown policy"):
        measure(10, 1, "best", 0.5)
