"""The pipeline from a checkpoint to a bundle, against the fake TensorRT-LLM of every stratum, without a GPU.

Where the engine is asked, it is one that keeps time by a cost model; one test has the real adapter and its
child process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from build_scripts.spec import BuildError
from build_scripts.trtllm import runner
from build_scripts.trtllm.plan import make_plan
from build_scripts.trtllm.spec import GemmChoice, Quantisation, TrtLlmSpec
from engines.bundle_base import MANIFEST
from engines.cost_fit import read_csv
from engines.gpu_host import GpuHost
from engines.trtllm_profiles import profile_ranges
from tests.build_scripts import trtllm_machine as machine
from tests.build_scripts.trtllm_machine import Heard, build, opened
from tests.executor_fakes.package import write_package

STEPS = [
    *("fetch", "convert", "build-sp-plugin", "build-sp-tensorrt", "choose", "share"),
    *("verify", "calibrate", "manifest", "publish"),
]


# --- from end to end ---


@pytest.mark.parametrize(
    ("stratum", "architecture", "quantisation"),
    [("S1", "qwen2", Quantisation.NONE), ("S2", "llama", Quantisation.FP8)],
)
def test_a_checkpoint_becomes_a_bundle_that_opens(
    tmp_path: Path,
    python_of: Callable[[str], Path],
    stratum: str,
    architecture: str,
    quantisation: Quantisation,
) -> None:
    spec = machine.spec_for(tmp_path, python_of(stratum), architecture, quantisation=quantisation)
    engines: list[machine.Opened] = []
    heard = build(spec, machine.model_tools(engines))
    assert (heard.ran, heard.skipped) == (STEPS, [])
    manifest = opened(spec).manifest
    fp8 = quantisation is Quantisation.FP8
    assert (manifest.backend.tensorrt_llm, manifest.backend.quantisation) == (machine.VERSION, quantisation)
    assert manifest.backend.kv_dtype == ("fp8" if fp8 else "bfloat16")
    assert manifest.model.shape == machine.SHAPES[architecture]
    assert {file.name for file in manifest.model.source.files} >= {"model.safetensors", "config.json"}
    assert manifest.engines is not None
    assert manifest.engines.sp.profiles == profile_ranges(512, requests_max=16)
    # By the cost models here: what is timed decides, and both figures are kept.
    assert manifest.engines.sp.gemm_plugin
    assert [c.kept for c in manifest.candidates] == [True, False]
    assert [t for t, _ in manifest.candidates[1].pass_s] == [64, 128, 256, 512]
    assert sum(s for _, s in manifest.candidates[0].pass_s) < sum(s for _, s in manifest.candidates[1].pass_s)
    assert manifest.cost is not None
    samples = read_csv(Path(spec.target) / "calibration.csv")
    assert len(samples) == manifest.cost.sample_count > 8
    assert {sample.history for sample in samples} == {0, 1024}
    assert {engine.config.kv_blocks for engine in engines[2:]} == {manifest.limits.kv_blocks}
    assert all(engine.engine.closed for engine in engines)
    assert {file.name for file in manifest.files} == {
        *("sp/config.json", "sp/rank0.engine", "model.cache", "calibration.csv", "tokenizer.json")
    }


def test_through_the_adapter_and_its_child_process(tmp_path: Path, python_of: Callable[[str], Path]) -> None:
    spec = machine.spec_for(tmp_path, python_of("S3"), separate_lp=True, gemm=GemmChoice.TENSORRT)
    heard = Heard()
    runner.build(spec, heard)
    assert heard.ran == [s if s != "share" else "build-lp" for s in STEPS if s != "build-sp-plugin"]
    manifest = opened(spec).manifest
    assert manifest.engines is not None
    assert manifest.engines.lp is not None
    assert manifest.engines.lp.profiles == ((1, 512, 512),)
    assert not manifest.engines.lp.gemm_plugin
    assert [(c.engine, c.kept) for c in manifest.candidates] == [("sp", True), ("lp", True)]
    verified = json.loads((spec.work_dir / "verify" / "verify.json").read_text())
    assert verified["engines"]["sp"]["reused_tokens"] == 64
    assert verified["engines"]["sp"]["plan_ratio_to"] == "the plan with one profile"
    ran = [one["ran"] for name in ("sp", "lp") for one in verified["engines"][name]["passes"]]
    assert len(ran) == 6
    assert None not in ran  # the executor's statistics told each pass
    assert list((spec.work_dir / "logs").glob("verify-*.log"))


# --- going on ---


def test_a_build_goes_on_wherever_it_was_interrupted(spec: TrtLlmSpec) -> None:
    """Each run ends one step later, before that step is recorded: the next repeats it, and no other."""
    shutil.rmtree(spec.out)
    digests: dict[str, Any] = {}
    for index, step in enumerate(STEPS):
        heard = Heard(step, at_end=step != "publish")
        with pytest.raises(KeyboardInterrupt):
            runner.build(spec, heard, tools=machine.model_tools())
        assert heard.skipped == STEPS[: max(0, index - 1)]
        assert heard.ran == STEPS[max(0, index - 1) : index + (step != "publish")]
        assert not Path(spec.target).exists()
        now = {s: json.loads((spec.work_dir / s / "step.json").read_text()) for s in STEPS[:index]}
        assert digests.items() <= now.items()
        digests = now
    manifest = json.loads((spec.work_dir / "manifest" / MANIFEST).read_text())
    heard = build(spec)
    assert (heard.skipped, heard.ran) == (STEPS[:-1], ["publish"])
    assert opened(spec).fingerprint == manifest["bundle_id"]
    assert build(spec).skipped == STEPS


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()  # files are linked into the bundle: write another one
    path.write_bytes(data)


def _other_weights(spec: TrtLlmSpec) -> TrtLlmSpec:
    assert spec.checkpoint is not None
    machine.write_weights(spec.checkpoint / "model.safetensors", seed=7)
    return spec


def _touched(spec: TrtLlmSpec) -> TrtLlmSpec:
    assert spec.checkpoint is not None
    (spec.checkpoint / "model.safetensors").touch()
    return spec


def _damaged_bundle(spec: TrtLlmSpec) -> TrtLlmSpec:
    _flip(Path(spec.target) / "tokenizer.json")
    return spec


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (_touched, None),
        (_damaged_bundle, "publish"),
        (lambda spec: replace(spec, calibration_s=0.06), "calibrate"),
        (lambda spec: replace(spec, gemm=GemmChoice.PLUGIN), "choose"),
        (_other_weights, "fetch"),
    ],
)
def test_a_change_repeats_what_it_touches_and_nothing_else(
    spec: TrtLlmSpec, change: Callable[[TrtLlmSpec], TrtLlmSpec], first: str | None
) -> None:
    changed = change(spec)
    heard = build(changed)
    present = [s for s in STEPS if changed.gemm is GemmChoice.BOTH or s != "build-sp-tensorrt"]
    repeated = [] if first is None else present[present.index(first) :]
    assert heard.ran == repeated
    assert heard.skipped == [s for s in present if s not in repeated]
    opened(changed)


def test_a_damaged_output_is_made_again_and_what_rests_on_it_only_where_it_differs(spec: TrtLlmSpec) -> None:
    """This copy lies in another folder; nothing that a build leaves tells of it, so it comes out the same."""
    _flip(spec.work_dir / "build-sp-tensorrt" / "config.json")
    heard = build(spec)
    assert heard.ran == ["build-sp-tensorrt"]
    opened(spec)


def test_under_another_branch_of_the_driver_it_is_verified_again(
    spec: TrtLlmSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for driver, ran in (("570.200.01", []), ("580.65.06", ["verify", "calibrate", "manifest", "publish"])):
        monkeypatch.setenv("PATH", str(machine.write_smi(tmp_path / driver, driver=driver)), prepend=":")
        assert build(spec).ran == ran
    assert opened(spec).manifest.gpu.driver == "580.65.06"
    assert not opened(spec).warnings


def test_other_texts_are_another_conversion(spec: TrtLlmSpec, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("one\n")
    fp8 = replace(spec, quantisation=Quantisation.FP8, calibration_text=texts)
    with pytest.raises(KeyboardInterrupt):
        runner.build(fp8, Heard("build-sp-plugin"), tools=machine.model_tools())
    assert (spec.work_dir / "scratch" / "calibration_set" / "train.txt").read_text() == "one\n"
    texts.write_text("two\n")
    heard = Heard("build-sp-plugin")
    with pytest.raises(KeyboardInterrupt):
        runner.build(fp8, heard, tools=machine.model_tools())
    assert (heard.skipped, heard.ran) == (["fetch"], ["convert"])
    with pytest.raises(BuildError, match=r"calibration_text .*none\.txt: no such file"):
        build(replace(fp8, calibration_text=tmp_path / "none.txt"))


def test_later_builds_start_from_the_timings_of_earlier_ones(spec: TrtLlmSpec) -> None:
    timings = []
    for step in ("build-sp-plugin", "build-sp-tensorrt"):
        asked = json.loads((spec.work_dir / "scratch" / f"{step}-build.request.json").read_text())
        timings.append(asked["arguments"]["build_config"]["input_timing_cache"])
    assert timings[0] is None
    assert Path(timings[1]).parent.name == "timing"


def test_force_repeats_all_but_the_download(spec: TrtLlmSpec) -> None:
    heard = build(spec, force=True)
    assert heard.ran[:8] == STEPS[1:-1]
    assert set(heard.skipped) <= {"fetch", "publish"}  # a bundle that came out the same is there already


# --- the hub, stores ---


HUB = """
import shutil
from pathlib import Path
PLACE = Path({place!r})

class HfApi:
    def model_info(self, repo, revision):
        class Info:
            sha = (PLACE / "heads" / revision).read_text()
        return Info

def snapshot_download(repo_id, revision, local_dir, allow_patterns):
    shutil.copytree(PLACE / revision, local_dir, dirs_exist_ok=True)
    (Path(local_dir) / ".cache" / "huggingface").mkdir(parents=True)
"""


def test_a_branch_of_the_hub_does_not_move_while_a_build_goes_on(tmp_path: Path) -> None:
    place, packages = tmp_path / "hub", write_package(tmp_path / "packages", "S3")
    commits = ["a" * 40, "b" * 40]
    for commit in commits:
        machine.write_checkpoint(place / commit)
    (place / "heads").mkdir()
    (place / "heads" / "main").write_text(commits[0])
    (packages / "huggingface_hub.py").write_text(HUB.format(place=str(place)))
    python = machine.write_python(tmp_path / "env", [packages])
    spec = machine.spec_for(tmp_path, python, checkpoint=None, repo="made/up")
    with pytest.raises(KeyboardInterrupt):
        runner.build(spec, Heard("convert"), tools=machine.model_tools())
    source = json.loads((spec.work_dir / "fetch" / "source.json").read_text())
    assert (source["repo"], source["revision"], source["licence"]) == ("made/up", commits[0], "apache-2.0")
    assert not (spec.work_dir / "fetch" / ".cache").exists()
    (place / "heads" / "main").write_text(commits[1])
    heard = Heard("convert")
    with pytest.raises(KeyboardInterrupt):
        runner.build(spec, heard, tools=machine.model_tools())
    assert heard.skipped == ["fetch"]
    with pytest.raises(KeyboardInterrupt):
        runner.build(spec, Heard("convert"), force=True, tools=machine.model_tools())
    assert json.loads((spec.work_dir / "fetch" / "source.json").read_text())["revision"] == commits[1]
    with pytest.raises(BuildError, match=r"made/up@gone can't be had from the hub.*--checkpoint"):
        build(replace(spec, revision="gone"))


def test_a_store_gets_the_bundle(spec: TrtLlmSpec, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    remote = replace(spec, out=f"file://{tmp_path}/store")
    heard = build(remote)
    assert heard.ran == ["publish"]
    (manifest,) = (tmp_path / "store" / "bundles" / spec.bundle_name).glob("*/manifest.json")
    assert manifest.parent.name in heard.said["publish"]
    assert manifest.read_bytes() == (Path(spec.target) / MANIFEST).read_bytes()


def test_a_triton_server_is_given_the_same_engine(once: TrtLlmSpec) -> None:
    pytest.importorskip("tritonclient")
    from build_scripts.trtllm.triton_repository import read_config

    config = read_config(Path(once.out) / runner.TRITON / once.bundle_name)
    given = {name: value.string_value for name, value in config.parameters.items()}
    bundle = opened(once)
    assert Path(given["gpt_model_path"]) == bundle.sp_dir.resolve()
    assert bundle.fingerprint in given.values()
    pool = bundle.manifest.limits.kv_blocks * bundle.manifest.limits.block_tokens
    assert given["max_tokens_in_paged_kv_cache"] == str(pool)


def test_the_plan_of_a_build_is_that_of_the_dry_run(spec: TrtLlmSpec) -> None:
    """Same steps and same recipes; only what a machine adds to the keys differs."""
    planned = make_plan(spec)
    host = GpuHost.current(spec.python)
    gpu = runner.find_gpu(spec, host)
    real = make_plan(spec, runner.find_target(spec, host, gpu))
    assert [step.name for step in real.steps] == [step.name for step in planned.steps] == STEPS
    assert real.convert == planned.convert
    assert [asdict(engine) for engine in real.engines] == [asdict(engine) for engine in planned.engines]
