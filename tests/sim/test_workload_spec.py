"""Specs and traces that do not go together are refused by the name of the field."""

from __future__ import annotations

from dataclasses import replace

import pytest
from workload_cases import AGENTS, BLOCK, CLOSED, LMSYS, PREFIXES, SESSIONS, TARGETS

from service.sim.sources import Burst, WorkloadSpec, block_tokens, make_source
from service.sim.workload import Trace, TraceRow


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"arrivals": "sometimes"}, "arrivals"),
        ({"arrivals": "closed"}, "concurrency"),
        ({"concurrency": 3}, "concurrency"),
        ({"arrivals": "closed", "concurrency": 3, "bursts": (Burst(0.0, 1.0, 2.0),)}, "bursts"),
        ({"parts": ()}, "parts"),
        ({"parts": (("rag", -1.0),)}, "parts"),
        ({"parts": (("rag", 1.0), ("cot", 1.0)), "arrivals": "recorded"}, "recorded"),
        ({"output_tokens": 0}, "output_tokens"),
        ({"prompt_tokens_max": 0}, "prompt_tokens_max"),
        ({"cv": 0.0}, "cv"),
        ({"turns_mean": 0.5}, "turns_mean"),
        ({"think_s_mean": float("nan")}, "think_s_mean"),
        ({"start": "middle"}, "start"),
    ],
)
def test_a_bad_spec_is_refused_by_name(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(LMSYS, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "rate", "bounds", "named"),
    [
        (LMSYS, None, {"requests_max": 1}, "rate_per_s"),
        (CLOSED, 1.0, {"requests_max": 1}, "rate_per_s"),
        (LMSYS, 1.0, {}, "requests_max"),
        (LMSYS, 1.0, {"requests_max": 0}, "requests_max"),
        (LMSYS, 1.0, {"seconds": 0.0}, "seconds"),
        (replace(LMSYS, arrivals="recorded"), 1.0, {"requests_max": 1}, "length set"),
        (replace(LMSYS, output_tokens=None), 1.0, {"requests_max": 1}, "output_tokens"),
        (replace(LMSYS, parts=(("lmsys", 1.0),)), 1.0, {"requests_max": 1}, "lmsys_chat_1m"),
        (replace(AGENTS, arrivals="poisson"), 1.0, {"requests_max": 1}, "sessions"),
    ],
)
def test_what_does_not_go_together_is_refused(
    spec: WorkloadSpec, rate: float | None, bounds: dict[str, int], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        make_source(spec, rate_per_s=rate, seed=0, targets=TARGETS, **bounds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "trace", "named"),
    [
        (WorkloadSpec((("sessions", 1.0),)), SESSIONS, "arrivals sessions"),
        (WorkloadSpec((("sessions", 1.0),), arrivals="recorded"), SESSIONS, "arrivals sessions"),
        (WorkloadSpec((("prefixes", 1.0),), arrivals="sessions"), PREFIXES, "without a session"),
        (WorkloadSpec((("prefixes", 1.0),), prompt_tokens_max=5), PREFIXES, "prompt_tokens_max"),
        (WorkloadSpec((("sessions", 1.0),), "sessions", prompt_tokens_max=5), SESSIONS, "prompt_tokens_max"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(spec: WorkloadSpec, trace: Trace, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_source(spec, rate_per_s=1.0, seed=0, targets=TARGETS, requests_max=1, trace=trace)


def test_parts_with_different_blocks_have_no_block_size_in_common() -> None:
    turns = Trace("turns", (TraceRow(0.0, 40, 1, (1, 2), session="a"),), BLOCK)
    spec = WorkloadSpec((("turns", 1.0), ("agent", 1.0)), arrivals="sessions", block_tokens=64)
    with pytest.raises(ValueError, match=r"\[16, 64\]"):
        block_tokens(spec, turns)
    assert block_tokens(replace(spec, block_tokens=16), turns) == 16
    assert block_tokens(LMSYS) == 0


def test_a_trace_must_be_one_of_the_parts() -> None:
    with pytest.raises(ValueError, match="prefixes"):
        make_source(LMSYS, rate_per_s=1.0, seed=0, targets=TARGETS, requests_max=1, trace=PREFIXES)
