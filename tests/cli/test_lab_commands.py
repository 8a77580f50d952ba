"""`plaserve simulate`, `plan` and `lab` as a user types them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from service.cli import app


def plaserve(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_simulate_writes_what_it_is_asked_for(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("a.json", "a.parquet", "a.png", "a.json.gz")}
    result = plaserve(
        "simulate", "--policy", "fcfs:budget_tokens=512;plaserve", "--seconds", "3", "--instances", "2",
        "--json", str(files["a.json"]), "--parquet", str(files["a.parquet"]),
        "--plot", str(files["a.png"]), "--perfetto", str(files["a.json.gz"]),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Simulated" in result.output
    data = json.loads(files["a.json"].read_text())
    assert [a["policy"] for a in data["answers"]] == ["fcfs:budget_tokens=512", "plaserve"]
    assert json.loads(gzip.decompress(files["a.json.gz"].read_bytes()))["traceEvents"]
    assert files["a.parquet"].is_file()
    assert (tmp_path / "a-short.png").is_file()


def test_simulate_is_the_same_twice(tmp_path: Path) -> None:
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    for path in (one, two):
        plaserve("simulate", "--policy", "plaserve", "--seconds", "2", "--json", str(path))
    assert one.read_bytes() == two.read_bytes()


def test_simulate_hands_kv_over_where_it_is_given_a_link(tmp_path: Path) -> None:
    """A link four times as slow is later for decode and the same for the first token."""
    found = {}
    for gbit in ("100", "400"):
        path = tmp_path / f"{gbit}.json"
        result = plaserve(
            "simulate", "--policy", "plaserve", "--seconds", "3", "--kv-gbit", gbit, "--json", str(path)
        )
        assert result.exit_code == 0, result.output
        assert "first token to decode" in result.output
        (found[gbit],) = json.loads(path.read_text())["answers"]
    slow, fast = found["100"], found["400"]
    assert slow["figures"] == fast["figures"]
    assert slow["hand_over"]["handed_over"] > 0
    assert slow["hand_over"]["delay_s_mean"] > 2.0 * fast["hand_over"]["delay_s_mean"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("simulate", "--trace", "nosuch"), "nosuch"),
        (("simulate", "--policy", "fifo"), "fifo"),
        (("simulate", "--slo", "1,2"), "--slo"),
        (("simulate", "--cost-model", "gpt-9"), "gpt-9"),
        (("simulate", "--rate", "1e6"), "more than these instances"),
        (("simulate", "--kv-gbit", "0"), "--kv-gbit"),
        (("simulate", "--kv-gbit", "100", "--kv-budget", "2"), "--kv-budget"),
        (("simulate", "--kv-gbit", "100", "--output-tokens", "4", "--seconds", "2"), "first one"),
        (("plan", "--level", "2"), "--level"),
        (("lab", "run", "nosuch"), "quick"),
        (("lab", "run", "smoke", "--case", "nosuch"), "nosuch"),
        (("lab", "exhibits", "nosuch"), "interference"),
        (("lab", "controllers", "--case", "nosuch"), "flip-90-10"),
        (("lab", "controllers", "--load", "0"), "loads"),
    ],
)
def test_bad_input_is_one_line_that_names_it(arguments: tuple[str, ...], named: str) -> None:
    result = plaserve(*arguments)
    assert result.exit_code in (1, 2)
    assert named in result.output + (result.stderr or "")
    assert "Traceback" not in result.output


def test_plan_says_how_many(tmp_path: Path) -> None:
    path, plot = tmp_path / "p.json", tmp_path / "p.png"
    result = plaserve(
        "plan",
        "--policy",
        "plaserve",
        "--rate",
        "20",
        "--seconds",
        "3",
        "--json",
        str(path),
        "--plot",
        str(plot),
    )
    assert result.exit_code == 0, result.output
    needed = json.loads(path.read_text())["policies"][0]["needed"]
    assert f"plaserve: {needed}" in result.output
    assert plot.is_file()


def test_lab_lists_its_suites_and_prints_exhibits() -> None:
    assert "standard" in plaserve("lab", "suites").output
    assert "16,384 tokens" in " ".join(plaserve("lab", "exhibits", "interference").output.split())
