"""The measurements of a GPU machine, tried on the CPU at tiny sizes: same code, figures without meaning."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from build_scripts.gpu import measure as measuring
from build_scripts.gpu import part_sm_split
from build_scripts.gpu.bench import FULL, SCALES, Deadline, Scale, Table, make_bench
from build_scripts.gpu.columns import PREFILL
from build_scripts.gpu.part_prefill import ordered_shapes
from build_scripts.gpu.summary import read_rows, summarize
from build_scripts.gpu.timing import timed
from engines.cost_fit import models_in_csv, read_csv

ROOT = Path(__file__).parents[2]
MODELS = ["qwen2.5-7b", "qwen2.5-32b"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpu") / "run"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    measuring.measure(directory, MODELS, 0.75, "cpu", "tiny")
    torch.set_num_threads(threads)
    return directory


def test_every_part_ends_and_says_how(out: Path) -> None:
    run = json.loads((out / "run.json").read_text())
    ended = {(entry["part"], entry["model"]): entry for entry in run["parts"] if entry["part"] != "load"}
    assert set(ended) == {(part.name, f"{model}-tiny") for model, part in measuring.plan(MODELS)}
    assert {entry["status"] for key, entry in ended.items() if key[0] != "sm_split"} == {"done"}
    assert ended["sm_split", "qwen2.5-7b-tiny"]["status"] == "skipped"
    assert "CUDA" in ended["sm_split", "qwen2.5-7b-tiny"]["reason"]
    for name in ("card", "driver", "torch", "date", "scale"):
        assert name in run
    for part in measuring.PARTS:
        rows = read_rows(out / part.file)
        assert len(rows) == sum(entry["rows"] for (name, _), entry in ended.items() if name == part.name)
        assert all(set(row) == set(part.columns) for row in rows)


def test_prefill_is_what_the_fit_reads(out: Path) -> None:
    assert models_in_csv(out / "prefill.csv") == ("qwen2.5-32b-tiny", "qwen2.5-7b-tiny")
    samples = read_csv(out / "prefill.csv", "qwen2.5-7b-tiny")
    shapes = set(ordered_shapes(SCALES["tiny"], 0))
    assert {(s.new_tokens, s.batch, s.history) for s in samples} == shapes
    assert all(sample.time_s > 0.0 for sample in samples)


def test_the_summary_names_every_table_and_that_it_was_a_trial(out: Path) -> None:
    text = summarize(out)
    assert "figures are of no GPU" in text
    for part in ("prefill", "launch", "graphs", "interference", "sm_split"):
        assert f"{part}.csv" in text
    assert "SM shares need CUDA" in text
    assert "eager/graph" in text


def test_a_second_run_does_not_mix_with_the_first(out: Path) -> None:
    with pytest.raises(ValueError, match="another run"):
        measuring.measure(out, MODELS, 1.0, "cpu", "tiny")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((["no-such"], 1.0, "cpu", "tiny"), "no-such"),
        (([], 1.0, "cpu", "tiny"), "models"),
        ((MODELS, 0.0, "cpu", "tiny"), "minutes"),
        ((MODELS, 1.0, "cpu", "huge"), "huge"),
    ],
)
def test_wrong_options_are_refused_by_name(arguments: tuple[Any, ...], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        measuring.measure(tmp_path, *arguments)


@given(st.integers(0, 99), st.sampled_from([FULL, SCALES["tiny"]]))
def test_the_grid_is_whole_and_its_most_telling_shapes_come_first(seed: int, scale: Scale) -> None:
    shapes = list(ordered_shapes(scale, seed))
    expected = {
        (new, batch, past)
        for new in scale.prompts
        for batch in scale.batches
        for past in scale.histories
        if new * batch <= scale.tokens_max
    }
    assert len(shapes) == len(set(shapes))
    assert set(shapes) == expected
    first = shapes[: len(scale.prompts)]
    assert {new for new, batch, past in first if (batch, past) == (1, 0)} == set(scale.prompts)


def test_a_device_without_a_number_is_the_first() -> None:
    assert [measuring.ordinal(device) for device in ("cuda", "cuda:0", "cuda:3")] == [0, 0, 3]


def test_a_part_that_breaks_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(bench: Any, table: Table, deadline: Deadline) -> str:
        raise ZeroDivisionError("as planned")

    parts = (
        measuring.Part("first", ("a",), breaks, 1.0),
        measuring.Part("second", ("a",), lambda bench, table, deadline: table.add(a=1.5) or "fine", 1.0),
    )
    monkeypatch.setattr(measuring, "PARTS", parts)
    measuring.measure(tmp_path / "run", MODELS[:1], 0.5, "cpu", "tiny")
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [entry["status"] for entry in run["parts"]] == ["done", "failed", "done"]
    assert "ZeroDivisionError: as planned" in run["parts"][1]["reason"]
    assert read_rows(tmp_path / "run" / "second.csv") == [{"a": "1.5000"}]


def test_rows_are_in_the_file_as_soon_as_they_are_made(tmp_path: Path) -> None:
    table = Table(tmp_path / "t.csv", ("a", "b"))
    table.add(a=1, b=None)
    assert (tmp_path / "t.csv").read_text() == "a,b\n1,\n"  # not closed yet
    table.close()


def test_no_part_begins_a_row_after_its_deadline(tmp_path: Path) -> None:
    bench = make_bench("qwen2.5-7b", "cpu", SCALES["tiny"])
    for part in measuring.PARTS:
        if part.name != "sm_split":
            table = Table(tmp_path / part.file, part.columns)
            part.run(bench, table, Deadline(0.0))
            assert table.rows == 0
            table.close()


def test_warm_up_is_left_out() -> None:
    calls = []
    timing = timed(lambda: calls.append(1), torch.device("cpu"), spend_s=0.0)
    assert len(calls) == 2 + len(timing.pass_s)
    assert len(timing.pass_s) >= 2


@given(st.integers(16, 200))
def test_shares_of_the_sms_leave_both_sides_some(total: int) -> None:
    for sms in part_sm_split.shares(total):
        assert sms % 8 == 0
        assert 8 <= sms <= total - 8


class _Event:
    """Of a played clock: elapsed time is what was issued between."""

    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = _Event.clock

    def elapsed_time(self, other: _Event) -> float:
        return other.at - self.at


def test_beside_each_other_on_played_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic of a row, with a clock that each pass moves: 10 ms of prefill, 2 ms of decode."""
    from contextlib import nullcontext

    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def passes(ms: float) -> Any:
        def run() -> None:
            _Event.clock += ms

        return run

    bench = make_bench("qwen2.5-7b", "cpu", SCALES["tiny"])
    table = Table(tmp_path / "sm_split.csv", part_sm_split.COLUMNS)
    lanes = (nullcontext, nullcontext)
    part_sm_split._row(bench, table, "green", (100, 32), lanes, (passes(10.0), passes(2.0)))
    table.close()
    (row,) = read_rows(table.path)
    assert (float(row["prefill_alone_ms"]), float(row["decode_alone_ms"])) == (10.0, 2.0)
    assert (float(row["prefill_beside_ms"]), float(row["decode_beside_ms"])) == (10.0, 2.0)
    assert float(row["overlap_ratio"]) == 1.0


BLOCK = """
import sys
ALLOWED = sys.stdlib_module_names | {"torch", "numpy", "engines", "build_scripts"}
inside = []
class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in ALLOWED and not any(n.split(".")[0] in ("torch", "numpy") for n in _importers()):
            raise ImportError(name + " is blocked")
def _importers():
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back
sys.meta_path.insert(0, Block())
from build_scripts.gpu.measure import main
import engines.torch_cuda
sys.exit(main(sys.argv[1:]))
"""


def test_torch_and_numpy_are_all_it_needs(tmp_path: Path) -> None:
    """In a fresh process where nothing else imports, but by torch itself."""
    arguments = ["--out", str(tmp_path / "run"), "--device", "cpu", "--scale", "tiny", "--minutes", "0.3"]
    done = subprocess.run(
        [sys.executable, "-c", BLOCK, *arguments, "--models", "qwen2.5-7b"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with (tmp_path / "run" / "prefill.csv").open(newline="") as file:
        assert tuple(next(csv.reader(file))) == PREFILL
