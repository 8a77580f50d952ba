"""A trace is what the format asks for, shows the run as it was, and stays within its bounds."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated_settings import small_cpu_like
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, PassStarted, Request
from service.policies import make_scheduler
from service.sim.kernel import SimInstance, SimResult, run
from service.sim.perfetto import chrome_trace, write_trace

LOADS = st.lists(
    st.tuples(st.sampled_from([0.0, 1e-7, 0.003, 0.2]), st.integers(1, 2500), st.integers(1, 3)),
    min_size=1,
    max_size=15,
)
# What each kind of event must have beside ph, name, pid and tid, by the Trace Event Format.
FIELDS = {
    "M": {"args"},
    "X": {"ts", "dur", "cat", "args"},
    "C": {"ts", "args"},
    "s": {"ts", "id", "cat"},
    "f": {"ts", "id", "cat", "bp"},
}


def simulate(load: list[tuple[float, int, int]], outage: bool = False, **more: Any) -> SimResult:
    now_s, arrivals = 0.0, []
    for number, (gap_s, prompt, answer) in enumerate(load):
        now_s += gap_s
        arrivals.append((now_s, Request(f"r{number}", prompt, answer, now_s)))
    outages = ((0.1, 0.15),) if outage else ()
    instances = [
        SimInstance(InstanceSpec("a", *small_cpu_like()), outages=outages),
        SimInstance(InstanceSpec("b", *small_cpu_like())),
    ]
    knobs = SchedulerSettings(stage_lead_s=0.02)
    return run(make_scheduler("plaserve", knobs), instances, arrivals, **more)


def rows_of(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [row for row in trace["traceEvents"] if row["ph"] == kind]


@settings(max_examples=30, deadline=None)
@given(LOADS, st.booleans(), st.sampled_from([0.0, 0.002]))
def test_every_row_is_well_formed(load: list[tuple[float, int, int]], outage: bool, link_s: float) -> None:
    trace = json.loads(json.dumps(chrome_trace(simulate(load, outage, link_s=link_s)), allow_nan=False))
    assert trace["displayTimeUnit"] == "ms"
    named = {(row["pid"], row["tid"]) for row in rows_of(trace, "M") if row["name"] == "thread_name"}
    times = []
    for row in trace["traceEvents"]:
        assert isinstance(row["pid"], int)
        assert isinstance(row["tid"], int)
        assert isinstance(row["name"], str)
        assert FIELDS[row["ph"]] <= set(row)
        if row["ph"] in "Xsf":
            assert (row["pid"], row["tid"]) in named
        if row["ph"] == "C":
            assert row["args"]
            assert all(isinstance(value, int | float) for value in row["args"].values())
        if row["ph"] != "M":
            times.append(row["ts"])
    assert times == sorted(times)
    assert times[0] >= 0.0


@settings(max_examples=30, deadline=None)
@given(LOADS, st.booleans())
def test_slices_of_a_track_nest(load: list[tuple[float, int, int]], outage: bool) -> None:
    """On one track two slices are apart or one is inside the other, or the viewer drops one."""
    tracks = defaultdict(list)
    for row in rows_of(chrome_trace(simulate(load, outage)), "X"):
        assert row["dur"] >= 0.0
        tracks[row["pid"], row["tid"]].append((row["ts"], row["ts"] + row["dur"]))
    for slices in tracks.values():
        for (start, end), (later_start, later_end) in pairwise(slices):
            assert later_start >= end - 1e-6 or (later_start >= start and later_end <= end)


@settings(max_examples=30, deadline=None)
@given(LOADS, st.booleans())
def test_the_trace_shows_the_run(load: list[tuple[float, int, int]], outage: bool) -> None:
    """Every started pass is a slice of its length, every arrival one too, and flows lead from the one to the
    other; what waits is counted down to nothing."""
    result = simulate(load, outage)
    trace = chrome_trace(result)
    passes = [row for row in rows_of(trace, "X") if row["cat"] in ("prefill", "decode", "failed")]
    started = [now_s for now_s, entry in result.log if isinstance(entry, PassStarted)]
    assert sorted(row["ts"] for row in passes) == pytest.approx(sorted(t * 1e6 for t in started))
    busy_s = sum(row["dur"] for row in passes) / 1e6
    assert busy_s == pytest.approx(sum(figures.busy_s for figures in result.instances))
    arrivals = [row for row in rows_of(trace, "X") if row["cat"] == "arrival"]
    assert len(arrivals) == len(load)
    begun = {row["id"] for row in rows_of(trace, "s")}
    assert begun == {name for name, r in result.records.items() if r.first_pass_s is not None}
    assert Counter(row["id"] for row in rows_of(trace, "f")) == Counter(begun)
    ends = {(row["pid"], row["tid"], row["ts"]) for row in rows_of(trace, "f")}
    assert ends <= {(row["pid"], row["tid"], row["ts"]) for row in passes}
    waiting = [row["args"] for row in rows_of(trace, "C") if row["name"] == "requests waiting"]
    assert waiting[-1] == {"short": 0, "long": 0}
    assert all(count >= 0 for args in waiting for count in args.values())


def test_a_pass_says_what_is_in_it() -> None:
    result = simulate([(0.0, 20, 1), (0.0, 30, 1), (0.0, 2000, 1)])
    first = next(row for row in rows_of(chrome_trace(result), "X") if row["cat"] == "prefill")
    assert first["args"]["tokens"] == first["args"]["executed_tokens"] or first["args"]["executed_tokens"] > 0
    assert first["args"]["short"] + first["args"]["long"] == len(first["args"]["requests"])
    assert first["args"]["reason"]
    assert f"T={first['args']['tokens']}" in first["name"]


def test_the_size_is_bounded() -> None:
    result = simulate([(0.01, 600, 2)] * 20)
    starts = sorted(now_s for now_s, entry in result.log if isinstance(entry, PassStarted))
    assert len(starts) > 12

    def drawn(**bounds: Any) -> list[float]:
        rows = rows_of(chrome_trace(result, **bounds), "X")
        return [row["ts"] / 1e6 for row in rows if row["cat"] in ("prefill", "decode")]

    assert len(drawn(passes_max=7)) == 7
    ranged = drawn(from_s=starts[3], to_s=starts[9])
    assert ranged == pytest.approx([t for t in starts if starts[3] <= t < starts[9]])
    few = chrome_trace(result, from_s=starts[3], to_s=starts[9])
    low_us, high_us = starts[3] * 1e6, starts[9] * 1e6
    assert all(low_us - 1 <= row["ts"] <= high_us for row in few["traceEvents"] if row["ph"] in "XC")


def test_equal_runs_give_equal_files(tmp_path: Path) -> None:
    load = [(0.01, 600, 2), (0.02, 40, 3)]
    for name in ("a.json", "b.json", "a.json.gz", "b.json.gz"):
        write_trace(simulate(load), tmp_path / name)
    plain, packed = (tmp_path / "a.json").read_bytes(), (tmp_path / "a.json.gz").read_bytes()
    assert plain == (tmp_path / "b.json").read_bytes()
    assert packed == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress(packed) == plain
    assert json.loads(plain) == json.loads(json.dumps(chrome_trace(simulate(load))))


@pytest.mark.parametrize("missing", ["keep_log", "keep_records"])
def test_a_run_without_its_log_or_records_is_refused(missing: str) -> None:
    ended = simulate([(0.0, 20, 1)], **{missing: False})
    with pytest.raises(ValueError, match="keep_log and keep_records"):
        chrome_trace(ended)


def test_no_passes_is_no_trace() -> None:
    with pytest.raises(ValueError, match="passes_max"):
        chrome_trace(simulate([(0.0, 20, 1)]), passes_max=0)
