"""`plaserve calibrate` as a user runs it: what it prints, writes and draws, and what it refuses."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from engines.cost_fit import errors, fit, read_csv
from engines.cost_model import CostModel, PassShape
from engines.models import known_models, load_model
from service.cli import app

TRUTH = CostModel(0.0, 0.02, 2e-9, 9e-5, 0.0, 1e-7, smooth_p=3.0)
H200 = Path(__file__).parents[3] / "shared" / "h200" / "prefill_reference.csv"
COLUMNS = ("model", "batch", "new_tokens", "history", "prefill_ms")


def run(*arguments: object) -> Result:
    environment = {"NO_COLOR": "1", "COLUMNS": "120"}
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)], env=environment)


def run_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def write_table(path: Path, models: tuple[str, ...] = ("mine",), rows: int | None = None) -> Path:
    shapes = [(b, 2**i, h) for b in (1, 4) for i in range(3, 13) for h in (0, 1024)][:rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for model in models:
            for batch, new, history in shapes:
                time_s = TRUTH.pass_s(PassShape.of([(new, history)] * batch))
                writer.writerow((model, batch, new, history, time_s * 1e3))
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "table.csv")


# --- what it says and writes --------------------------------------------------------------------------------


def test_the_model_behind_a_table_comes_back(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.json"
    result = run("--csv", table, "--out", out)
    assert result.exit_code == 0, result.output
    model = load_model(out)
    assert (model.name, model.derived, model.shape) == ("mine", False, None)
    assert "40 rows of table.csv" in model.source
    for items in ([(48, 0)], [(700, 300)], [(100, 0)] * 9):
        shape = PassShape.of(items)
        assert model.cost.pass_s(shape) == pytest.approx(TRUTH.pass_s(shape), rel=0.02)


def test_the_figures_are_those_of_the_model_that_is_written(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.json"
    data = run_json("--csv", table, "--out", out)
    model = load_model(out).cost
    assert CostModel(**data["cost"]) == model
    assert data["boundary_tokens"] == {str(h): model.boundary_tokens(h) for h in (0, 1024, 4096, 16384)}
    assert data["boundary_as_printed_tokens"] == model.printed_boundary_tokens()
    assert data["knee_tokens"] == model.knee_tokens()
    assert data["saturated_tokens_per_s"] == pytest.approx(1 / model.beta, rel=0.05)
    wrong = sorted(abs(sample["error"]) for sample in data["samples"])
    assert data["errors"]["samples"] == len(wrong) == 40
    assert data["errors"]["worst"] == wrong[-1]
    assert data["errors"]["p90"] == wrong[35]
    assert data["errors"]["median"] == (wrong[19] + wrong[20]) / 2


def test_the_tables_name_what_they_show(table: Path) -> None:
    shown = run("--csv", table).stdout
    for word in (
        "weights",
        "alpha",
        "beta",
        "gamma_r",
        "median",
        "90 %",
        "worst",
        "L_m",
        "LAPS",
        "knee",
        "tokens/s",
    ):
        assert word in shown
    assert "TFLOP/s" not in shown  # the sizes are not known, so no hardware rate can be told


def test_a_shape_is_taken_by_name_or_by_option(tmp_path: Path) -> None:
    out = tmp_path / "model.json"
    named = write_table(tmp_path / "named.csv", ("Qwen/Qwen3-32B",))
    assert "TFLOP/s" in run("--csv", named, "--out", out).stdout
    assert load_model(out).shape == known_models()["qwen3-32b"].shape
    run("--csv", named, "--out", out, "--shape", "Llama-3.1-8B")
    assert load_model(out).shape == known_models()["llama-3.1-8b"].shape


def test_the_hold_out_is_a_check_and_changes_nothing(table: Path) -> None:
    plain, checked = run_json("--csv", table), run_json("--csv", table, "--holdout", "even-odd")
    held = checked.pop("held_out")
    assert plain.pop("held_out") is None
    assert checked == plain
    samples = read_csv(table)
    half = fit(samples[::2]).model
    assert held["cost"]["beta"] == half.beta
    assert held["errors"]["samples"] == 20
    assert held["errors"]["worst"] == max(abs(error) for error in errors(half, samples[1::2]))
    assert "odd rows, fitted on the even rows" in run("--csv", table, "--holdout", "even-odd").stdout


def test_launch_that_was_measured_is_told_apart(table: Path) -> None:
    assert run_json("--csv", table, "--launch-ms", "3")["cost"]["launch_s"] == 0.003


@pytest.mark.parametrize("model", ["Qwen/Qwen3-32B", "meta-llama/Meta-Llama-3.1-8B"])
def test_even_rows_of_the_h200_table_predict_the_odd_rows(model: str) -> None:
    if not H200.is_file():
        pytest.skip("the published H200 table is not beside this checkout (shared/h200)")
    data = run_json("--csv", H200, "--model", model, "--holdout", "even-odd")
    assert data["held_out"]["errors"]["samples"] == 21
    assert data["held_out"]["errors"]["median"] <= 0.03
    assert data["held_out"]["errors"]["worst"] <= 0.12
    assert data["boundary_as_printed_tokens"] < 0 < data["boundary_tokens"]["16384"]


# --- plots --------------------------------------------------------------------------------------------------


def test_a_plot_is_drawn_and_the_same_samples_draw_the_same(table: Path, tmp_path: Path) -> None:
    from matplotlib.image import imread

    for suffix in ("svg", "png"):
        pictures = [tmp_path / f"{name}.{suffix}" for name in ("one", "two")]
        for picture in pictures:
            assert run("--csv", table, "--holdout", "even-odd", "--plot", picture).exit_code == 0
        assert pictures[0].read_bytes() == pictures[1].read_bytes()
    pixels = imread(tmp_path / "one.png")
    assert min(pixels.shape[:2]) > 600
    for half in (pixels[:, : pixels.shape[1] // 2], pixels[:, pixels.shape[1] // 2 :]):
        assert half.std() > 0.05  # something is drawn on either side


def test_samples_with_history_alone_are_drawn_too(tmp_path: Path) -> None:
    table = write_table(tmp_path / "all.csv")
    lines = [line for line in table.read_text().splitlines() if line.split(",")[3] != "0"]
    table.write_text("\n".join(lines) + "\n")
    picture = tmp_path / "plot.svg"
    result = run("--csv", table, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_text().rstrip().endswith("</svg>")


def test_the_plotting_library_is_imported_only_for_a_plot() -> None:
    code = "import sys, service.cli; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- a bundle -----------------------------------------------------------------------------------------------


def test_the_engine_of_a_bundle_is_measured_anew(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    from build_scripts import runner
    from tests.build_scripts import tiny

    spec = tiny.spec(tmp_path)
    bundle = runner.build(spec)
    before = {path: path.read_bytes() for path in bundle.iterdir()}
    samples, out = tmp_path / "samples.csv", tmp_path / "model.json"
    result = run(
        *("--bundle", bundle, "--seconds", "0.2", "--samples", samples, "--out", out),
        "--json",
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    profiles = tiny.PROFILES
    measured = {(sample["new_tokens"], sample["history"]) for sample in data["samples"]}
    assert measured == {(t, h) for t in profiles.t_classes for h in profiles.h_classes}
    assert load_model(out).source.startswith("measured ")
    assert len(read_csv(samples, "tiny")) == len(measured)
    assert {path: path.read_bytes() for path in bundle.iterdir()} == before
    refused = run("--bundle", bundle, "--threads", "0")
    assert refused.exit_code == 1
    assert "threads must be between" in refused.stderr


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --csv or --bundle"),
        (["--csv", "{table}", "--bundle", "x"], "either --csv or --bundle"),
        (["--csv", "absent.csv"], "does not exist"),
        (["--csv", "{table}", "--threads", "2"], "--threads goes with --bundle"),
        (["--csv", "{table}", "--quick"], "--quick goes with --bundle"),
        (["--bundle", "x", "--model", "m"], "--model goes with --csv"),
        (["--bundle", "x", "--seconds", "0"], "--seconds must be above 0"),
        (["--csv", "{table}", "--plot", "fit.pdf"], ".png or .svg"),
        (["--csv", "{table}", "--shape", "gpt"], "qwen3-32b"),
        (["--csv", "{table}", "--holdout", "half"], "even-odd"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_to_give(
    table: Path, arguments: list[str], message: str
) -> None:
    result = run(*(argument.format(table=table) for argument in arguments))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,batch,new_tokens,history\nm,1,8,0\n", "column 'prefill_ms' is missing"),
        ("", "column 'model' is missing"),
        (",".join(COLUMNS) + "\nm,1,8,0,fast\n", "line 2: prefill_ms is not a number: 'fast'"),
        (",".join(COLUMNS) + "\nm,1,8\n", "line 2: history is not a number: None"),
        (",".join(COLUMNS) + "\nm,1,8,0,5.0\n", "at least 8 are needed"),
        (",".join(COLUMNS) + "\n", "0 given, at least 8"),
        (",".join(COLUMNS) + "\n" + "".join(f"m,1,{2**i},0,-1\n" for i in range(9)), "samples[0].time_s"),
        (",".join(COLUMNS) + "\n" + "m,1,8,0,5.0\n" * 9, "fewer than 3 values"),
        ("\udcff\udcfe", "not a CSV file in UTF-8"),
    ],
)
def test_a_table_that_does_not_do_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert_one_line(run("--csv", path), message)


def assert_one_line(result: Result, message: str) -> None:
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("plaserve: ")
    assert len(result.stderr.strip().splitlines()) == 1


def test_what_can_not_be_done_is_said_in_one_line(tmp_path: Path, table: Path) -> None:
    two = write_table(tmp_path / "two.csv", ("a", "b"))
    assert_one_line(run("--csv", two), "choose one with --model: a, b")
    assert_one_line(run("--csv", two, "--model", "c"), "no rows of model 'c'; it holds a, b")
    assert_one_line(run("--csv", table, "--out", tmp_path / "absent" / "model.json"), "No such file")
    assert_one_line(run("--csv", table, "--launch-ms", "1000"), "launch_s must be")
    short = write_table(tmp_path / "short.csv", rows=12)
    assert_one_line(run("--csv", short, "--holdout", "even-odd"), "the even rows alone, for --holdout")
    assert_one_line(run("--bundle", tmp_path / "absent"), "plaserve build")
