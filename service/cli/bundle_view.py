"""A GPU bundle in words: what it is, what it was built for, what was measured, what is to be heeded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from engines.gpu_bundle import GpuBundle
    from engines.gpu_manifest import EngineBuild, GpuManifest


def show_gpu_bundle(bundle: GpuBundle, console: Console | None = None) -> None:
    """Lines of name and text, folded under the text where the terminal is narrow."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(width=10, no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines(bundle):
        table.add_row(name, Text(text))
    (console or Console(highlight=False)).print(table)


def lines(bundle: GpuBundle) -> list[tuple[str, str]]:
    """(name, text) of every line, warnings last."""
    manifest = bundle.manifest
    model, backend, gpu, limits = manifest.model, manifest.backend, manifest.gpu, manifest.limits
    source = model.source
    tensorrt = f", TensorRT {backend.tensorrt}" if backend.tensorrt else ""
    found = [
        ("bundle", f"{bundle.path} ({bundle.fingerprint[:12]}), valid on this machine"),
        ("model", f"{model.name}, {model.shape.parameters / 1e9:.1f}B parameters, {source.licence}"),
        ("source", f"{source.repo} at {source.revision[:12]}"),
        ("backend", f"{backend.name}, TensorRT-LLM {backend.tensorrt_llm}{tensorrt}"),
        ("precision", f"{backend.dtype}, quantisation {backend.quantisation}, KV in {backend.kv_dtype}"),
        ("gpu", f"{gpu.name}, compute capability {gpu.compute_capability}, driver {gpu.driver}"),
        *_engines(manifest),
        (
            "limits",
            f"{limits.context_tokens_max} tokens a request, {limits.requests_max} requests an iteration",
        ),
        ("kv", f"{limits.kv_blocks} blocks of {limits.block_tokens} tokens, {_gb(manifest.kv_pool_bytes)}"),
        ("memory", f"{_gb(limits.memory_bytes)} of {_gb(gpu.memory_bytes)} a GPU"),
        *_cost(manifest),
        *_candidates(manifest),
    ]
    return [*found, *(("warning", str(warning)) for warning in bundle.warnings)]


def _engines(manifest: GpuManifest) -> list[tuple[str, str]]:
    if manifest.checkpoint is not None:
        sizes = " ".join(map(str, manifest.checkpoint.capture_tokens))
        return [("graphs", f"captured at start-up for {sizes or 'no'} tokens")]
    assert manifest.engines is not None  # one of both, by the bundle's own checks
    shared = "both lanes" if manifest.engines.lp is None else "short prefills"
    serves = {"sp": shared, "lp": "long prefills"}
    return [
        ("engine", f"{name}, {serves[name]}: {_engine(build)}") for name, build in manifest.engines.named()
    ]


def _engine(build: EngineBuild) -> str:
    ends = " ".join(str(high) for _, _, high in build.profiles)
    gemm = "plugin" if build.gemm_plugin else "TensorRT"
    return f"T-classes {ends}, GEMM by {gemm}, plan {_gb(build.plan_bytes)}"


def _cost(manifest: GpuManifest) -> list[tuple[str, str]]:
    cost = manifest.cost
    if cost is None:
        return [("cost", "not calibrated")]
    quick = ", quick" if cost.quick else ""
    return [
        ("cost", cost.model.origin),
        (
            "fit",
            f"{cost.sample_count} samples{quick}; error {cost.median_error:.1%} median, "
            f"{cost.worst_error:.0%} worst; L_m {cost.boundary_tokens}, knee {cost.knee_tokens} tokens",
        ),
    ]


def _candidates(manifest: GpuManifest) -> list[tuple[str, str]]:
    """What the choice rests on: the time of each pass that was measured."""
    return [
        (
            "candidate",
            f"{one.engine}, GEMM by {'plugin' if one.gemm_plugin else 'TensorRT'}"
            f"{', kept' if one.kept else ''}: plan {_gb(one.plan_bytes)}; "
            + (
                ", ".join(f"T {tokens} {seconds * 1e3:.2f} ms" for tokens, seconds in one.pass_s)
                or "not timed"
            ),
        )
        for one in manifest.candidates
    ]


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 5 * 10**7 else f"{size_bytes / 1e6:.1f} MB"
