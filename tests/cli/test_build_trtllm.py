"""`plaserve build --backend trtllm` as a user types it: the dry run needs no GPU, network or TensorRT-LLM."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from build_scripts.trtllm.plan import make_plan
from build_scripts.trtllm.recipe import build_arguments
from build_scripts.trtllm.spec import EngineName, trtllm_spec
from service.cli import app
from service.cli.build_trtllm_view import render

MODELS = ("Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B")
WIDTHS = (80, 100, 140)


def plaserve(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["build", *arguments], env={"COLUMNS": "100"})


def shown(width: int, model: str = MODELS[0], **options: Any) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    console.print(render(make_plan(trtllm_spec(model, Path("bundles"), **options))))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("model", MODELS)
def test_a_dry_run_shows_the_whole_plan_and_leaves_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = plaserve("--backend", "trtllm", "--model", model, "--dry-run")
    assert result.exit_code == 0, result.output
    assert not list(tmp_path.iterdir())
    plan = make_plan(trtllm_spec(model, Path("bundles")))
    for step in plan.steps:
        assert step.name in result.output
    for word in ("Profiles", "Grid", "Memory on the H200", "captured graphs", "not measured here", "1.2.1"):
        assert word in result.output
    for name, value in build_arguments(plan.spec, EngineName.SP, True)["build_config"].items():
        assert f"{name}={value!r}" in result.output


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "options", [{}, {"separate_lp": True, "quantisation": "fp8"}, {"gemm": "plugin", "pass_tokens_max": 100}]
)
def test_it_fits_its_width_and_cuts_no_number(width: int, options: dict[str, Any]) -> None:
    lines = shown(width, **options)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    plan = make_plan(trtllm_spec(MODELS[0], Path("bundles"), **options))
    for length in plan.spec.lengths:
        row = next(line for line in lines if line.startswith(f"│{length:>3}"))
        marks = [f"{c.tokens} {'-' if c.class_index is None else f'#{c.class_index}'}" for c in plan.cells]
        of_row = marks[plan.spec.lengths.index(length) * 7 :][:7]
        assert [cell.strip() for cell in row.strip("│").split("│")[1:]] == of_row
    for command in ("trtllm-build", "--multiple_profiles"):
        assert command in text


def test_json_holds_what_is_shown_and_more(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = plaserve("--backend", "trtllm", "--dry-run", "--separate-lp", "--json", str(file))
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    assert data["kind"] == "planned"
    assert len(data["cells"]) == 42
    assert {"name", "key", "after", "calls", "time"} <= set(data["steps"][0])
    assert [engine["name"] for engine in data["engines"]] == ["sp", "lp"]
    plan = make_plan(trtllm_spec("Qwen2.5-7B-Instruct", Path("bundles"), separate_lp=True))
    assert {step["name"]: step["key"] for step in data["steps"]} == {s.name: s.key for s in plan.steps}
    told = data["engines"][0]["arguments"]["build-sp-plugin"]
    assert told == build_arguments(plan.spec, EngineName.SP, True)


def test_options_reach_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = plaserve(
        "--backend", "trtllm", "--model", "Llama-3.1-8B", "--dry-run", "--checkpoint", "ckpt",
        "--python", "/opt/py", "--dtype", "float16", "--quantisation", "fp8", "--gemm", "plugin",
        "--calibration-text", "t.txt", "--pass-tokens-max", "2048", "--requests-max", "16",
        "--context-tokens-max", "8192", "--lengths", "8,16", "--batches", "1,2", "--gpu", "H100",
        "--publish", "s3://bucket/b", "--json", str(file),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    spec = json.loads(file.read_text())["spec"]
    wanted = {
        "model": "Llama-3.1-8B", "checkpoint": "ckpt", "python": "/opt/py", "dtype": "float16",
        "quantisation": "fp8", "gemm": "plugin", "calibration_text": "t.txt", "pass_tokens_max": 2048,
        "requests_max": 16, "context_tokens_max": 8192, "lengths": [8, 16], "batches": [1, 2],
        "gpu": "H100", "out": "s3://bucket/b",
    }  # fmt: skip
    assert {name: spec[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--backend", "trtllm", "--threads", "2"), "--threads does not go with --backend trtllm"),
        (("--backend", "trtllm", "--precision", "f32"), "--precision does not go"),
        (("--backend", "trtllm", "--quick"), "--quick does not go"),
        (("--backend", "trtllm", "--gguf", "w"), "--gguf does not go"),
        (("--gpu", "H200"), "--gpu does not go with --backend openvino_cpu"),
        (("--separate-lp",), "--separate-lp does not go"),
        (("--pass-tokens-max", "0"), "--pass-tokens-max does not go"),
        (("--json", "p.json"), "--json does not go"),
        (("--backend", "trtllm", "--json", "p.json"), "--json goes with --dry-run"),
        (("--backend", "trtllm", "--dry-run", "--lengths", "8,x"), "lengths must be whole numbers"),
        (("--backend", "trtllm", "--dry-run", "--model", "Qwen3-32B"), "PyTorch adapter"),
        (
            ("--backend", "trtllm", "--dry-run", "--model", "Qwen2.5-32B", "--gpu", "H100"),
            "does not fit H100",
        ),
        (("--backend", "trtllm", "--dry-run", "--pass-tokens-max", "64"), "pass_tokens_max must be 65"),
        (("--backend", "abacus", "--gpu", "H200"), "use openvino_cpu or trtllm"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    arguments: tuple[str, ...], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = plaserve(*arguments)
    assert result.exit_code == 1
    assert named in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
    assert "Traceback" not in result.output


def test_without_dry_run_the_runner_is_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from build_scripts.trtllm import runner

    calls: list[tuple[str, bool]] = []

    def build(spec: Any, progress: Any, *, force: bool) -> str:
        calls.append((spec.model, force))
        return spec.target  # type: ignore[no-any-return]

    monkeypatch.setattr(runner, "build", build)
    result = plaserve("--backend", "trtllm", "--model", "Qwen2.5-14B", "--out", str(tmp_path), "--force")
    assert result.exit_code == 0, result.output
    assert calls == [("Qwen2.5-14B", True)]
    assert "Qwen2.5-14B-trtllm" in result.output
