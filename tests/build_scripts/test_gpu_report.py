"""What is done with a measurement away from the GPU: the fit, the comparison, TensorRT-LLM's names."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from build_scripts.gpu import drift
from build_scripts.gpu.columns import PREFILL
from build_scripts.gpu.report import compare, main, render
from engines.cost_model import PassShape
from engines.models import known_models
from service.cli import app
from tests.executor_fakes.skin.classes import Surface, table

FASTER = 0.5  # the card of the test takes half the time that the shipped model says


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A directory as `measure` writes it, with times of the shipped model."""
    cost = known_models()["qwen2.5-7b"].cost
    with (tmp_path / "prefill.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, PREFILL, restval="1")
        writer.writeheader()
        for new in (8, 64, 256, 1024, 4096):
            for batch in (1, 4):
                for past in (0, 4096):
                    time_ms = FASTER * 1e3 * cost.pass_s(PassShape.of([(new, past)] * batch))
                    row = {"model": "qwen2.5-7b", "batch": batch, "new_tokens": new, "history": past}
                    writer.writerow({**row, "prefill_ms": time_ms})
    run = {"card": "a card", "driver": None, "torch": "0", "date": "", "scale": "full", "device": "cuda"}
    (tmp_path / "run.json").write_text(json.dumps({**run, "parts": []}))
    return tmp_path


def test_calibrate_reads_it(measured: Path) -> None:
    done = CliRunner().invoke(
        app, ["calibrate", "--csv", str(measured / "prefill.csv"), "--model", "qwen2.5-7b", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert "qwen2.5-7b" in done.output


def test_the_shipped_model_is_held_against_the_rows(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = compare(measured / "prefill.csv")
    assert one.rows == 20
    assert one.fitted.worst_error < 0.05
    assert one.predicted_ratio == pytest.approx((1 / FASTER,) * 3)
    assert "median 2.00" in render([one])
    assert main([str(measured)]) == 0
    assert "median 2.00" in capsys.readouterr().out


def test_a_directory_without_a_measurement_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])


# --- drift of TensorRT-LLM ---


def modules_of(surface: Surface) -> drift.Load:
    """Modules with the classes of one stratum, as `importlib` would give them."""

    def load(name: str) -> Any:
        if name not in surface.classes and not surface.exported(name):
            raise ImportError(name)
        return SimpleNamespace(**surface.classes.get(name, {}), **surface.exported(name))

    return load


def recorded_classes() -> dict[str, Any]:
    """The table without what the fake writes by hand: functions, and classes with methods."""
    data = table()
    by_hand = ("function", "method", "class")
    kept = [e for e in data["symbols"] if e["kind"] not in by_hand and "methods" not in e]
    return {**data, "symbols": kept}


@pytest.mark.parametrize("stratum", drift.STRATA)
def test_each_stratum_has_what_is_recorded_of_it(stratum: str) -> None:
    load = modules_of(Surface(stratum))
    missing, _ = drift.compare(recorded_classes(), stratum, load)
    assert missing == []
    result = drift.report(recorded_classes(), load)
    assert result["missing"][result["nearest"]] == []


def test_what_left_or_changed_is_named() -> None:
    missing = drift.compare(recorded_classes(), "S3", modules_of(Surface("S4")))[0]
    assert any("BuildConfig: not there" in line for line in missing)
    load = modules_of(Surface("S3"))
    wider = recorded_classes()
    for entry in wider["symbols"]:
        if entry["name"] == "ContextPhaseParams" and "S3" in entry["strata"]:
            entry = {**entry, "params": [*entry["params"], ["no_such", "any", "None"]]}
            wider = {**wider, "symbols": [entry]}
    found = drift.compare(wider, "S3", load)[0]
    assert [line for line in found if "no_such" in line] == [
        "tensorrt_llm.bindings.executor.ContextPhaseParams: takes no no_such"
    ]


def test_parameters_are_read_from_signatures_fields_and_docstrings() -> None:
    def function(one: int, *, two: int = 1) -> None: ...

    class Bound:
        """Made in C++."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            """__init__(self, first: int, second: str | None = None) -> None"""

    class Silent:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    assert drift.parameters(function) == {"one", "two"}
    assert {"first", "second"} <= (drift.parameters(Bound) or set())
    assert drift.parameters(SimpleNamespace(model_fields={"a": 1})) == {"a"}
    assert drift.parameters(Silent) is None
