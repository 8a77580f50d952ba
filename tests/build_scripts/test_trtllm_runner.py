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
from build_scripts.trtllm import job as job_module
from build_scripts.trtllm import runner
from build_scripts.trtllm.job import Tools
from build_scripts.trtllm.launch import run_inside
from build_scripts.trtllm.plan import make_plan
from build_scripts.trtllm.recipe import fill
from build_scripts.trtllm.spec import GemmChoice, Quantisation, TrtLlmSpec
from engines.bundle_base import MANIFEST
from engines.cost_fit import read_csv
from engines.gpu_bundle import GpuBundle, open_gpu_bundle
from engines.gpu_host import GpuHost
from engines.trtllm_profiles import profile_ranges
from tests.build_scripts import trtllm_machine as machine
from tests.build_scripts.trtllm_machine import Heard
from tests.executor_fakes.package import write_package

STEPS = [
    *("fetch", "convert", "build-sp-plugin", "build-sp-tensorrt", "choose", "share"),
    *("verify", "calibrate", "manifest", "publish"),
]


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


def build(spec: TrtLlmSpec, tools: Tools | None = None, **options: bool) -> Heard:
    heard = Heard()
    runner.build(spec, heard, tools=tools or machine.model_tools(), **options)
    return heard


def opened(spec: TrtLlmSpec, full: bool = True) -> GpuBundle:
    return open_gpu_bundle(Path(spec.target), python=spec.python, full=full)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory, python_of: Callable[[str], Path]) -> TrtLlmSpec:
    spec = machine.spec_for(tmp_path_factory.mktemp("once"), python_of("S3"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(machine.write_smi(tmp_path_factory.mktemp("smi"))), prepend=":")
        build(spec)
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


# --- what is refused at once ---


def test_without_a_gpu_nothing_is_begun(
    tmp_path: Path, python_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = machine.spec_for(tmp_path, python_of("S3"), checkpoint=None, repo="made/up")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no GPU.*not installed.*machine with a H200.*--dry-run"):
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
    """An engine's config.json names its folder, which is another one in this copy; the plans are the same."""
    _flip(spec.work_dir / "build-sp-tensorrt" / "config.json")
    heard = build(spec)
    assert heard.ran[:2] == ["build-sp-tensorrt", "choose"]
    assert heard.skipped[:3] == ["fetch", "convert", "build-sp-plugin"]
    opened(spec)


def test_under_another_branch_of_the_driver_it_is_verified_again(
    spec: TrtLlmSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for driver, ran in (("570.200.01", []), ("580.65.06", ["verify", "calibrate", "manifest", "publish"])):
        monkeypatch.setenv("PATH", str(machine.write_smi(tmp_path / driver, driver=driver)), prepend=":")
        assert build(spec).ran == ran
    assert opened(spec).manifest.gpu.driver == "580.65.06"
    assert not opened(spec).warnings


def test_a_checkpoint_without_a_tokenizer_is_refused_before_anything_is_built(
    tmp_path: Path, python_of: Callable[[str], Path]
) -> None:
    spec = machine.spec_for(tmp_path, python_of("S3"))
    (tmp_path / "checkpoint" / "tokenizer.json").unlink()
    with pytest.raises(BuildError, match=r"no tokenizer\.json"):
        build(spec)
    assert not spec.work_dir.exists()


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
    timings = [
        json.loads((spec.work_dir / step / "config.json").read_text())["build_config"]["input_timing_cache"]
        for step in ("build-sp-plugin", "build-sp-tensorrt")
    ]
    assert timings[0] is None
    assert Path(timings[1]).parent.name == "timing"


def test_force_repeats_all_but_the_download(spec: TrtLlmSpec) -> None:
    assert build(spec, force=True).skipped == ["fetch"]


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


def test_the_plan_of_a_build_is_that_of_the_dry_run(spec: TrtLlmSpec) -> None:
    """Same steps and same recipes; only what a machine adds to the keys differs."""
    planned = make_plan(spec)
    host = GpuHost.current(spec.python)
    gpu = runner.find_gpu(spec, host)
    real = make_plan(spec, runner.find_target(spec, host, gpu))
    assert [step.name for step in real.steps] == [step.name for step in planned.steps] == STEPS
    assert real.convert == planned.convert
    assert [asdict(engine) for engine in real.engines] == [asdict(engine) for engine in planned.engines]
