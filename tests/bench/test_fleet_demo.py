"""The fleet demo for a minute: real processes, real kills, real etcd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from service.bench.etcd import MISSING, find_etcd
from service.cli import app

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_etcd() is None, reason=MISSING)]


def test_a_short_run_balances_and_leaves_no_process(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["fleet", "demo", "--short", "--out", str(tmp_path)])
    assert ended.exit_code == 0, ended.output
    told = json.loads((tmp_path / "fleet.json").read_text())
    assert told["faults"] == []
    assert sum(told["endings"].values()) == len(told["requests"])
    assert told["endings"]["completed"] > 0.9 * len(told["requests"])
    assert len(told["epochs"]) >= 2  # another scheduler took over
    kills = [event["text"] for event in told["events"] if event["kind"] == "kill"]
    assert [text.split()[2][0] for text in kills] == ["w", "s", "f", "c"]
    assert {role for sample in told["samples"] for role in sample["roles"].values()} >= {"sp", "lp"}
    assert told["moves"]
    assert (tmp_path / "fleet.png").stat().st_size > 20_000
    assert still_running(str(tmp_path)) == []


def still_running(text: str) -> list[int]:
    """Processes whose output goes to a file below this folder."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                target = (folder / "fd" / "1").readlink()
            except OSError:
                continue
            if str(target).startswith(text):
                found.append(int(folder.name))
    return found
