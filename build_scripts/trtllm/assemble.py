"""The last steps: a manifest of what the others left, and a folder that has it all in place."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

from build_scripts.store import link_or_copy
from build_scripts.trtllm.job import ENVIRONMENT, FACTS, SOURCE, VERIFIED, Job
from build_scripts.trtllm.plan_steps import MEASURED
from build_scripts.trtllm.spec import Quantisation
from build_scripts.trtllm.text import read_text
from build_scripts.trtllm.torch_plan import CHECKPOINT
from build_scripts.trtllm.torch_steps import checkpoint_files
from engines.bundle_base import CALIBRATION, MANIFEST, TOKENIZER, Cost, File
from engines.gpu_bundle import gpu_identity, store_digest
from engines.gpu_engine_config import build_config_digest
from engines.gpu_manifest import (
    DIGEST_BYTES,
    TIMING_CACHE,
    Candidate,
    EngineBuild,
    Engines,
    Environment,
    GpuBackend,
    GpuLimits,
    GpuManifest,
    GpuModel,
    GpuSource,
    TorchBuild,
)
from engines.profiles import Profiles
from engines.trtllm_profiles import stock_profiles
from engines.types import Layout, Padding

_ENGINE_FILES = ("config.json", "rank0.engine")
_TRITON_QUEUE_REQUESTS = 256  # as TritonLimits has it; a pass must fit


def manifest(job: Job, out: Path) -> str:
    """Writes manifest.json and tokenizer.json."""
    shutil.copyfile(job.checkpoint / TOKENIZER, out / TOKENIZER)
    made = _manifest(job, out)
    (out / MANIFEST).write_text(made.to_text(), encoding="utf-8")
    return f"bundle {made.bundle_id[:12]}"


def bundle_files(job: Job) -> dict[str, tuple[str, str]]:
    """Name in the bundle -> (step, name in its folder) of every file but the manifest."""
    files = {}
    if job.spec.torch:
        files = {f"{CHECKPOINT}/{name}": ("fetch", name) for name in checkpoint_files(job)}
    for engine in () if job.spec.torch else job.spec.engine_names:
        step = job.choice["kept"] if engine.value == "sp" else "build-lp"
        files.update({f"{engine.value}/{name}": (step, name) for name in _ENGINE_FILES})
        files[TIMING_CACHE] = (step, TIMING_CACHE)  # the last one's holds all before it
    files[CALIBRATION] = ("calibrate", CALIBRATION)
    files[TOKENIZER] = ("manifest", TOKENIZER)
    return files


def put_together(job: Job, out: Path) -> Path:
    """The whole bundle in `out`, by links to the steps' outputs where the file system has them.

    Plans of gigabytes are known by the digests that their steps were recorded with, and not hashed again.
    """
    shutil.rmtree(out, ignore_errors=True)
    for name, (step, source) in {**bundle_files(job), MANIFEST: ("manifest", MANIFEST)}.items():
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(_path(job, step, source), target)
        if target.stat().st_size > DIGEST_BYTES:
            store_digest(target, _digest(job, step, source))
    return out


def triton_models(job: Job, target: Path, repository: Path, bundle_id: str) -> tuple[Path, ...]:
    """A Triton model for each engine of the bundle `target`; none where tritonclient is not installed, or for
    the PyTorch backend."""
    if job.spec.torch or importlib.util.find_spec("tritonclient") is None:
        return ()
    from build_scripts.trtllm.triton_repository import TritonLimits, write_repository

    spec = job.spec
    limits = TritonLimits(
        requests_max=spec.requests_max,
        kv_blocks=job.read("verify", VERIFIED)["kv_blocks"],
        block_tokens=spec.block_tokens,
        queue_requests_max=max(_TRITON_QUEUE_REQUESTS, spec.requests_max),
    )
    return tuple(
        write_repository(
            repository,
            model_name=spec.bundle_name if engine.value == "sp" else f"{spec.bundle_name}-{engine}",
            engine_dir=str((target / engine.value).resolve()),
            limits=limits,
            fingerprint=bundle_id,
        )
        for engine in spec.engine_names
    )


def _manifest(job: Job, out: Path) -> GpuManifest:
    spec, target = job.spec, job.plan.target
    verified, measured = job.read("verify", VERIFIED), job.read("calibrate", MEASURED)
    fp8 = spec.quantisation is Quantisation.FP8
    engines = {} if spec.torch else {e.value: _engine(job, e.value, verified) for e in spec.engine_names}
    return GpuManifest(
        model=GpuModel(
            name=spec.model,
            architecture=spec.architecture,
            shape=spec.shape,
            source=GpuSource.model_validate(job.read("fetch", SOURCE)),
        ),
        backend=GpuBackend(
            name=spec.backend.value,
            tensorrt_llm=target.tensorrt_llm,
            tensorrt=target.tensorrt or None,
            dtype=spec.dtype,
            quantisation=spec.quantisation.value,
            kv_dtype="fp8" if fp8 else spec.dtype,
            tp=spec.tp,
            pp=spec.pp,
        ),
        gpu=gpu_identity(job.gpu),
        engines=None if spec.torch else Engines(sp=engines["sp"], lp=engines.get("lp")),
        checkpoint=TorchBuild(directory=CHECKPOINT, capture_tokens=job.plan.classes) if spec.torch else None,
        profiles=_profiles(job),
        limits=GpuLimits(
            context_tokens_max=spec.context_tokens_max,
            requests_max=spec.requests_max,
            block_tokens=spec.block_tokens,
            kv_blocks=verified["kv_blocks"],
            memory_bytes=verified["memory_bytes"],
        ),
        text=read_text(job.checkpoint),
        cost=Cost.model_validate(measured["cost"]),
        candidates=() if spec.torch else _candidates(job, measured.get("lp_pass_s")),
        environment=Environment.model_validate(job.read("verify" if spec.torch else "convert", ENVIRONMENT)),
        files=tuple(
            _file(job, out, name, step, source) for name, (step, source) in bundle_files(job).items()
        ),
        steps=job.plan.keys,
    ).sealed()


def _profiles(job: Job) -> Profiles:
    """As the adapter has them before it keeps room for decode."""
    classes = job.plan.classes
    if job.spec.torch:
        return Profiles(Layout.PACKED, Padding.CLASS, classes)
    return stock_profiles(classes[-1])


def _engine(job: Job, name: str, verified: dict[str, object]) -> EngineBuild:
    folder = job.engine_folder(name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = verified["engines"][name]  # type: ignore[index]
    return EngineBuild(
        directory=name,
        build_config_sha256=build_config_digest(config["build_config"]),
        gemm_plugin=job.choice["gemm_plugin"],
        plan_bytes=found["plan_bytes"],
        profiles=tuple(tuple(one) for one in found["profiles"]),
        requests_max=job.spec.requests_max,
    )


def _candidates(job: Job, lp_pass_s: list[list[float]] | None) -> tuple[Candidate, ...]:
    """Every engine that was built, timed or not, and which of them the bundle has."""
    found = [
        Candidate(
            engine="sp",
            gemm_plugin=one["gemm_plugin"],
            plan_bytes=one["plan_bytes"],
            pass_s=tuple((int(tokens), seconds) for tokens, seconds in one["pass_s"]),
            kept=one["name"] == job.choice["kept"],
        )
        for one in job.choice["candidates"]
    ]
    if lp_pass_s is not None:
        found.append(
            Candidate(
                engine="lp",
                gemm_plugin=job.choice["gemm_plugin"],
                plan_bytes=job.read("build-lp", FACTS)["plan_bytes"],
                pass_s=tuple((int(tokens), seconds) for tokens, seconds in lp_pass_s),
                kept=True,
            )
        )
    return tuple(found)


def _file(job: Job, out: Path, name: str, step: str, source: str) -> File:
    """With the digest that the step was recorded with: plans of gigabytes are not hashed again."""
    if step == "manifest":  # its record is not written yet
        from engines.bundle_base import sha256_file

        path = out / source
        return File(name=name, size_bytes=path.stat().st_size, sha256=sha256_file(path))
    size_bytes = _path(job, step, source).stat().st_size
    return File(name=name, size_bytes=size_bytes, sha256=_digest(job, step, source))


def _path(job: Job, step: str, name: str) -> Path:
    """A local checkpoint stays where it is; a link there is followed, as it may lead into a cache."""
    return (job.checkpoint / name).resolve() if step == "fetch" else job.store.folder(step) / name


def _digest(job: Job, step: str, name: str) -> str:
    return checkpoint_files(job)[name] if step == "fetch" else job.store.digests(step)[name]
