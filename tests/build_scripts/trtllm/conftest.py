"""Builds against the fake TensorRT-LLM on a machine with one made-up GPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from build_scripts.trtllm.spec import TrtLlmSpec
from tests.build_scripts import trtllm_machine as machine
from tests.executor_fakes.package import write_package


@pytest.fixture(scope="session")
def python_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Interpreter of an environment with the fake packages of a stratum."""
    made: dict[str, Path] = {}

    def of(stratum: str) -> Path:
        if stratum not in made:
            directory = tmp_path_factory.mktemp(stratum)
            packages = [write_package(directory / "packages", stratum)]
            made[stratum] = machine.write_python(directory / "env", packages)
        return made[stratum]

    return of


@pytest.fixture(autouse=True)
def one_gpu(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(machine.write_smi(tmp_path_factory.mktemp("smi"))), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, python_of: Callable[[str], Path]) -> TrtLlmSpec:
    spec = machine.spec_for(tmp_path_factory.mktemp("once"), python_of("S3"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(machine.write_smi(tmp_path_factory.mktemp("smi"))), prepend=":")
        machine.build(spec)
    return spec


@pytest.fixture
def spec(once: TrtLlmSpec, tmp_path: Path) -> TrtLlmSpec:
    """A finished build of one's own, to damage and repeat; times of files are kept."""
    root = Path(once.out).parent
    shutil.copytree(root, tmp_path, dirs_exist_ok=True, symlinks=True)
    return replace(
        once,
        out=str(tmp_path / "bundles"),
        work_dir=tmp_path / once.work_dir.relative_to(root),
        checkpoint=tmp_path / "checkpoint",
    )
