"""`plaserve build --check` tells of which kind a bundle is, shows what it is, or says what does not fit."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from engines.bundle_base import MANIFEST
from engines.gpu_bundle import open_gpu_bundle
from engines.gpu_host import GpuHost
from service.cli import app
from service.cli.bundle_view import lines, show_gpu_bundle
from tests.engines.gpu_bundles import GPU, HOST, TENSORRT, VERSION, edit, engine_bundle, torch_bundle


def check(path: Path) -> Result:
    return CliRunner().invoke(app, ["build", "--check", str(path)], env={"COLUMNS": "100"})


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is the one that the bundle was built on."""
    monkeypatch.setattr(GpuHost, "current", lambda python: HOST)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("build", [engine_bundle, torch_bundle])
def test_a_bundle_that_fits_is_shown(build, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = build(tmp_path / "b")
    result = check(path)
    assert result.exit_code == 0, result.output
    bundle = open_gpu_bundle(path, host=HOST)
    for word in (
        bundle.fingerprint[:12],
        "tiny-qwen",
        VERSION,
        GPU.name,
        GPU.driver,
        "Apache-2.0",
        "made up",
    ):
        assert word in result.output
    assert (TENSORRT in result.output) is (bundle.manifest.engines is not None)
    assert "warning" not in result.output


@pytest.mark.usefixtures("here")
def test_warnings_are_shown_last(tmp_path: Path) -> None:
    path = engine_bundle(tmp_path / "b")

    def older(data: dict) -> None:  # type: ignore[type-arg]
        data["gpu"]["driver"] = "550.1"
        data["cost"] = None

    edit(path, older, seal=True)
    output = check(path).output.splitlines()
    warnings = [line for line in output if line.startswith("warning")]
    assert len(warnings) == 2
    assert "550.1" in warnings[0]
    assert any(line.startswith("cost") and "not calibrated" in line for line in output)
    assert not [line for line in output[output.index(warnings[0]) :] if line.startswith(("fit", "candidate"))]


def test_a_machine_without_the_libraries_is_told_in_one_line(tmp_path: Path) -> None:
    result = check(engine_bundle(tmp_path / "b"))
    assert result.exit_code == 1
    assert "backend.tensorrt_llm" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"backend": {"name": 3}}', '{"backend": {"name": "abacus"}}']
)
def test_what_is_no_bundle_is_told_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    for path in (tmp_path, tmp_path / "absent"):
        result = check(path)
        assert result.exit_code == 1
        assert result.output.startswith("plaserve: bundle")


@pytest.mark.parametrize("width", [60, 80, 140])
def test_nothing_is_cut_at_any_width(width: int, tmp_path: Path) -> None:
    bundle = open_gpu_bundle(engine_bundle(tmp_path / "b"), host=HOST)
    out = io.StringIO()
    show_gpu_bundle(bundle, Console(file=out, width=width, highlight=False))
    shown = out.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    packed = "".join(shown.split())
    for name, text in lines(bundle):
        assert name in shown
        assert all(word in packed for word in text.split())
