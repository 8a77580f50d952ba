"""`plaserve build --backend trtllm_torch` as a user types it: the dry run, and what does not belong to it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from build_scripts.trtllm.plan import make_plan
from build_scripts.trtllm.spec import trtllm_spec
from service.cli import app
from service.cli.build_trtllm_view import render

TORCH = ("--backend", "trtllm_torch")
MODELS = ("Qwen2.5-7B-Instruct", "Llama-3.1-8B", "Qwen3-32B")


def plaserve(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["build", *TORCH, *arguments], env={"COLUMNS": "100"})


@pytest.mark.parametrize("model", MODELS)
def test_a_dry_run_shows_the_whole_plan_and_leaves_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = plaserve("--model", model, "--dry-run")
    assert result.exit_code == 0, result.output
    assert not list(tmp_path.iterdir())
    plan = make_plan(trtllm_spec(model, Path("bundles"), backend="trtllm_torch"))
    assert plan.llm is not None
    for step in plan.steps:
        assert step.name in result.output
    for size in plan.classes:
        assert f"{size:,} │" in result.output
    words = ("not measured here", "LAPS", "its PyTorch backend", "graphs", "Given where the release has it")
    for word in words:
        assert word in result.output
    for word in ("convert", "trtllm-build", "GEMM", "TensorRT 10"):
        assert word not in result.output
    shown = "".join(result.output.split())  # long lines fold
    for name, value in plan.llm.arguments.items():
        assert f"{name}={'' if isinstance(value, dict) else repr(value)}" in shown
    assert "".join(plan.llm.text().split()) in shown


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("options", [{}, {"pass_tokens_max": 16_384}, {"pass_tokens_max": 200}])
def test_it_fits_its_width_and_cuts_no_number(width: int, options: dict[str, Any]) -> None:
    out = io.StringIO()
    plan = make_plan(trtllm_spec(MODELS[0], Path("bundles"), backend="trtllm_torch", **options))
    Console(file=out, width=width, highlight=False).print(render(plan))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out.getvalue()


def test_options_reach_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = plaserve(
        "--dry-run", "--checkpoint", "ckpt", "--python", "/opt/py", "--dtype", "float16", "--gpu", "H100",
        "--pass-tokens-max", "2048", "--requests-max", "16", "--context-tokens-max", "8192",
        "--publish", "s3://bucket/b", "--json", str(file),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    wanted = {
        "backend": "trtllm_torch", "checkpoint": "ckpt", "python": "/opt/py", "dtype": "float16",
        "pass_tokens_max": 2048, "requests_max": 16, "context_tokens_max": 8192, "gpu": "H100",
        "out": "s3://bucket/b",
    }  # fmt: skip
    assert {name: data["spec"][name] for name in wanted} == wanted
    llm = data["llm"]["arguments"]
    assert (llm["dtype"], llm["max_num_tokens"], llm["max_seq_len"]) == ("float16", 2048, 8192)
    assert llm["torch_compile_config"]["TorchCompileConfig"]["capture_num_tokens"] == data["classes"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--gemm", "plugin"), "--gemm does not go with --backend trtllm_torch"),
        (("--separate-lp",), "--separate-lp does not go"),
        (("--lengths", "8,16"), "--lengths does not go"),
        (("--batches", "1,2"), "--batches does not go"),
        (("--quantisation", "fp8"), "--quantisation does not go"),
        (("--calibration-text", "t.txt"), "--calibration-text does not go"),
        (("--threads", "2"), "--threads does not go"),
        (("--gguf", "w"), "--gguf does not go"),
        (("--json", "p.json"), "--json goes with --dry-run"),
        (("--dry-run", "--model", "Mixtral-8x7B"), "Qwen2, Qwen2.5, Qwen3 and Llama can"),
        (("--dry-run", "--model", "Qwen3-32B-Instruct"), "chats as it is"),
        (("--dry-run", "--pass-tokens-max", "128"), "192 tokens of an iteration are kept"),
        (("--dry-run", "--model", "Qwen3-32B", "--gpu", "L40S"), "does not fit L40S"),
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
    assert "fp8" not in result.stderr.lower() or "--quantisation" in arguments
