"""Whether a GPU bundle agrees with itself: manifest, profile rules and what the engines say of themselves.

A manifest that is sealed can still be wrong: the builder may have written down another limit than the engine
has, or a profile table that the executor will not choose from as the scheduler thinks. Each check below names
the field of the manifest, what it should be by the other side, and what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from engines.bundle_base import CALIBRATION, TOKENIZER, BundleMismatch
from engines.gpu_engine_config import (
    CONFIG,
    EngineConfig,
    read_checkpoint_sizes,
    read_engine_config,
    size_differences,
)
from engines.gpu_manifest import TRTLLM, EngineBuild, GpuManifest, TorchBuild
from engines.trtllm_profiles import profile_ranges, stock_profiles
from engines.types import Layout

Difference = tuple[str, object, object]  # field, expected, found


def check_consistency(path: Path, manifest: GpuManifest) -> None:
    """Raises BundleMismatch for the first field of the manifest that contradicts the rest of it."""
    for field, expected, found in _differences(manifest):
        raise BundleMismatch(path, field, expected, found)


def check_engine_files(path: Path, manifest: GpuManifest) -> None:
    """The manifest against config.json of its engines or checkpoint, whose digests are checked already."""
    if manifest.checkpoint is not None:
        differences = _checkpoint_differences(path, manifest, manifest.checkpoint)
    else:
        assert manifest.engines is not None
        differences = (
            found
            for name, build in manifest.engines.named()
            for found in _engine_differences(path, manifest, name, build)
        )
    for field, expected, found in (*differences, *_candidates(manifest)):
        raise BundleMismatch(path, field, expected, found)


def _differences(manifest: GpuManifest) -> Iterator[Difference]:
    yield from _kind(manifest)
    yield from _listed(manifest)
    yield from _profiles(manifest)
    yield from _limits(manifest)
    yield from _cost(manifest)
    for name in ("bos_id", "eos_id"):
        if (token := getattr(manifest.text, name)) >= (vocab := manifest.model.shape.vocab):
            yield f"text.{name}", f"a token below {vocab} (model.shape.vocab)", token


def _kind(manifest: GpuManifest) -> Iterator[Difference]:
    """Either engines or a checkpoint, and what goes with each."""
    backend, engines, checkpoint = manifest.backend, manifest.engines, manifest.checkpoint
    if backend.name == TRTLLM:
        if engines is None or checkpoint is not None:
            found = "none" if engines is None else "a checkpoint too"
            yield "engines" if engines is None else "checkpoint", "engines, and no checkpoint", found
        if backend.tensorrt is None:
            yield "backend.tensorrt", "the version that built the engines", None
    else:
        if checkpoint is None or engines is not None:
            found = "none" if checkpoint is None else "engines too"
            yield "checkpoint" if checkpoint is None else "engines", "a checkpoint, and no engines", found
        if backend.tensorrt is not None:
            yield "backend.tensorrt", "none: this backend has no TensorRT engines", backend.tensorrt
    if backend.kv_dtype not in (backend.dtype, "fp8"):
        yield "backend.kv_dtype", f"{backend.dtype} or fp8", backend.kv_dtype


def _profiles(manifest: GpuManifest) -> Iterator[Difference]:
    profiles = manifest.profiles
    if profiles.layout is not Layout.PACKED:
        yield "profiles.layout", Layout.PACKED.value, profiles.layout.value
    if manifest.checkpoint is not None:
        sizes = manifest.checkpoint.capture_tokens
        if list(sizes) != sorted(set(sizes)) or not set(sizes) <= set(profiles.t_classes):
            yield "checkpoint.capture_tokens", f"ascending, of profiles.t_classes {profiles.t_classes}", sizes
    if manifest.engines is None:
        return
    for name, build in manifest.engines.named():
        several = len(build.profiles) > 1
        tokens, opt = build.pass_tokens_max, build.profiles[0][1]
        try:
            rule = profile_ranges(
                tokens,
                multiple=several,
                opt_num_tokens=None if several else opt,
                requests_max=build.requests_max,
            )
        except ValueError as error:
            yield f"engines.{name}.profiles", f"a table that can be built ({error})", build.profiles
            continue
        if build.profiles != rule:
            yield f"engines.{name}.profiles", f"{rule} for passes of {tokens} tokens", build.profiles
    sp = manifest.engines.sp
    stock = stock_profiles(sp.pass_tokens_max)
    if len(sp.profiles) == 1:
        stock = replace(stock, t_classes=(sp.pass_tokens_max,))
    for field in fields(stock):
        if (expected := getattr(stock, field.name)) != getattr(profiles, field.name):
            by = f"{expected} by engines.sp.profiles"
            yield f"profiles.{field.name}", by, getattr(profiles, field.name)


def _limits(manifest: GpuManifest) -> Iterator[Difference]:
    limits, gpus = manifest.limits, manifest.backend.tp * manifest.backend.pp
    builds = () if manifest.engines is None else manifest.engines.named()
    for name, build in builds:
        if limits.requests_max > build.requests_max:
            most = f"at most {build.requests_max} (engines.{name}.requests_max)"
            yield "limits.requests_max", most, limits.requests_max
        listed = {f.name: f.size_bytes for f in manifest.files if f.name.startswith(f"{build.directory}/")}
        plan = sum(size for file, size in listed.items() if file.endswith(".engine"))
        if build.plan_bytes != plan:
            yield f"engines.{name}.plan_bytes", f"{plan}, the size of its files", build.plan_bytes
    if limits.kv_blocks * limits.block_tokens < limits.context_tokens_max:
        least = f"blocks for one request of {limits.context_tokens_max} tokens"
        yield "limits.kv_blocks", least, limits.kv_blocks
    weights = sum(build.plan_bytes for _, build in builds)
    if manifest.checkpoint is not None:
        folder = f"{manifest.checkpoint.directory}/"
        weights = sum(
            f.size_bytes
            for f in manifest.files
            if f.name.startswith(folder) and f.name.endswith(".safetensors")
        )
    least_bytes = weights // gpus + max(1, len(builds)) * manifest.kv_pool_bytes
    if limits.memory_bytes < least_bytes:
        yield "limits.memory_bytes", f"at least {least_bytes}, weights and KV pool", limits.memory_bytes
    if limits.memory_bytes > manifest.gpu.memory_bytes:
        needed = f"at least {limits.memory_bytes} (limits.memory_bytes)"
        yield "gpu.memory_bytes", needed, manifest.gpu.memory_bytes


def _candidates(manifest: GpuManifest) -> Iterator[Difference]:
    builds = {} if manifest.engines is None else dict(manifest.engines.named())
    for index, candidate in enumerate(manifest.candidates):
        build = builds.get(candidate.engine)
        where = f"candidates.{index}"
        if build is None:
            yield f"{where}.engine", f"one of {', '.join(builds) or 'no engines'}", candidate.engine
        elif candidate.kept and candidate.gemm_plugin != build.gemm_plugin:
            yield f"{where}.gemm_plugin", f"{build.gemm_plugin}, as the engine", candidate.gemm_plugin
        elif candidate.kept and candidate.plan_bytes != build.plan_bytes:
            yield f"{where}.plan_bytes", f"{build.plan_bytes}, as the engine", candidate.plan_bytes
        elif (timed := [tokens for tokens, _ in candidate.pass_s]) != sorted(set(timed)):
            yield f"{where}.pass_s", "ascending tokens", timed
    for name in {candidate.engine for candidate in manifest.candidates}:
        kept = sum(c.kept for c in manifest.candidates if c.engine == name)
        if kept != 1:
            yield "candidates.kept", f"one of {name}", kept


def _cost(manifest: GpuManifest) -> Iterator[Difference]:
    cost = manifest.cost
    if cost is None:
        return
    derived = {"boundary_tokens": cost.model.boundary_tokens(0), "knee_tokens": cost.model.knee_tokens()}
    for name, expected in derived.items():
        if getattr(cost, name) != expected:
            yield f"cost.{name}", f"{expected} by cost.model", getattr(cost, name)
    if not 0.0 <= cost.median_error <= cost.worst_error:
        yield "cost.median_error", f"0 to cost.worst_error ({cost.worst_error})", cost.median_error
    if cost.sample_count < 1:
        yield "cost.sample_count", "at least 1", cost.sample_count


def _listed(manifest: GpuManifest) -> Iterator[Difference]:
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        yield "files", "each file once", ", ".join(sorted({n for n in names if names.count(n) > 1}))
    needed = [("files", TOKENIZER)]
    if manifest.cost is not None:
        needed.append(("files", CALIBRATION))
    if manifest.checkpoint is not None:
        folder = manifest.checkpoint.directory
        needed.append(("checkpoint.directory", f"{folder}/{CONFIG}"))
    if manifest.engines is not None:
        ranks = [f"rank{rank}.engine" for rank in range(manifest.backend.tp * manifest.backend.pp)]
        for name, build in manifest.engines.named():
            where = f"engines.{name}.directory"
            needed += [(where, f"{build.directory}/{file}") for file in (CONFIG, *ranks)]
        if manifest.engines.lp is not None and manifest.engines.lp.directory == manifest.engines.sp.directory:
            yield "engines.lp.directory", "a folder of its own", manifest.engines.lp.directory
    for field, name in needed:
        if name not in names:
            yield field, f"an entry for {name} in files", "none"


def _engine_differences(
    path: Path, manifest: GpuManifest, name: str, build: EngineBuild
) -> Iterator[Difference]:
    where, file = f"engines.{name}", f"{build.directory}/{CONFIG}"
    try:
        config = read_engine_config(path / file)
        table = profile_ranges(
            config.pass_tokens_max,
            multiple=config.multiple_profiles,
            opt_num_tokens=None if config.multiple_profiles else config.opt_tokens,
            requests_max=config.requests_max,
        )
    except ValueError as error:
        yield file, "config.json of an engine that can be served", error
        return
    backend, limits = manifest.backend, manifest.limits
    for field, in_file, in_manifest in (
        ("backend.tensorrt_llm", config.version, backend.tensorrt_llm),
        ("backend.dtype", config.dtype, backend.dtype),
        ("backend.quantisation", config.quantisation, backend.quantisation),
        ("backend.kv_dtype", config.kv_dtype, backend.kv_dtype),
        ("backend.tp", config.tp, backend.tp),
        ("backend.pp", config.pp, backend.pp),
        ("limits.block_tokens", config.block_tokens, limits.block_tokens),
        (f"{where}.requests_max", config.requests_max, build.requests_max),
        (f"{where}.gemm_plugin", config.gemm_plugin, build.gemm_plugin),
        (f"{where}.profiles", table, build.profiles),
        (f"{where}.build_config_sha256", config.build_config_sha256, build.build_config_sha256),
    ):
        if in_file != in_manifest:
            yield field, f"{in_file} (in {file})", in_manifest
    if limits.context_tokens_max > config.context_tokens_max:
        most = f"at most {config.context_tokens_max} (max_seq_len in {file})"
        yield "limits.context_tokens_max", most, limits.context_tokens_max
    yield from _model_differences(manifest, file, config.architecture, config.sizes)
    yield from _unusable(file, config)


def _unusable(file: str, config: EngineConfig) -> Iterator[Difference]:
    if not config.packed:
        yield file, "packed input and a paged KV cache", "an engine without them"
    if not config.reuse:
        yield file, "paged context attention and no context logits", "an engine in which block reuse is off"


def _checkpoint_differences(path: Path, manifest: GpuManifest, build: TorchBuild) -> Iterator[Difference]:
    file = f"{build.directory}/{CONFIG}"
    try:
        architecture, sizes = read_checkpoint_sizes(path / file)
    except ValueError as error:
        yield file, "config.json of a Hugging Face checkpoint", error
        return
    yield from _model_differences(manifest, file, architecture, sizes)


def _model_differences(
    manifest: GpuManifest, file: str, architecture: str, sizes: dict[str, int]
) -> Iterator[Difference]:
    """architecture: as written there, for example Qwen2ForCausalLM or qwen2."""
    if not architecture.lower().startswith(manifest.model.architecture.lower()):
        yield "model.architecture", f"{architecture} (in {file})", manifest.model.architecture
    for name, found, stated in size_differences(manifest.model.shape, sizes):
        yield f"model.shape.{name}", f"{found} (in {file})", stated
