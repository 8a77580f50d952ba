"""Run a TensorRT-LLM build: carry out the steps of the plan that are not done yet, in order, and publish.

What can be refused is refused first, from cheap to dear: the GPU and the versions (no CUDA is loaded for
that), whether model and KV fit, the sizes of a local checkpoint; then its files are hashed, once, or the
commit on the hub is asked for, and the plan gets its keys. After that a step is done or not by what it left
on disk: a build that was interrupted anywhere goes on there, and a changed input repeats exactly what it
touches.

Everything lies below the spec's work_dir: a folder a step, `logs/` with what each process said, `timing/`
with kernel timings that later builds start from, `scratch/`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from build_scripts.progress import Progress, Silent
from build_scripts.spec import BuildError
from build_scripts.store import Store, swap_in
from build_scripts.trtllm import assemble, checkpoint, inside, steps, torch_steps
from build_scripts.trtllm.checkpoint import CheckpointError
from build_scripts.trtllm.job import VERIFIED, Job, Tools, write_json
from build_scripts.trtllm.launch import run_inside
from build_scripts.trtllm.plan import TrtLlmPlan, make_plan
from build_scripts.trtllm.plan_steps import Target, TrtLlmStep
from build_scripts.trtllm.publish import check_store, publish
from build_scripts.trtllm.spec import Quantisation, TrtLlmSpec
from engines.base import EngineError, PassError
from engines.bundle_base import MANIFEST, BundleMismatch
from engines.executor.types import BackendUnavailable, LinkLost
from engines.gpu_bundle import open_gpu_bundle
from engines.gpu_host import Gpu, GpuHost, memory_used
from engines.trtllm_child.config import Driver
from engines.trtllm_child.guard import PINNED, check_version

TRITON = "triton"  # in the spec's `out`: a model repository for a Triton server on this machine
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION_TIMEOUT_S = 120.0
_WORDS_OF_MODELS = ("mpt", "vila", "llava-onevision-qwen2")
_WORDS_OF_TEXTS = ("scienceqa", "science_qa", "cnn_dailymail")
_BUSY_BYTES = 1_000_000_000  # a display or a driver takes less
_REFUSALS = (CheckpointError, BackendUnavailable, LinkLost, EngineError, PassError)

Action = Callable[[Path], str]  # writes a step's outputs into the folder; returns what to show


@dataclass(frozen=True, slots=True)
class _Source:
    """Which checkpoint. key: stands for its contents. commit: on the hub. hashes: of local files."""

    key: str
    commit: str | None
    hashes: dict[str, str]


def build(
    spec: TrtLlmSpec, progress: Progress | None = None, *, force: bool = False, tools: Tools | None = None
) -> Path:
    """Build the bundle of `spec`, publish it, and return where it lies here. Raises BuildError.

    Steps that are done are left alone; with `force` all are repeated but the download. Where the spec's `out`
    is a URL, the returned folder is the copy in work_dir.
    """
    progress, tools = progress or Silent(), tools or Tools()
    try:
        host = tools.host(spec.python)
        gpu = find_gpu(spec, host)
        spec = replace(spec, gpu_memory_bytes=min(spec.gpu_memory_bytes, gpu.memory_bytes))
        target = find_target(spec, host, gpu)
        _check_places(spec)
        make_plan(spec, target)  # refuses what does not fit before anything is read or downloaded
        if spec.checkpoint is not None:
            steps.check_source(spec, spec.checkpoint)
        store = Store(spec.work_dir.resolve(), quick=True)
        with Store(store.root.parent / f"gpu-{gpu.uuid}").lock(), store.lock():
            source = _source(spec, store, force)
            plan = _plan(spec, target, source)
            job = Job(plan, store, host, gpu, source.commit, source.hashes, tools, progress.update)
            return _carry_out(job, progress, force)
    except _REFUSALS as error:
        raise BuildError(str(error)) from error


def _check_places(spec: TrtLlmSpec) -> None:
    """Raises BuildError for a store that nothing here can write to, and for folders that quantising misreads:
    TensorRT-LLM's `quantize_by_modelopt` looks for names of models and data sets anywhere in a path."""
    if "://" in spec.out:
        check_store(spec.out)
    if spec.quantisation is not Quantisation.FP8:
        return
    work = spec.work_dir.resolve()
    source = work / "fetch" if spec.checkpoint is None else spec.checkpoint.resolve()
    found = [(word, source) for word in _WORDS_OF_MODELS if word in str(source)]
    if spec.calibration_text is not None:
        found += [(word, work) for word in _WORDS_OF_TEXTS if word in str(work).lower()]
    for word, place in found:
        raise BuildError(
            f"{place}: TensorRT-LLM takes a path with {word!r} in it for another model or data set when it "
            "quantises; use a folder of another name"
        )


def find_gpu(spec: TrtLlmSpec, host: GpuHost) -> Gpu:
    """The GPU to build on. Raises BuildError, with the way out, where it is not there."""
    if not host.gpus:
        raise BuildError(
            f"no GPU to build on: {host.no_gpus}; run this on a machine with the GPU {spec.gpu}, or see what "
            "it would do with --dry-run"
        )
    for gpu in host.gpus:
        # As a word: a GH200 is no H200.
        if not re.search(rf"\b{re.escape(spec.gpu)}\b", gpu.name, re.IGNORECASE):
            raise BuildError(
                f"the GPU here is {gpu.name}, the build is for {spec.gpu}: kernels are timed on the device, "
                f"so build on the GPU {spec.gpu}, or give --gpu for this one; CUDA_VISIBLE_DEVICES leaves "
                "others out"
            )
    if len(names := sorted({gpu.name for gpu in host.gpus})) > 1:
        raise BuildError(
            f"the GPUs here are {' and '.join(names)}: a bundle is for one kind; leave only those in "
            "CUDA_VISIBLE_DEVICES that it is for"
        )
    return host.gpus[0]


def _check_idle(gpu: Gpu) -> None:
    """Raises BuildError where something else is on the GPU: kernels are timed, and pools are large."""
    used = memory_used(gpu)
    if used is not None and used > _BUSY_BYTES:
        raise BuildError(
            f"{gpu.name}: {used / 1e9:.1f} GB of it are taken by something else (see nvidia-smi); end that, "
            "or leave the GPU out of CUDA_VISIBLE_DEVICES"
        )


def find_target(spec: TrtLlmSpec, host: GpuHost, gpu: Gpu) -> Target:
    """What engines built here are bound to. Raises BuildError or BackendUnavailable."""
    for name in ("tensorrt_llm",) if spec.torch else ("tensorrt_llm", "tensorrt"):
        if name == "tensorrt" and host.tensorrt_llm is not None:
            check_version(host.tensorrt_llm)  # later lines have no TensorRT
        if getattr(host, name) is None:
            raise BuildError(
                f"{spec.python} has no {name}: {host.no_versions or 'it is not installed there'}; install "
                f"tensorrt-llm=={PINNED} into an environment of its own, and give that with --python"
            )
    assert host.tensorrt_llm is not None
    if spec.torch:
        check_version(host.tensorrt_llm, Driver.TORCH)
        return Target(host.tensorrt_llm, "", gpu.name, gpu.compute_capability, measured=True)
    assert host.tensorrt is not None
    return Target(host.tensorrt_llm, host.tensorrt, gpu.name, gpu.compute_capability, measured=True)


def _source(spec: TrtLlmSpec, store: Store, force: bool) -> _Source:
    if spec.checkpoint is not None:
        hashes = _checkpoint_hashes(spec.checkpoint.resolve(), store)
        text = json.dumps(hashes, sort_keys=True)
        return _Source(hashlib.sha256(text.encode()).hexdigest(), None, hashes)
    commit = _commit(spec, store, force)
    return _Source(commit, commit, {})


def _checkpoint_hashes(directory: Path, store: Store) -> dict[str, str]:
    """Hashes of a local checkpoint, taken once: while sizes and times are the same, so are the files."""
    memo = store.root / "checkpoint.json"
    now = checkpoint.stamps(directory)
    try:
        known = json.loads(memo.read_text(encoding="utf-8"))
        if known["directory"] == str(directory) and known["stamps"] == now:
            hashes: dict[str, str] = known["hashes"]
            return hashes
    except (OSError, ValueError, KeyError, TypeError):
        pass
    hashes = checkpoint.hashes(directory)
    write_json(memo, {"directory": str(directory), "stamps": now, "hashes": hashes})
    return hashes


def _commit(spec: TrtLlmSpec, store: Store, force: bool) -> str:
    """The commit that the revision was when this build began; it does not move while the build goes on."""
    if _COMMIT.fullmatch(spec.revision):
        return spec.revision
    memo, asked = store.root / "revision.json", {"repo": spec.repo, "revision": spec.revision}
    try:
        known = json.loads(memo.read_text(encoding="utf-8"))
        if not force and {name: known[name] for name in asked} == asked:
            return str(known["commit"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    answer = run_inside(
        spec.python,
        "revision",
        asked,
        scratch=store.root / "scratch",
        log=store.root / "logs" / "revision.log",
        timeout_s=_REVISION_TIMEOUT_S,
    )
    write_json(memo, {**asked, "commit": answer["commit"]})
    return str(answer["commit"])


def _plan(spec: TrtLlmSpec, target: Target, source: _Source) -> TrtLlmPlan:
    texts = spec.calibration_text
    if texts is not None and not texts.is_file():
        raise BuildError(f"calibration_text {texts}: no such file")
    return make_plan(
        spec,
        target,
        checkpoint_key=source.key,
        calibration_key=None if texts is None else hashlib.sha256(texts.read_bytes()).hexdigest(),
        code_key=hashlib.sha256(Path(inside.__file__).read_bytes()).hexdigest(),
    )


def _carry_out(job: Job, progress: Progress, force: bool) -> Path:
    actions, store = _actions(job), job.store
    missing = tuple(s for s in job.plan.steps[:-1] if force or not store.done(s.name, s.key, s.after))
    _check_space(store, missing)
    if any(step.name not in ("fetch", "manifest") for step in missing):
        _check_idle(job.gpu)
    for step in job.plan.steps[:-1]:
        again = (force and step.name != "fetch") or (step.name == "verify" and _other_driver(job))
        if store.done(step.name, step.key, step.after) and not again:
            progress.skip(step.name)
            continue
        progress.begin(step.name, step.does)
        progress.end(actions[step.name](store.begin(step.name)))
        store.commit(step.name, step.key, step.after)
    _check_unchanged(job)
    return _publish(job, progress)


def _check_unchanged(job: Job) -> None:
    """Raises BuildError where a local checkpoint is not what it was when the build began: some steps read the
    old files, some the new. The next build has another key and begins anew."""
    folder = job.spec.checkpoint
    if folder is not None and _checkpoint_hashes(folder.resolve(), job.store) != job.checkpoint_hashes:
        raise BuildError(f"{folder} was changed while it was built; let it be, and run the build again")


def _check_space(store: Store, missing: Sequence[TrtLlmStep]) -> None:
    """Raises BuildError where what is not done yet needs more than the disk has, at the least."""
    needed, free = sum(step.size_bytes for step in missing), shutil.disk_usage(store.root).free
    if needed > free:
        raise BuildError(
            f"{store.root}: {free / 1e9:.1f} GB are free, {', '.join(step.name for step in missing)} write "
            f"{needed / 1e9:.1f} GB at the least; free some, or give --out on another disk"
        )


def _other_driver(job: Job) -> bool:
    """Whether the engines were verified under another branch of the driver: then they are verified again."""
    try:
        verified = str(job.read("verify", VERIFIED)["driver"])
    except (OSError, ValueError, KeyError):
        return False
    return verified.partition(".")[0] != job.gpu.driver.partition(".")[0]


def _publish(job: Job, progress: Progress) -> Path:
    """Put the bundle into its local folder, and into the store where one is named."""
    store, spec = job.store, job.spec
    remote = "://" in spec.out
    target = store.root / "bundle" if remote else Path(spec.target)
    wanted = json.loads((store.folder("manifest") / MANIFEST).read_text(encoding="utf-8"))["bundle_id"]
    here = _published(target, job.host) == wanted
    if here and not remote:
        # A kill may have come between the bundle and these.
        assemble.triton_models(job, target, Path(spec.out) / TRITON, wanted)
        progress.skip("publish")
        return target
    progress.begin("publish", job.plan.step("publish").does)
    if not here:
        fresh, old = store.root / "publish.new", store.root / "publish.old"
        shutil.rmtree(old, ignore_errors=True)
        open_gpu_bundle(assemble.put_together(job, fresh), host=job.host)  # before the old one goes
        swap_in(fresh, target, old)
    where = f"{target} ({wanted[:12]})"
    if not remote and assemble.triton_models(job, target, Path(spec.out) / TRITON, wanted):
        where += f", Triton models in {Path(spec.out) / TRITON}"
    if remote:  # what is there already is not sent again
        where = publish(
            target,
            spec.out,
            name=spec.bundle_name,
            told=lambda file, done, size: job.update(done / size, file),
        )
    progress.end(where)
    return target


def _published(target: Path, host: GpuHost) -> str | None:
    """Id of the bundle that is there, where it opens on this machine."""
    try:
        return open_gpu_bundle(target, host=host).fingerprint
    except BundleMismatch:
        return None


def _actions(job: Job) -> dict[str, Action]:
    def engine(step: str) -> Action:
        return lambda out: steps.build_engine(job, step, out)

    return {
        "fetch": lambda out: steps.fetch(job, out),
        "convert": lambda out: steps.convert(job, out),
        "build-sp-plugin": engine("build-sp-plugin"),
        "build-sp-tensorrt": engine("build-sp-tensorrt"),
        "choose": lambda out: steps.choose(job, out),
        "build-lp": engine("build-lp"),
        "share": lambda out: steps.share(job, out),
        "verify": lambda out: (torch_steps if job.spec.torch else steps).verify(job, out),
        "calibrate": lambda out: steps.calibrate(job, out),
        "manifest": lambda out: assemble.manifest(job, out),
    }
