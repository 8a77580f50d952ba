"""What a real machine does to a build: wheels with other names, slow networks, kills, full disks."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from build_scripts.spec import BuildError
from build_scripts.store import Store
from build_scripts.trtllm import assemble, publish, runner
from build_scripts.trtllm import job as job_module
from build_scripts.trtllm.estimates import RESERVE_BYTES, kv_bytes_per_token
from build_scripts.trtllm.launch import run_inside
from build_scripts.trtllm.plan import make_plan
from build_scripts.trtllm.spec import Quantisation, TrtLlmSpec, trtllm_spec
from engines.bundle_base import BundleMismatch
from engines.gpu_bundle import read_gpu_manifest
from engines.gpu_host import Gpu, GpuHost, memory_used
from engines.trtllm_child.guard import installed
from tests.build_scripts import trtllm_machine as machine
from tests.build_scripts.trtllm_machine import Heard, build, opened
from tests.engines.gpu_bundles import HOST, engine_bundle
from tests.executor_fakes.package import write_package

# --- what is left behind ---


def test_nothing_in_a_bundle_tells_where_it_was_built(spec: TrtLlmSpec, once: TrtLlmSpec) -> None:
    place = Path(once.out).parent
    for file in Path(once.target).rglob("*"):
        if file.is_file():
            assert str(place).encode() not in file.read_bytes(), file
    shutil.rmtree(spec.work_dir / "build-sp-tensorrt")
    build(spec)  # in another folder, with timings to begin with
    assert opened(spec).fingerprint == opened(once).fingerprint


def test_what_the_builder_always_sets_is_not_told_as_a_change(once: TrtLlmSpec) -> None:
    facts = json.loads((once.work_dir / "build-sp-plugin" / "facts.json").read_text())
    assert not {"plugin_config.paged_kv_cache", "plugin_config.paged_state"} & set(facts["changed"])


# --- wheels ---


def _wheel(python: Path, old: str, name: str, version: str) -> None:
    """Put the metadata of another wheel in the place of `old`'s."""
    (info,) = python.parent.parent.glob(f"lib/*/site-packages/{old}-[0-9]*.dist-info")
    info = info.rename(info.with_name(f"{name}-{version}.dist-info"))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("name", "version"),
    [("tensorrt", f"{machine.TENSORRT}.post1"), ("tensorrt_cu13", machine.TENSORRT)],
)
def test_a_wheel_of_tensorrt_may_be_packaged_otherwise(tmp_path: Path, name: str, version: str) -> None:
    packages = write_package(tmp_path / "packages", "S3")
    for info in packages.glob("tensorrt-*.dist-info"):
        shutil.rmtree(info)
    python = machine.write_python(tmp_path / "env", [packages])
    _wheel(python, "tensorrt", name, version)
    assert installed(python).tensorrt == version
    with pytest.raises(KeyboardInterrupt):
        runner.build(
            machine.spec_for(tmp_path, python), Heard("build-sp-plugin"), tools=machine.model_tools()
        )


# --- downloads ---

HUB = """
import os, shutil
from pathlib import Path
PLACE = Path({place!r})

def snapshot_download(repo_id, revision, local_dir, allow_patterns):
    PLACE.joinpath("asked").open("a").write("x")
    local = Path(local_dir)
    if not local.exists():
        local.mkdir(parents=True)
        shutil.copy(PLACE / "files" / "model.safetensors", local)
        os._exit(9)  # as a kill
    assert (local / "model.safetensors").is_file(), "begun anew"
    shutil.copytree(PLACE / "files", local, dirs_exist_ok=True)
"""


def _hub_spec(tmp_path: Path, *, broken: bool = False) -> TrtLlmSpec:
    packages = write_package(tmp_path / "packages", "S3")
    machine.write_checkpoint(tmp_path / "hub" / "files")
    (packages / "huggingface_hub.py").write_text(HUB.format(place=str(tmp_path / "hub")))
    if broken:
        (packages / "tensorrt_llm.py").write_text("raise ImportError('libmpi.so.40: cannot open')")
        shutil.rmtree(packages / "tensorrt_llm")
    python = machine.write_python(tmp_path / "env", [packages])
    return machine.spec_for(tmp_path, python, checkpoint=None, repo="made/up", revision="a" * 40)


def test_a_download_that_was_killed_goes_on(tmp_path: Path) -> None:
    spec = _hub_spec(tmp_path)
    with pytest.raises(BuildError, match="status 9"):
        build(spec)
    with pytest.raises(KeyboardInterrupt):
        runner.build(spec, Heard("convert"), tools=machine.model_tools())
    assert (spec.work_dir / "fetch" / "config.json").is_file()
    assert not (spec.work_dir / "download" / spec.revision).exists()


def test_a_download_may_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, float] = {}

    def timed(python: Path, step: str, request: Any, **options: Any) -> dict[str, Any]:
        limits[step] = options["timeout_s"]
        return run_inside(python, step, request, **options)

    monkeypatch.setattr(job_module, "run_inside", timed)
    with pytest.raises(BuildError):
        build(_hub_spec(tmp_path))
    assert limits["fetch"] >= 65e9 / 1e6  # the largest model at 1 MB/s


def test_an_environment_that_can_not_be_loaded_is_told_of_before_the_download(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"libmpi\.so"):
        build(_hub_spec(tmp_path, broken=True))
    assert not (tmp_path / "hub" / "asked").exists()


# --- the machine ---


def test_a_disk_that_is_too_small_is_told_of_at_once(
    spec: TrtLlmSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000))
    assert build(spec).ran == []  # all is there: nothing is written
    shutil.rmtree(spec.work_dir / "convert")
    with pytest.raises(BuildError, match=r"0\.0 GB are free, convert.* at the least.*--out"):
        build(spec)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("NVIDIA H200", "NVIDIA B200"), "the GPU here is NVIDIA B200"),
        (("NVIDIA GH200 480GB",), "the GPU here is NVIDIA GH200"),
        (("NVIDIA H200", "NVIDIA H200 NVL"), "NVIDIA H200 and NVIDIA H200 NVL.*one kind"),
        (("NVIDIA H200", "NVIDIA H200"), None),
        (("NVIDIA H200 NVL",), None),
    ],
)
def test_every_visible_gpu_is_the_one_that_is_built_for(
    tmp_path: Path, names: tuple[str, ...], said: str | None
) -> None:
    """A bundle opens only where each visible GPU is of its kind; and CUDA may count them in another order."""
    spec = machine.spec_for(tmp_path, Path("python"))
    gpus = tuple(Gpu(name, "9.0", 141 * 10**9, "570.1", f"GPU-{i}") for i, name in enumerate(names))
    host = GpuHost(gpus, machine.VERSION, machine.TENSORRT, Path("python"))
    if said is None:
        assert runner.find_gpu(spec, host) == gpus[0]
        return
    with pytest.raises(BuildError, match=said):
        runner.find_gpu(spec, host)


def test_builds_of_one_place_take_turns_on_a_gpu(spec: TrtLlmSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once would time each other's kernels. Another model has another work_dir."""
    held: list[Path] = []
    lock = Store.lock

    @contextmanager
    def noted(store: Store, timeout_s: float = 1.0) -> Iterator[None]:
        held.append(store.root)
        with lock(store, 1.0):
            yield

    monkeypatch.setattr(Store, "lock", noted)
    build(spec)
    assert held[0] == spec.work_dir.resolve().parent / "gpu-GPU-0a"
    with lock(Store(held[0])), pytest.raises(BuildError, match=r"another build holds .*gpu-GPU-0a"):
        build(replace(spec, work_dir=spec.work_dir.with_name("other")))


@pytest.mark.parametrize("while_", ["convert", "manifest"])
def test_a_checkpoint_that_changes_while_it_is_built_is_not_published(spec: TrtLlmSpec, while_: str) -> None:
    """As where its download was still under way."""
    assert spec.checkpoint is not None
    weights = spec.checkpoint / "model.safetensors"
    shutil.rmtree(spec.work_dir / "convert")
    machine.write_weights(weights, seed=1)

    class Changing(Heard):
        def end(self, detail: str) -> None:
            super().end(detail)
            if self.ran[-1] == while_:
                machine.write_weights(weights, seed=2)

    before = opened(spec).fingerprint
    with pytest.raises(BuildError, match="was changed while it was built"):
        runner.build(spec, Changing(), tools=machine.model_tools())
    assert opened(spec).fingerprint == before
    assert "fetch" in build(spec).ran


def test_engines_are_compared_with_small_pools(spec: TrtLlmSpec) -> None:
    """What activations take is not known then; a pool of all that is left might not fit."""
    shutil.rmtree(spec.work_dir / "choose")
    engines: list[machine.Opened] = []
    build(spec, machine.model_tools(engines))
    pools = [one.config.kv_blocks * machine.BLOCK for one in engines[:2]]
    assert pools == [2 * machine.CONTEXT] * 2
    assert pools[0] < opened(spec).manifest.limits.kv_blocks * machine.BLOCK


def test_a_gpu_that_something_else_uses_is_not_built_on(
    spec: TrtLlmSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = machine.write_smi(tmp_path / "display", used_mib=300)
    monkeypatch.setenv("PATH", str(smi), prepend=":")
    assert build(replace(spec, calibration_s=0.06)).ran[0] == "calibrate"
    smi = machine.write_smi(tmp_path / "engine", used_mib=30_000)
    monkeypatch.setenv("PATH", str(smi), prepend=":")
    assert build(replace(spec, calibration_s=0.06)).ran == []  # it may be the engine that this build made
    with pytest.raises(BuildError, match=r"NVIDIA H200: 31\.5 GB of it are taken by something else"):
        build(spec)
    (smi / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert memory_used(Gpu("x", "9.0", 1, "1", "GPU-0a")) is None


def test_another_build_of_the_same_recipe_is_verified_and_published(spec: TrtLlmSpec) -> None:
    """Kernels are chosen by time: the same arguments need not give the same plan."""
    folder = spec.work_dir / "build-sp-plugin"
    content = b"\t".join((folder / "rank0.engine").read_bytes().rsplit(b" ", 1))  # means the same
    (folder / "rank0.engine").unlink()  # it is linked into the bundle
    (folder / "rank0.engine").write_bytes(content)
    record = json.loads((folder / "step.json").read_text())
    record["outputs"]["rank0.engine"] = hashlib.sha256(content).hexdigest()
    (folder / "step.json").write_text(json.dumps(record))
    assert build(spec).ran == ["choose", "share", "verify", "calibrate", "manifest", "publish"]
    assert (Path(spec.target) / "sp" / "rank0.engine").read_bytes() == content
    opened(spec)


@pytest.mark.parametrize("separate_lp", [False, True])
def test_what_engines_take_is_all_that_may_be_used_and_no_more(tmp_path: Path, separate_lp: bool) -> None:
    """Pools are what is left beside plans, activations and a reserve for each engine."""
    gpu = Gpu("NVIDIA H200", "9.0", 60 * 10**9, "570.1")
    spec = trtllm_spec("Qwen2.5-7B", tmp_path, separate_lp=separate_lp)
    host = GpuHost((gpu,), machine.VERSION, machine.TENSORRT, Path("python"))
    job = job_module.Job(make_plan(spec), Store(tmp_path), host, gpu)
    count = 1 + separate_lp
    plans, activations = [8 * 10**9] * count, [10**9, 2 * 10**9][:count]
    blocks = job.kv_blocks(plans, activations)
    block_bytes = spec.block_tokens * kv_bytes_per_token(spec)
    usable = int(spec.memory_share * gpu.memory_bytes)
    taken = job.memory_bytes(plans, activations, blocks)
    assert usable - count * block_bytes < taken <= usable
    assert taken == sum(plans) + sum(activations) + count * (RESERVE_BYTES + blocks * block_bytes)


def test_the_timings_in_a_bundle_are_those_of_the_last_engine(tmp_path: Path) -> None:
    """Each build starts from the timings before it, so the last one's hold all."""
    gpu = Gpu("NVIDIA H200", "9.0", 141 * 10**9, "570.1")
    host = GpuHost((gpu,), machine.VERSION, machine.TENSORRT, Path("python"))
    (tmp_path / "choose").mkdir()
    (tmp_path / "choose" / job_module.CHOICE).write_text('{"kept": "build-sp-plugin"}')
    for separate_lp, step in ((False, "build-sp-plugin"), (True, "build-lp")):
        spec = trtllm_spec("Qwen2.5-7B", tmp_path, separate_lp=separate_lp)
        job = job_module.Job(make_plan(spec), Store(tmp_path), host, gpu)
        assert assemble.bundle_files(job)["model.cache"] == (step, "model.cache")


def test_another_checkpoint_with_the_same_times_is_another(spec: TrtLlmSpec, tmp_path: Path) -> None:
    """As two copies by a tool that keeps times."""
    assert spec.checkpoint is not None
    other = shutil.copytree(spec.checkpoint, tmp_path / "other")
    weights, place = spec.checkpoint / "model.safetensors", other / "model.safetensors"
    machine.write_weights(place, seed=3)
    times = weights.stat()
    os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))
    heard = Heard("convert")
    with pytest.raises(KeyboardInterrupt):
        runner.build(replace(spec, checkpoint=other), heard, tools=machine.model_tools())
    assert heard.ran == ["fetch"]


# --- folders and stores ---


@pytest.mark.parametrize(
    ("folder", "texts", "said"),
    [
        ("prompts/checkpoint", False, "'mpt'"),
        ("vila/checkpoint", False, "'vila'"),
        ("ScienceQA", True, "'scienceqa'"),
        ("cnn_dailymail", True, "'cnn_dailymail'"),
        ("cnn_dailymail", False, None),
    ],
)
def test_folders_that_quantising_misreads_are_refused(
    tmp_path: Path, python_of: Callable[[str], Path], folder: str, texts: bool, said: str | None
) -> None:
    place = tmp_path / folder
    machine.write_checkpoint(place)
    (tmp_path / "texts.txt").write_text("one\n")
    given: dict[str, Any] = {"quantisation": Quantisation.FP8, "work_dir": place / "work"}
    given["calibration_text"] = tmp_path / "texts.txt" if texts else None
    spec = machine.spec_for(tmp_path, python_of("S3"), checkpoint=place, **given)
    plain = {"quantisation": Quantisation.NONE, "calibration_text": None}
    for one, expected in ((spec, said), (replace(spec, **plain), None)):
        with pytest.raises(KeyboardInterrupt if expected is None else BuildError, match=expected):
            runner.build(one, Heard("fetch"), tools=machine.model_tools())


def test_a_bundle_that_does_not_open_leaves_the_old_one(
    spec: TrtLlmSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opened(spec).fingerprint
    put = assemble.put_together

    def damaged(job: job_module.Job, out: Path) -> Path:
        put(job, out)
        (out / "tokenizer.json").unlink()
        return out

    monkeypatch.setattr(assemble, "put_together", damaged)
    with pytest.raises(BundleMismatch, match=r"tokenizer\.json"):
        build(replace(spec, calibration_s=0.06))
    assert opened(spec).fingerprint == before


def test_a_kill_before_the_triton_models_is_made_good(spec: TrtLlmSpec) -> None:
    pytest.importorskip("tritonclient")
    shutil.rmtree(Path(spec.out) / runner.TRITON)
    assert build(spec).ran == []
    assert (Path(spec.out) / runner.TRITON / spec.bundle_name / "config.pbtxt").is_file()


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed")
def test_a_store_without_a_client_is_told_of_at_once(
    tmp_path: Path, python_of: Callable[[str], Path]
) -> None:
    pytest.importorskip("fsspec")
    spec = machine.spec_for(tmp_path, python_of("S3"), out="s3://bucket/x")
    with pytest.raises(BuildError, match="pip install s3fs"):
        build(spec)
    assert not spec.work_dir.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"publish": "/mnt/store"}, "publish '/mnt/store' must be a URL.*--out"),
        ({"publish": "s3:/bucket"}, "must be a URL"),
        ({"publish": ""}, "must be a URL"),
        ({"requests_max": 0}, "requests_max must be at least 1, got 0"),
    ],
)
def test_options_that_can_not_be_meant_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BuildError, match=said):
        trtllm_spec("Qwen2.5-7B", Path("bundles"), **options)


def test_a_disk_that_is_too_small_is_told_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    bundle = engine_bundle(tmp_path / "bundle")
    url = publish.publish(bundle, f"file://{tmp_path}/store")
    size = sum(file.size_bytes for file in read_gpu_manifest(bundle).files)
    free = [size - 1]
    monkeypatch.setattr(publish.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    with pytest.raises(BuildError, match="are to be fetched"):
        publish.fetch(url, tmp_path / "here", host=HOST)
    assert list((tmp_path / "here").iterdir()) == []
    free[0] = size
    publish.fetch(url, tmp_path / "here", host=HOST)
    free[0] = 0  # all is there
    publish.fetch(url, tmp_path / "here", host=HOST)
