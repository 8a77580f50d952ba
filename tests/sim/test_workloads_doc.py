"""The page on workloads names what there is, and its example is a trace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from service.sim.lengths import LENGTH_SETS
from service.sim.sources import SESSION_SETS, Arrivals
from service.sim.traces import FORMATS, KNOWN_TRACES, read_trace
from service.sim.workload import TraceRow

PAGE = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()


@pytest.mark.parametrize("name", KNOWN_TRACES)
def test_known_traces_are_listed_with_file_and_licence(name: str) -> None:
    known = KNOWN_TRACES[name]
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    assert known.files[-1][0].removesuffix(".gz") in line
    assert known.licence in line


def test_names_are_listed() -> None:
    for name in [*LENGTH_SETS, *SESSION_SETS, *Arrivals, *FORMATS]:
        assert f"`{name}`" in PAGE
    for entry in LENGTH_SETS.values():
        shape = f"| {entry.below_256_ratio:.1%} | {entry.median_tokens:,} | {entry.mean_tokens:,} |"
        assert shape.replace("%", " %") in PAGE


def test_the_example_is_a_trace(tmp_path: Path) -> None:
    (example,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.jsonl").write_text(example)
    trace = read_trace(tmp_path / "mine.jsonl")
    assert (trace.name, trace.block_tokens, trace.source) == ("mine", 64, "gateway log")
    assert trace.rows[0] == TraceRow(0.0, 130, 40, (11, 12))
    assert len(trace.rows) == 3
