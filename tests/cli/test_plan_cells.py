"""`plaserve plan-cells` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from service.cli import app

SMALL = ("--length-max", "512", "--step", "32", "--batches", "1,2,4", "--seconds", "10")


def plan_cells(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan-cells", *arguments])


def test_a_plan_is_within_its_budget_and_better_than_the_grid(tmp_path: Path) -> None:
    path, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    result = plan_cells(
        *SMALL, "--memory-gb", "4", "--build-minutes", "3", "--json", str(path), "--plot", str(picture)
    )
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    assert data["bytes"] <= 4e9
    assert data["build_s"] <= 180.0
    assert data["cells"][-1][0] == 512
    seconds = data["request_s"]
    assert data["unpadded_request_s"] < seconds["planned"] < seconds["powers of two"]
    assert picture.is_file()
    assert "--pass-tokens-max 1536" in result.output


def test_a_histogram_is_enough(tmp_path: Path) -> None:
    histogram, path = tmp_path / "lengths.json", tmp_path / "plan.json"
    histogram.write_text('{"40": 3, "200": 1}')
    result = plan_cells(*SMALL, "--trace", str(histogram), "--rate", "1", "--cells", "3", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["cells"] == [[64, 1], [224, 1], [512, 1]]


def test_a_plan_for_other_traffic_is_left_behind(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text('{"cells": [[32, 1], [512, 1]]}')
    moved = plan_cells(*SMALL, "--present", str(old), "--cells", "8")
    assert "Build new ones: in period" in moved.output
    new = tmp_path / "new.json"
    plan_cells(*SMALL, "--cells", "8", "--json", str(new))
    assert "Keep the present cells" in plan_cells(*SMALL, "--present", str(new), "--cells", "8").output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--trace", "nosuch"), "nosuch"),
        (("--trace", "nosuch.json", "--rate", "1"), "nosuch.json"),
        (("--trace", "lengths.json"), "--rate"),
        (("--memory-gb", "0.1"), "not one cell"),
        (("--batches", "4,2"), "batches must be ascending"),
        (("--present", "nosuch.json"), "--present"),
    ],
)
def test_bad_input_is_one_line_that_names_it(arguments: tuple[str, ...], named: str) -> None:
    result = plan_cells("--seconds", "5", *arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert named in result.output
