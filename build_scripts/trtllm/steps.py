"""What each step of a build does: writes its outputs into the folder it is given, returns what to show.

Outputs of earlier steps are read from their folders in the job's store. `manifest` and `publish` are in
`assemble`.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from build_scripts.calibrate import fit_calibration, write_csv
from build_scripts.spec import BuildError
from build_scripts.trtllm import measure, torch_steps
from build_scripts.trtllm.checkpoint import check_checkpoint, hashes, licence_of
from build_scripts.trtllm.estimates import activation_bytes, weight_bytes
from build_scripts.trtllm.job import CHOICE, ENVIRONMENT, FACTS, SOURCE, VERIFIED, Job, write_json
from build_scripts.trtllm.plan_steps import MEASURED, EnginePlan, sp_builds
from build_scripts.trtllm.recipe import fill
from build_scripts.trtllm.spec import EngineName, TrtLlmSpec
from build_scripts.trtllm.text import read_text
from engines.bundle_base import CALIBRATION, Cost
from engines.gpu_host import release
from engines.gpu_manifest import TIMING_CACHE

# Fields of a saved engine that must be as asked: the scheduler, the profiles or block reuse rest on them.
_MUST_HOLD = (
    *("max_seq_len", "max_batch_size", "opt_batch_size", "max_num_tokens", "max_beam_width"),
    *("kv_cache_type", "gather_context_logits", "plugin_config.remove_input_padding"),
    *("plugin_config.tokens_per_block", "plugin_config.use_paged_context_fmha"),
    *("plugin_config.multiple_profiles", "plugin_config.gemm_plugin"),
)
_SECONDS_A_CLASS = 3  # the time to compare two engines at a class is the calibration's, divided by this


def check_source(spec: TrtLlmSpec, folder: Path) -> None:
    """All that is asked of a checkpoint, before hours are spent on it. Raises CheckpointError."""
    check_checkpoint(folder, spec.architecture, spec.shape, spec.context_tokens_max, engines=not spec.torch)
    if spec.torch:
        torch_steps.check_files(folder)
    read_text(folder)


def fetch(job: Job, out: Path) -> str:
    spec = job.spec
    _versions(job, "fetch")  # an environment that can't be loaded is told of before the download
    if spec.checkpoint is None:
        folder, digests = out, _download(job, out)
    else:
        folder, digests = job.checkpoint, dict(job.checkpoint_hashes)
    files: list[dict[str, Any]] = [
        {"name": name, "size_bytes": (folder / name).stat().st_size, "sha256": digest}
        for name, digest in sorted(digests.items())
    ]
    source = {
        "repo": spec.repo or folder.name,
        "revision": job.commit or "a local checkpoint; its files are named by their hashes",
        "licence": licence_of(folder),
        "files": files,
    }
    write_json(out / SOURCE, source)
    size = sum(file["size_bytes"] for file in files)
    return f"{size / 1e9:.1f} GB in {len(files)} files, the shape of {spec.shape.name}"


def _download(job: Job, out: Path) -> dict[str, str]:
    """The checkpoint of the hub into the empty folder `out`; its hashes. Until it is whole it lies beside the
    steps, by commit, so that a download that was interrupted goes on."""
    assert job.commit is not None
    place = job.store.root / "download" / job.commit
    for other in place.parent.glob("*"):
        if other != place:
            shutil.rmtree(other)
    job.inside("fetch", "fetch", {"repo": job.spec.repo, "revision": job.commit, "out": str(place)})
    check_source(job.spec, place)
    digests = hashes(place)
    place.replace(out)
    return digests


def _versions(job: Job, step: str) -> dict[str, Any]:
    """What the environment really imports; it must be what its package metadata says. Raises BuildError."""
    versions = job.inside(step, "versions", {})
    for name in ("tensorrt_llm", "tensorrt"):
        wanted, found = getattr(job.plan.target, name), versions[name]
        if wanted and found != wanted and not (name == "tensorrt" and found == release(wanted)):
            raise BuildError(
                f"{job.spec.python} imports {name} {found}, its package metadata says {wanted}: "
                "repair that environment"
            )
    return versions


def convert(job: Job, out: Path) -> str:
    spec = job.spec
    versions = _versions(job, "convert")
    texts = None
    if spec.calibration_text is not None:
        texts = job.store.root / "scratch" / "calibration_set"
        shutil.rmtree(texts, ignore_errors=True)
        texts.mkdir(parents=True)
        shutil.copyfile(spec.calibration_text, texts / "train.txt")
    paths = {
        "checkpoint": str(job.checkpoint),
        "converted": str(out),
        "calibration_set": None if texts is None else str(texts),
    }
    request = {
        "checkpoint": str(job.checkpoint),
        "converted": str(out),
        "architecture": spec.architecture,
        "shape": asdict(spec.shape),
        "context_tokens_max": spec.context_tokens_max,
        "arguments": fill(job.plan.convert, paths),
    }
    job.inside("convert", "convert", request)
    write_json(out / ENVIRONMENT, {name: versions[name] for name in ("python", "torch", "cuda")})
    return f"{sum(path.stat().st_size for path in out.rglob('*') if path.is_file()) / 1e9:.1f} GB"


def build_engine(job: Job, step: str, out: Path) -> str:
    """build-sp-plugin, build-sp-tensorrt or build-lp."""
    if step == "build-lp":
        chosen = "plugin" if job.choice["gemm_plugin"] else "tensorrt"
        recipe = job.plan.engines[1].arguments[f"build-lp ({chosen})"]
    else:
        recipe = job.plan.engines[0].arguments[step]
    paths = {
        "converted": str(job.store.folder("convert").resolve()),
        "engine": str(out),
        "timing_cache_in": str(job.timing_cache) if job.timing_cache.is_file() else None,
        "timing_cache_out": str(out / TIMING_CACHE),
    }
    answer = job.inside(step, "build", {"arguments": fill(recipe, paths)})
    changed: dict[str, Any] = answer["changed"]
    for name in _MUST_HOLD:
        if name in changed:
            asked, written = changed[name]
            raise BuildError(
                f"{step}: {name} came out as {written!r}, asked for {asked!r}: TensorRT-LLM changed it; ask "
                "for a value that it keeps, or use the pinned version"
            )
    _keep_timings(job, out / TIMING_CACHE)
    write_json(out / FACTS, {"changed": changed, "plan_bytes": answer["plan_bytes"]})
    noted = f"; not as asked: {', '.join(sorted(changed))}" if changed else ""
    return f"plan of {answer['plan_bytes'] / 1e9:.2f} GB{noted}"


def _keep_timings(job: Job, written: Path) -> None:
    if not written.is_file():
        raise BuildError(f"the build left no timing cache at {written}; was it turned off in the recipe?")
    kept = job.timing_cache
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_name(kept.name + ".part")
    shutil.copyfile(written, part)
    part.replace(kept)


def choose(job: Job, out: Path) -> str:
    builds = sp_builds(job.spec)
    edges = measure.edges_within(job.plan.classes, job.spec.context_tokens_max)
    budget_s = job.spec.calibration_s / _SECONDS_A_CLASS * len(edges)
    timed = []
    for index, (step, plugin) in enumerate(builds.items()):
        size = job.read(step, FACTS)["plan_bytes"]
        pass_s: dict[int, float] = {}
        if len(builds) > 1:
            job.update(index / len(builds), f"timing {step}")
            # Room for two of the longest: timing needs no more, and activations are only estimated yet.
            most = 2 * -(-job.spec.context_tokens_max // job.spec.block_tokens)
            blocks = min(most, job.kv_blocks([size], [activation_bytes(job.spec)]))
            with job.open("choose", job.store.folder(step), blocks) as engine:
                pass_s = measure.time_classes(engine, edges, budget_s)
        timed.append(measure.Timed(step, plugin, size, pass_s))
    choice = measure.choose(timed) if len(timed) > 1 else measure.Choice(timed[0].name, None, {})
    record = {
        "kept": choice.kept,
        "gemm_plugin": builds[choice.kept],
        "ratio": choice.ratio,
        "weights": {str(tokens): weight for tokens, weight in choice.weights.items()},
        "candidates": [
            {**asdict(t), "pass_s": sorted([tokens, s] for tokens, s in t.pass_s.items())} for t in timed
        ],
        # So that another build of the same recipe is another choice.
        "outputs": job.store.digests(choice.kept),
    }
    write_json(out / CHOICE, record)
    if choice.ratio is None:
        return f"{choice.kept}, the only one"
    return f"{choice.kept}: {choice.ratio - 1.0:.1%} faster over {len(edges)} classes of equal weight"


def share(job: Job, out: Path) -> str:
    write_json(out / "share.json", {"engine": "sp", "profile": len(job.plan.engines[0].ranges) - 1})
    return "no second engine"


def verify(job: Job, out: Path) -> str:
    plans: list[int] = []
    activations: list[int] = []
    read: dict[str, dict[str, Any]] = {}
    for engine in job.plan.engines:
        found = _read_back(job, engine)
        plans.append(found["plan_bytes"])
        activations.append(found["activation_bytes"])
        read[engine.name.value] = found
    blocks = job.kv_blocks(plans, activations)
    for engine in job.plan.engines:
        name = engine.name.value
        job.update(0.5, f"one request a class on {name}")
        edges = [high for _, _, high in engine.ranges]
        with job.open("verify", job.engine_folder(name), blocks) as opened:
            read[name] |= measure.verify(opened, edges, job.spec.requests_opt, job.spec.shape.vocab)
    read["sp"]["plan_ratio"], read["sp"]["plan_ratio_to"] = _growth(job, read)
    record = {
        "engines": read,
        "driver": job.gpu.driver,
        "kv_blocks": blocks,
        "memory_bytes": job.memory_bytes(plans, activations, blocks),
    }
    write_json(out / VERIFIED, record)
    told = sum(p["ran"] is not None for found in read.values() for p in found["passes"])
    passes = sum(len(found["passes"]) for found in read.values())
    return (
        f"{sum(len(e.ranges) for e in job.plan.engines)} profiles as planned, {passes} passes, {told} of "
        f"them one iteration by its statistics; plan {read['sp']['plan_ratio']:.2f} x "
        f"{read['sp']['plan_ratio_to']}; {blocks} KV blocks"
    )


def _read_back(job: Job, engine: EnginePlan) -> dict[str, Any]:
    """What TensorRT reads from an engine. Raises BuildError where it is not what was planned."""
    name = engine.name.value
    found = job.inside(f"verify-{name}", "profiles", {"engine_dir": str(job.engine_folder(name).resolve())})
    planned = [list(one) for one in engine.ranges]
    if found["profiles"] != planned:
        raise BuildError(
            f"verify: {name} has the profiles {found['profiles']}, planned are {planned}: the executor would "
            "run passes in profiles tuned for others"
        )
    if set(found["requests"]) != {job.spec.requests_max}:
        raise BuildError(
            f"verify: {name} takes {found['requests']} requests by profile, planned are "
            f"{job.spec.requests_max}"
        )
    return {key: found[key] for key in ("profiles", "activation_bytes", "plan_bytes")}


def _growth(job: Job, read: dict[str, dict[str, Any]]) -> tuple[float, str]:
    """How much larger the plan with several profiles is: than one with a single profile, else than weights.

    TensorRT may keep weights in a layout of its own for each profile.
    """
    size = read["sp"]["plan_bytes"]
    if EngineName.LP.value in read:
        return size / read["lp"]["plan_bytes"], "the plan with one profile"
    return size / weight_bytes(job.spec), "the weights"


def calibrate(job: Job, out: Path) -> str:
    spec, blocks = job.spec, job.read("verify", VERIFIED)["kv_blocks"]
    make_shapes = measure.padded_shapes if spec.torch else measure.calibration_shapes
    shapes = make_shapes(job.plan.classes, spec.context_tokens_max)
    job.update(0.0, f"measuring {len(shapes)} shapes for about {spec.calibration_s:.0f} s")
    with job.open("calibrate", job.engine_folder("sp"), blocks) as engine:
        calibration = measure.calibrate(
            engine, shapes, spec.calibration_s, lambda share: job.update(share, "measuring")
        )
    gpu, target = job.gpu, job.plan.target
    origin = (
        f"measured {datetime.now(UTC):%Y-%m-%d} on {gpu.name}, {spec.dtype}, quantisation "
        f"{spec.quantisation}, tensorrt_llm {target.tensorrt_llm}"
        + (", PyTorch backend, passes padded to captured sizes" if spec.torch else "")
    )
    result = fit_calibration(calibration, origin)
    cost = Cost(
        model=result.model,
        median_error=result.median_error,
        worst_error=result.worst_error,
        sample_count=len(result.errors),
        boundary_tokens=result.model.boundary_tokens(0),
        knee_tokens=result.model.knee_tokens(),
        quick=False,
    )
    measured: dict[str, Any] = {"cost": cost.model_dump(mode="json")}
    if EngineName.LP in spec.engine_names:
        measured["lp_pass_s"] = _time_lp(job, blocks)
    write_json(out / MEASURED, measured)
    write_csv(out / CALIBRATION, spec.model, calibration, result)
    return (
        f"{len(shapes)} shapes; fit within {cost.median_error:.1%} (median), {cost.worst_error:.0%} (worst); "
        f"L_m {cost.boundary_tokens}, knee {cost.knee_tokens} tokens"
    )


def _time_lp(job: Job, blocks: int) -> list[list[float]]:
    """(tokens, seconds) of passes on the LP engine, at the classes' edges: shown beside the SP engine's."""
    edges = measure.edges_within(job.plan.classes, job.spec.context_tokens_max)
    with job.open("calibrate", job.engine_folder("lp"), blocks) as engine:
        timed = measure.time_classes(engine, edges, job.spec.calibration_s)
    return [[tokens, seconds] for tokens, seconds in sorted(timed.items())]
