"""The measurement of the core counts what it says, at the queue that it says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.types import Lane
from service.sim import core_cost
from service.sim.core_cost import MIXES, ClosedLoop, exponent, main, measure
from service.sim.workload import Arrival


@given(st.floats(0.1, 1000.0), st.floats(-0.5, 2.0))
def test_the_exponent_is_that_of_a_power_law(factor: float, power: float) -> None:
    sizes = [10, 100, 1_000, 10_000]
    assert exponent(sizes, [factor * n**power for n in sizes]) == pytest.approx(power, abs=1e-6)


@given(st.sampled_from(MIXES), st.integers(1, 40))
def test_the_loop_keeps_its_length(mix: str, queued: int) -> None:
    sent: list[Arrival] = []
    loop = ClosedLoop(queued, mix, 64, 1, lambda: queued - 3, lambda: len(sent))
    while (arrival := loop.next_arrival()) is not None:
        sent.append(arrival)
    assert len(sent) == queued
    more = list(loop.ended(sent[0].request, 5.0))
    assert len(more) == 3  # so many are missing
    assert not list(loop.ended(sent[0].request, 5.0))  # they are on their way
    assert all(a.request.arrival_s >= 5.0 for a in more)
    assert len({a.request.request_id for a in [*sent, *more]}) == queued + 3


def test_a_tenth_are_documents_and_half_share_a_prefix() -> None:
    loop = ClosedLoop(4_000, "prefixes", 64, 2, lambda: 0, lambda: 0)
    sent = [arrival for _ in range(4_000) if (arrival := loop.next_arrival()) is not None]
    assert sum(a.lane is Lane.LONG for a in sent) / 4_000 == pytest.approx(0.15, abs=0.05)
    long = [a.request for a in sent if a.request.prompt_tokens >= 64]
    first = [r.block_hashes[0] for r in long]
    assert all(len(r.block_hashes) == r.prompt_tokens // 64 for r in long)
    assert (len(first) - len(set(first))) / len(first) == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("mix", MIXES)
def test_a_window_counts_its_requests(mix: str) -> None:
    cost = measure(30, 2, mix, requests=60)
    assert cost.requests >= 60
    assert 0 < cost.polls <= cost.requests
    assert cost.poll_us_p50 <= cost.poll_us_p99
    assert cost.request_us * cost.requests >= cost.poll_us * cost.polls * 0.99
    assert math.isfinite(cost.gc_us)


def test_it_prints_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_cost, "collect_seldom", lambda: None)  # it is for a whole process
    monkeypatch.setattr(core_cost, "QUEUED", (5, 20))
    monkeypatch.setattr(core_cost, "INSTANCES", (1, 2))
    monkeypatch.setattr(core_cost, "QUEUED_FIXED", 10)
    plot = tmp_path / "cost.png"
    main(["--growth", "--requests", "30", "--plot", str(plot)])
    told = capsys.readouterr().out
    assert "queued from 5 to 20: a request grows as n^" in told
    assert "instances from 1 to 2" in told
    assert plot.stat().st_size > 1000
    main(["--queued", "10", "--instances", "2", "--requests", "30", "--mix", "slo", "in reach", "--json"])
    figures = json.loads(capsys.readouterr().out)
    assert [f["mix"] for f in figures] == ["slo", "in reach"]
