"""Which versions are driven, and what is said of the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.executor.types import BackendUnavailable
from engines.trtllm_child.config import Driver
from engines.trtllm_child.guard import check_pinned, check_version, installed

NUMBERS = st.integers(0, 40)
SUFFIX = st.sampled_from(("", "", "rc1", ".dev2024121700", "a0", ".post1", "+cu130", "-nightly"))


@given(NUMBERS, NUMBERS, NUMBERS, SUFFIX, st.sampled_from(Driver))
def test_releases_of_1_2_and_nothing_else(
    major: int, minor: int, patch: int, suffix: str, driver: Driver
) -> None:
    version = f"{major}.{minor}.{patch}{suffix}"
    good = (major, minor) == (1, 2) and suffix in ("", ".post1", "+cu130")
    if good:
        check_version(version, driver)
    else:
        with pytest.raises(BackendUnavailable) as refused:
            check_version(version, driver)
        assert version in refused.value.reason
        assert "1.2.1" in refused.value.remedy


@given(st.text(max_size=12), st.sampled_from(Driver))
def test_any_other_text_is_refused_and_never_crashes(version: str, driver: Driver) -> None:
    with pytest.raises(BackendUnavailable):
        check_version(f"x{version}", driver)


@pytest.mark.parametrize("version", ["1.2.0", "1.2.1", "1.2.7"])
def test_the_line_that_is_driven(version: str) -> None:
    check_version(version)
    check_version(version, Driver.TORCH)


@pytest.mark.parametrize("version", ["0.17.0", "0.17.0.dev2024121700", "1.0.0", "1.1.0rc5"])
def test_before_1_2_the_remedy_is_to_upgrade_and_rebuild(version: str) -> None:
    with pytest.raises(
        BackendUnavailable, match=r"before 1\.2; upgrade: install TensorRT-LLM 1\.2\.1 and build"
    ):
        check_version(version)


@pytest.mark.parametrize("version", ["1.3.0rc11", "1.3.0", "1.4.0", "2.0.0"])
def test_past_1_2_an_engine_is_pointed_to_the_other_backend(version: str) -> None:
    with pytest.raises(BackendUnavailable, match="trtllm_torch"):
        check_version(version)
    with pytest.raises(BackendUnavailable, match="never tried"):
        check_version(version, Driver.TORCH)


@pytest.mark.parametrize("version", ["1.2.1rc7", "1.2", "1.2.1.dev5", "", "main", "1.2.x", "٣.2.1"])
def test_what_is_no_release_is_refused(version: str) -> None:
    with pytest.raises(BackendUnavailable):
        check_version(version)


def test_a_pinned_version_is_that_one() -> None:
    check_pinned("1.2.1", "1.2.1")
    check_pinned("1.2.1", None)
    with pytest.raises(
        BackendUnavailable, match=r"built with TensorRT-LLM 1\.2\.0, this environment has 1\.2\.1"
    ):
        check_pinned("1.2.1", "1.2.0")


def test_what_an_interpreter_has_is_read_from_metadata(tmp_path: Path) -> None:
    """A distribution without any module: whatever imports it would fail."""
    for name, version in (("tensorrt_llm", "1.2.1"), ("tensorrt", "10.14.1.48")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    found = installed(python)
    assert (found.tensorrt_llm, found.tensorrt) == ("1.2.1", "10.14.1.48")
    assert found.python == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("exec sleep 30", "did not answer"),
        ("echo no such option >&2; exit 2", "ended with 2: no such option"),
        ("echo hello", "gave no list of versions"),
        ("true", "gave no list of versions"),
    ],
)
def test_an_interpreter_that_is_none(tmp_path: Path, script: str, what: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(BackendUnavailable, match=what):
        installed(python, timeout_s=0.5)


def test_no_interpreter_at_all(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="can't be started"):
        installed(tmp_path / "nothing")


def test_the_service_side_imports_neither_tensorrt_llm_nor_torch() -> None:
    """And the child side nothing beside the standard library until it is told what to be."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "import engines.trtllm, engines.trtllm_torch, engines.trtllm_child.main\n"
        "import engines.trtllm_child.executor_driver, engines.trtllm_child.torch_driver\n"
        "heavy = {m.partition('.')[0] for m in sys.modules} & {'tensorrt_llm', 'tensorrt', 'torch'}\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    child = (
        "import sys; before = set(sys.modules)\n"
        "import engines.trtllm_child.main, engines.trtllm_child.executor_driver\n"
        "import engines.trtllm_child.torch_driver\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "alien = new - set(sys.stdlib_module_names) - {'engines', '__mp_main__'}\n"
        "assert not alien, alien\n"
    )
    subprocess.run([sys.executable, "-c", child], check=True)


def test_a_worker_of_the_executor_does_not_become_a_child() -> None:
    """mpi4py runs the main module of its parent again in each worker, as `__worker__`."""
    code = "import runpy; runpy.run_module('engines.trtllm_child', run_name='__worker__')"
    subprocess.run([sys.executable, "-c", code], check=True)
