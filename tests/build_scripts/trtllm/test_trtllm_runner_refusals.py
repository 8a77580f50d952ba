"""Builds that must not begin, and engines that must not be published."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from build_scripts.spec import BuildError
from build_scripts.trtllm import job as job_module
from build_scripts.trtllm.launch import run_inside
from build_scripts.trtllm.plan import make_plan
from build_scripts.trtllm.recipe import fill
from build_scripts.trtllm.spec import TrtLlmSpec
from tests.build_scripts import trtllm_machine as machine
from tests.build_scripts.trtllm_machine import build

# --- what is refused at once ---


def test_without_a_gpu_nothing_is_begun(
    tmp_path: Path, python_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = machine.spec_for(tmp_path, python_of("S3"), checkpoint=None, repo="made/up")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no GPU.*not installed.*machine with the GPU H200.*--dry-run"):
        build(spec)
    assert not spec.work_dir.exists()


def test_another_gpu_is_refused(
    tmp_path: Path, python_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(machine.write_smi(tmp_path / "other", "NVIDIA L4")), prepend=":")
    with pytest.raises(BuildError, match="the GPU here is NVIDIA L4, the build is for H200"):
        build(machine.spec_for(tmp_path, python_of("S3")))


@pytest.mark.parametrize(
    ("stratum", "said"), [("S0", r"0\.17\.0.*upgrade"), ("S4", r"1\.4\.0.*trtllm_torch")]
)
def test_strata_without_a_usable_engine_backend_are_refused(
    tmp_path: Path, python_of: Callable[[str], Path], stratum: str, said: str
) -> None:
    spec = machine.spec_for(tmp_path, python_of(stratum))
    with pytest.raises(BuildError, match=said):
        build(spec)
    assert not spec.work_dir.exists()


def test_an_environment_without_the_package_is_refused(tmp_path: Path) -> None:
    python = machine.write_python(tmp_path / "env", [])
    for info in tmp_path.glob("env/lib/*/site-packages/*.dist-info"):
        shutil.rmtree(info)
    with pytest.raises(BuildError, match=r"has no tensorrt_llm.*tensorrt-llm==1\.2\.1.*--python"):
        build(machine.spec_for(tmp_path, python))


def test_a_checkpoint_of_another_shape_is_refused_before_it_is_hashed(
    tmp_path: Path, python_of: Callable[[str], Path]
) -> None:
    spec = machine.spec_for(tmp_path, python_of("S3"))
    machine.write_checkpoint(tmp_path / "checkpoint", hidden_size=96, vocab_size=7)
    with pytest.raises(BuildError, match=r"hidden_size is 96.*has 64.*vocab_size is 7.*has 600"):
        build(spec)
    assert not spec.work_dir.exists()


def test_a_gpu_that_is_too_small_is_refused(
    tmp_path: Path, python_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is for 141 GB; what this one has counts."""
    monkeypatch.setenv("PATH", str(machine.write_smi(tmp_path / "small", mib=2_000)), prepend=":")
    with pytest.raises(BuildError, match="does not fit H200"):
        build(machine.spec_for(tmp_path, python_of("S3")))


def test_a_checkpoint_without_a_tokenizer_is_refused_before_anything_is_built(
    tmp_path: Path, python_of: Callable[[str], Path]
) -> None:
    spec = machine.spec_for(tmp_path, python_of("S3"))
    (tmp_path / "checkpoint" / "tokenizer.json").unlink()
    with pytest.raises(BuildError, match=r"no tokenizer\.json"):
        build(spec)
    assert not spec.work_dir.exists()


# --- what comes out wrong ---


def _answers(monkeypatch: pytest.MonkeyPatch, what: str, **changed: Any) -> None:
    """Another answer of one step of `inside`."""

    def answered(python: Path, step: str, request: Any, **options: Any) -> dict[str, Any]:
        answer = run_inside(python, step, request, **options)
        return {**answer, **changed} if step == what else answer

    monkeypatch.setattr(job_module, "run_inside", answered)


@pytest.mark.parametrize(
    ("what", "changed", "said"),
    [
        (
            "build",
            {"changed": {"max_num_tokens": [512, 256]}},
            "max_num_tokens came out as 256, asked for 512",
        ),
        (
            "profiles",
            {"profiles": [[1, 512, 512]]},
            r"sp has the profiles \[\[1, 512, 512\]\], planned are \[\[1, 64, 64\]",
        ),
        ("profiles", {"requests": [8]}, r"takes \[8\] requests by profile, planned are 16"),
        ("profiles", {"activation_bytes": 10**12}, "KV for 0 tokens, fewer than context_tokens_max"),
        ("versions", {"tensorrt": "10.0"}, r"imports tensorrt 10\.0, its package metadata says"),
    ],
)
def test_an_engine_that_is_not_as_planned_is_not_published(
    spec: TrtLlmSpec, monkeypatch: pytest.MonkeyPatch, what: str, changed: dict[str, Any], said: str
) -> None:
    step = {"build": "build-sp-plugin", "profiles": "verify", "versions": "convert"}[what]
    shutil.rmtree(spec.work_dir / step)
    shutil.rmtree(spec.target)
    _answers(monkeypatch, what, **changed)
    with pytest.raises(BuildError, match=said):
        build(spec)
    assert not Path(spec.target).exists()


def test_what_is_changed_and_does_no_harm_is_noted(spec: TrtLlmSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(spec.work_dir / "build-sp-plugin")
    _answers(monkeypatch, "build", changed={"plugin_config.nccl_plugin": [None, "float16"]})
    assert "not as asked: plugin_config.nccl_plugin" in build(spec).said["build-sp-plugin"]


def test_an_engine_without_block_reuse_is_not_published(spec: TrtLlmSpec) -> None:
    shutil.rmtree(spec.work_dir / "verify")
    with pytest.raises(BuildError, match="block reuse is off or broken"):
        build(spec, machine.model_tools(reuse=False))


@pytest.mark.parametrize("stratum", ["S1", "S3"])
@pytest.mark.parametrize("part", ["build_config", "plugin_config"])
def test_a_name_that_the_api_does_not_have_is_a_failure(
    tmp_path: Path, spec: TrtLlmSpec, python_of: Callable[[str], Path], stratum: str, part: str
) -> None:
    recipe = make_plan(spec).engines[0].arguments["build-sp-plugin"]
    paths = dict.fromkeys(("engine", "timing_cache_in", "timing_cache_out"), str(tmp_path / "x"))
    arguments = fill(recipe, {**paths, "converted": str(spec.work_dir / "convert")})
    arguments[part] = {**arguments[part], "not_a_name": 1}
    with pytest.raises(BuildError, match=r"(?s)not_a_name.*exact version"):
        run_inside(
            python_of(stratum),
            "build",
            {"arguments": arguments},
            scratch=tmp_path / "scratch",
            log=tmp_path / "build.log",
            timeout_s=20.0,
        )


def test_a_conversion_that_fails_shows_its_last_lines(spec: TrtLlmSpec, tmp_path: Path) -> None:
    """As where TensorRT-LLM can't read the weights."""
    packages = tmp_path / "packages" / "tensorrt_llm"
    (packages / "models" / "modeling_utils").mkdir(parents=True)
    (packages / "__init__.py").write_text("__version__ = '1.2.1'\n")
    (packages / "mapping.py").write_text("class Mapping:\n    def __init__(self, **fields): ...\n")
    (packages / "models" / "__init__.py").write_text(
        "class QWenForCausalLM:\n    @classmethod\n    def from_hugging_face(cls, **given):\n"
        "        print('loading', given['hf_model_or_dir'])\n        raise OSError('header too large')\n"
    )
    (packages / "models" / "modeling_utils" / "__init__.py").write_text("class QuantConfig: ...\n")
    (tmp_path / "packages" / "tensorrt.py").write_text(f"__version__ = '{machine.TENSORRT}'\n")
    python = machine.write_python(tmp_path / "env", [tmp_path / "packages"])
    shutil.rmtree(spec.work_dir)
    with pytest.raises(
        BuildError, match=r"(?s)convert-?.*header too large.*last lines of .*convert\.log.*loading"
    ):
        build(replace(spec, python=python))
