"""Bundles for the PyTorch backend: from a checkpoint through the fake LLM in a child process to answers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from build_scripts.spec import BuildError
from build_scripts.trtllm import runner
from build_scripts.trtllm.job import Tools
from build_scripts.trtllm.measure import padded_shapes
from build_scripts.trtllm.plan import make_plan
from build_scripts.trtllm.recipe import child_config
from build_scripts.trtllm.spec import Backend, Quantisation, TrtLlmSpec, trtllm_spec
from build_scripts.trtllm.torch_plan import llm_call
from engines.cost_fit import SAMPLES_MIN, read_csv
from engines.gpu_catalog import child_config as served_config
from engines.trtllm_child.config import Driver
from engines.trtllm_child.torch_driver import llm_arguments
from engines.trtllm_torch import PASS_TOKENS_MAX, torch_classes
from engines.types import Layout, Padding
from service.bench.arms import ServerSpec, status
from service.cli import app
from tests.build_scripts import trtllm_machine as machine
from tests.build_scripts.trtllm.test_trtllm_served import answer, asked, serving
from tests.build_scripts.trtllm_machine import Heard, opened
from tests.executor_fakes.package import LOADER, write_package

STEPS = ["fetch", "verify", "calibrate", "manifest", "publish"]
SHARE = 0.581  # of the small GPU: the reserve, what is assumed for four graphs, and a small pool


def torch_spec(directory: Path, python: Path, **changed: Any) -> TrtLlmSpec:
    return machine.spec_for(directory, python, **{"backend": Backend.TORCH, "memory_share": SHARE, **changed})


@pytest.fixture(scope="module")
def built(
    tmp_path_factory: pytest.TempPathFactory, python_of: Callable[[str], Path]
) -> tuple[TrtLlmSpec, Heard]:
    """Through the adapter and its child process; beside the weights lies what no bundle takes."""
    directory = tmp_path_factory.mktemp("torch")
    spec, heard = torch_spec(directory, python_of("S3")), Heard()
    checkpoint = directory / "checkpoint"
    (checkpoint / "pytorch_model.bin").write_bytes(b"the same weights once more")
    (checkpoint / "original").mkdir()
    machine.write_weights(checkpoint / "original" / "model.safetensors")
    weights = checkpoint / "model.safetensors"  # as in the cache of a hub
    weights.rename(directory / "blob")
    weights.symlink_to(directory / "blob")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(machine.write_smi(tmp_path_factory.mktemp("smi"))), prepend=os.pathsep)
        runner.build(spec, heard)
    return spec, heard


# --- what is built ---


def test_a_checkpoint_becomes_a_bundle_that_opens(built: tuple[TrtLlmSpec, Heard]) -> None:
    spec, heard = built
    assert (heard.ran, heard.skipped) == (STEPS, [])
    bundle = opened(spec)
    manifest = bundle.manifest
    assert (manifest.backend.name, manifest.backend.tensorrt) == ("trtllm_torch", None)
    assert manifest.checkpoint is not None
    classes = torch_classes(spec.pass_tokens_max)
    assert manifest.checkpoint.capture_tokens == classes
    shapes = manifest.profiles
    assert (shapes.layout, shapes.padding, shapes.t_classes) == (Layout.PACKED, Padding.CLASS, classes)
    assert manifest.steps.keys() == {"fetch", "verify", "calibrate"}
    checked = CliRunner().invoke(app, ["build", "--check", spec.target, "--python", str(spec.python)])
    assert checked.exit_code == 0, checked.output
    assert "captured at start-up for 64 128 256 512 tokens" in checked.output


def test_the_bundle_has_the_files_that_a_download_would_have(built: tuple[TrtLlmSpec, Heard]) -> None:
    spec, _ = built
    bundle = opened(spec)
    assert spec.checkpoint is not None
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert {path.name for path in bundle.sp_dir.iterdir()} == wanted
    for name in wanted:
        assert (bundle.sp_dir / name).read_bytes() == (spec.checkpoint / name).read_bytes()
        assert not (bundle.sp_dir / name).is_symlink()


def test_each_size_ran_as_one_iteration_and_only_sizes_were_measured(
    built: tuple[TrtLlmSpec, Heard],
) -> None:
    spec, _ = built
    verified = json.loads((spec.work_dir / "verify" / "verify.json").read_text())
    passes = verified["checkpoint"]["passes"]
    assert [one["tokens"] for one in passes[:-1]] == list(torch_classes(512))
    assert all(one["ran"] is not None for one in passes)
    assert passes[-1]["pass"] == f"{spec.requests_opt} requests"
    assert verified["checkpoint"]["reused_tokens"] == 64
    samples = read_csv(Path(spec.target) / "calibration.csv")
    assert {(s.new_tokens, s.history) for s in samples} == {
        (size, past) for size in torch_classes(512) for past in (0, 1024)
    }


def test_what_is_served_is_started_as_what_was_measured(built: tuple[TrtLlmSpec, Heard]) -> None:
    """But for the folder, and the room for decode, which is the scheduler's alone."""
    spec, _ = built
    bundle = opened(spec)
    served = served_config(bundle)
    assert served.driver is Driver.TORCH
    assert served.decode_requests_max > 0
    measured = child_config(spec, machine.VERSION, served.model_dir, bundle.manifest.limits.kv_blocks)
    assert replace(served, decode_requests_max=0) == measured


async def test_it_is_served_over_grpc(built: tuple[TrtLlmSpec, Heard], tmp_path: Path) -> None:
    spec, _ = built
    environment = {"PLASERVE_EXECUTOR__PYTHON": str(spec.python)}
    arguments = ("--backend", "trtllm_torch", "--bundle", spec.target)
    async with serving(ServerSpec("plaserve", arguments, tmp_path / "server.log", environment)) as served:
        requests = [asked(0, 1200, 4), *(asked(seed, 20 + seed, 6) for seed in range(1, 5))]
        first = await asyncio.gather(*(answer(served.stub, request) for request in requests))
        again = [await answer(served.stub, request) for request in requests]
        books = await status(served.address)
    assert [len(tokens) for tokens, _ in first] == [4, 6, 6, 6, 6]
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in first]
    assert again[0][1].history_token_count >= 1200 - 2 * machine.BLOCK
    assert dict(books.outcome_counts) == {"COMPLETED": 10}


# --- going on ---


def test_a_build_that_is_done_is_not_repeated_and_a_change_repeats_what_it_touches(
    built: tuple[TrtLlmSpec, Heard], tmp_path: Path
) -> None:
    """Nothing is measured here: an engine that is opened is a failure."""
    done, _ = built
    shutil.copytree(Path(done.out).parent, tmp_path, dirs_exist_ok=True, symlinks=True)
    spec = replace(
        done,
        out=str(tmp_path / "bundles"),
        work_dir=tmp_path / done.work_dir.relative_to(Path(done.out).parent),
        checkpoint=tmp_path / "checkpoint",
    )

    def refuse(*given: Any) -> Any:
        raise AssertionError("an engine was opened")

    heard = Heard()
    runner.build(spec, heard, tools=Tools(open_engine=refuse))
    assert heard.skipped == STEPS
    for changed, first in (
        (replace(spec, calibration_s=0.06), "calibrate"),
        (replace(spec, requests_max=8), "verify"),
        (replace(spec, pass_tokens_max=500), "verify"),
    ):
        heard = Heard(first)
        with pytest.raises(KeyboardInterrupt):
            runner.build(changed, heard, tools=Tools(open_engine=refuse))
        assert heard.skipped == STEPS[: STEPS.index(first)]


# --- refusals ---


def test_a_release_that_can_not_capture_is_refused_at_verify(
    tmp_path: Path, python_of: Callable[[str], Path]
) -> None:
    heard, spec = Heard(), torch_spec(tmp_path, python_of("S1"))
    with pytest.raises(BuildError, match="can't capture prefill graphs"):
        runner.build(spec, heard)
    assert heard.ran == ["fetch", "verify"]
    assert not Path(spec.target).exists()


@pytest.mark.parametrize(("stratum", "said"), [("S0", "0.17.* is before 1.2"), ("S4", "never tried")])
def test_other_lines_are_refused_before_anything_is_begun(
    tmp_path: Path, python_of: Callable[[str], Path], stratum: str, said: str
) -> None:
    spec = torch_spec(tmp_path, python_of(stratum))
    with pytest.raises(BuildError, match=said):
        runner.build(spec)
    assert not spec.work_dir.exists()


def test_a_file_that_a_manifest_can_not_name_is_refused(
    tmp_path: Path, python_of: Callable[[str], Path]
) -> None:
    spec = torch_spec(tmp_path, python_of("S3"))
    assert spec.checkpoint is not None
    (spec.checkpoint / "LICENSE (copy).txt").write_text("...")
    with pytest.raises(BuildError, match=r"'LICENSE \(copy\)\.txt' can't be a file of a bundle"):
        runner.build(spec)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"quantisation": Quantisation.FP8}, "quantisation fp8 is made when engines are built"),
        ({"separate_lp": True}, "separate_lp is a second engine"),
        ({"requests_max": 256, "pass_tokens_max": 192}, "192 tokens of an iteration are kept"),
        ({"architecture": "mistral"}, "use qwen2 or llama or qwen3"),
    ],
)
def test_what_does_not_belong_is_refused_by_name(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    fields = {**changed}
    architecture = fields.pop("architecture", "qwen2")
    spec = torch_spec(tmp_path, Path("python"))
    with pytest.raises(BuildError, match=said):
        replace(spec, architecture=architecture, **fields)


# --- the plan ---


@pytest.mark.parametrize("model", ["Qwen2.5-7B-Instruct", "Llama-3.1-8B", "qwen/qwen3-32b"])
def test_a_plan_captures_the_classes_of_the_adapter(model: str) -> None:
    plan = make_plan(trtllm_spec(model, Path("bundles"), backend="trtllm_torch"))
    assert [step.name for step in plan.steps] == STEPS
    assert plan.classes == torch_classes(PASS_TOKENS_MAX)
    assert plan.llm is not None
    compiled = plan.llm.arguments["torch_compile_config"]["TorchCompileConfig"]
    assert tuple(compiled["capture_num_tokens"]) == plan.classes
    cache = plan.llm.arguments["kv_cache_config"]["KvCacheConfig"]
    assert cache["max_tokens"] == plan.memory.kv_tokens
    assert plan.memory.bytes_of("graphs") == len(plan.classes) * plan.graphs.graph_bytes_each
    assert sum(figure.size_bytes for figure in plan.memory.figures) <= plan.memory.usable_bytes
    assert plan.spec.bundle_name.endswith("-trtllm-torch")


@pytest.mark.parametrize("stratum", ["S2", "S3"])
def test_the_arguments_shown_are_those_that_a_release_is_called_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stratum: str
) -> None:
    """Asked of the child's own code, over the fake package in this process."""
    spec = torch_spec(tmp_path, Path("python"))
    shown = llm_call(spec, machine.VERSION, 100)
    monkeypatch.syspath_prepend(str(write_package(tmp_path / "packages", stratum)))
    before = set(sys.modules)
    try:
        called = llm_arguments(child_config(spec, machine.VERSION, "{checkpoint}", 100))
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("tensorrt_llm", "tensorrt", LOADER):
                del sys.modules[name]
    assert set(shown.arguments) - set(shown.optional) <= set(called) <= set(shown.arguments)
    for name, value in called.items():
        _same(shown.arguments[name], value, shown.optional)


def _same(shown: Any, called: Any, optional: tuple[str, ...]) -> None:
    if isinstance(shown, dict):
        ((name, fields),) = shown.items()
        assert type(called).__name__ == name
        for field, value in fields.items():
            if field not in optional or hasattr(called, field):
                _same(value, getattr(called, field), optional)
    elif isinstance(shown, str) and "." in shown:
        assert str(called).endswith(shown.rpartition(".")[2])
    else:
        assert shown == called


@given(
    pass_tokens=st.integers(65, 16_384),
    context=st.integers(257, 65_536),
)
@settings(max_examples=60, deadline=None)
def test_only_sizes_that_are_captured_are_measured_and_enough_of_them(pass_tokens: int, context: int) -> None:
    classes = torch_classes(pass_tokens)
    shapes = padded_shapes(classes, context)
    assert all(new in (*classes, context - 1) and new + past < context for new, past in shapes)
    assert {new for new, _ in shapes} == {min(size, context - 1) for size in classes}
    if context >= 2_048:
        assert len(shapes) >= SAMPLES_MIN
