"""What is done with a measurement away from the GPU: the fit, the comparison, TensorRT-LLM's names."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from build_scripts.gpu import drift, green
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


# --- shares of a GPU, by a driver that is played ---


class Driver:
    """Rounds a group of SMs up to a multiple of 8, as recent GPUs do, and hands out what it was given."""

    def __init__(self, total: int = 132, fails: str | None = None) -> None:
        self.total, self.fails = total, fails
        self.contexts: list[int] = []  # SMs of each

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        played = getattr(self, "_" + name)
        return lambda *arguments: 801 if name == self.fails else played(*arguments) or 0

    def _cuDeviceGet(self, device: Any, ordinal: Any) -> None:  # noqa: N802
        device._obj.value = ordinal.value

    def _cuDeviceGetDevResource(self, device: Any, whole: Any, kind: Any) -> None:  # noqa: N802
        assert kind.value == 1
        whole[96:100] = self.total.to_bytes(4, "little")

    def _cuDevSmResourceSplitByCount(self, group: Any, groups: Any, whole: Any, rest: Any, *n: Any) -> None:  # noqa: N802
        flags, least = (value.value for value in n)
        assert (groups._obj.value, flags) == (1, 0)
        count = min(self.total, -(-least // 8) * 8)
        group[96:100] = count.to_bytes(4, "little")
        rest[96:100] = (self.total - count).to_bytes(4, "little")

    def _cuDevResourceGenerateDesc(self, description: Any, resource: Any, count: Any) -> None:  # noqa: N802
        description._obj.value = int.from_bytes(resource[96:100], "little")

    def _cuGreenCtxCreate(self, context: Any, description: Any, device: Any, flags: Any) -> None:  # noqa: N802
        self.contexts.append(description.value)
        context._obj.value = len(self.contexts)

    def _cuGreenCtxStreamCreate(self, stream: Any, context: Any, flags: Any, priority: Any) -> None:  # noqa: N802
        assert flags.value == 1
        stream._obj.value = 1000 + context.value


@pytest.mark.parametrize("sms", [8, 12, 64, 120])
def test_a_split_gives_both_sides_sms_of_their_own(sms: int) -> None:
    driver = Driver()
    ours, others = green.split(driver, 0, 132, sms)
    assert ours.sms >= sms
    assert ours.sms + others.sms == 132
    assert driver.contexts == [ours.sms, others.sms]
    assert (ours.stream, others.stream) == (1001, 1002)


def test_a_driver_that_is_not_as_expected_is_named() -> None:
    with pytest.raises(green.NoGreenContexts, match="otherwise than expected"):
        green.split(Driver(total=80), 0, 132, 16)
    with pytest.raises(green.NoGreenContexts, match="cuGreenCtxCreate failed with CUDA error 801"):
        green.split(Driver(fails="cuGreenCtxCreate"), 0, 132, 16)
    with pytest.raises(green.NoGreenContexts, match="gave 132 and 0"):
        green.split(Driver(), 0, 132, 131)


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


def test_the_script_prints_its_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    surface = Surface("S2")
    load = modules_of(surface)
    package = SimpleNamespace(__version__="1.2.1", **surface.exported("tensorrt_llm"))
    monkeypatch.setattr(
        drift.importlib, "import_module", lambda name: package if name == "tensorrt_llm" else load(name)
    )
    path = tmp_path / "surface.json"
    path.write_text(json.dumps(recorded_classes()))
    assert drift.main([str(path)]) == 0
    monkeypatch.undo()
    said = json.loads(capsys.readouterr().out)
    assert said["version"] == "1.2.1"
    assert said["missing"]["S2"] == [] == said["missing"][said["nearest"]]
    assert drift.main([]) == 2


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
