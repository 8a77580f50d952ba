"""`plaserve bundles` on a store in a directory, with a bundle made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from engines.gpu_bundle import check_gpu_bundle_content
from service.cli import app
from tests.engines.gpu_bundles import engine_bundle


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bundles", *map(str, words)])
    return result.exit_code, result.output


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return engine_bundle(tmp_path)


def test_there_and_back(bundle: Path, tmp_path: Path) -> None:
    bundle_id = check_gpu_bundle_content(bundle).bundle_id
    assert run("list", tmp_path / "store")[1].startswith("no bundle in")
    code, url = run("publish", bundle, tmp_path / "store")
    assert (code, url.strip().endswith(bundle_id)) == (0, True)
    code, said = run("list", tmp_path / "store")
    assert code == 0
    assert bundle_id[:12] in said
    assert "latest" in said
    code, said = run("fetch", url.strip(), tmp_path / "again", "--any-host")
    assert (code, bundle_id[:12] in said) == (0, True)
    assert check_gpu_bundle_content(tmp_path / "again").bundle_id == bundle_id


def test_what_does_not_fit_this_machine_is_refused_before_it_is_fetched(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    _, url = run("publish", bundle, tmp_path / "store")
    code, said = run("fetch", url.strip(), tmp_path / "here")
    assert code == 1
    assert "backend.tensorrt_llm" in said or "gpu.name" in said
    assert not list((tmp_path / "here").rglob("*.engine"))


def test_a_damaged_bundle_is_named(bundle: Path, tmp_path: Path) -> None:
    (bundle / "tokenizer.json").write_text("[]", encoding="utf-8")
    code, said = run("publish", bundle, tmp_path / "store")
    assert code == 1
    assert "tokenizer.json" in said


def test_an_unknown_kind_of_store_is_named(tmp_path: Path) -> None:
    code, said = run("list", "nowhere://x")
    assert code == 1
    assert "nowhere" in said
