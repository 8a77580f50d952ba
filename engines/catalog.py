"""Engines by backend name. The adapter, and the library behind it, is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engines.base import Engine
from engines.bundle import Bundle, open_bundle
from engines.cost_model import CostModel
from engines.gpu_bundle import GpuBundle
from engines.gpu_catalog import ExecutorChoice, cost_of, open_backend


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a backend may need; each takes what concerns it."""

    bundle: Path
    threads: int | None = None
    kv_capacity_tokens: int = 32_768
    simulated_preset: str = "h200_32b"
    simulated_time_scale: float = 1.0
    executor: ExecutorChoice = field(default_factory=ExecutorChoice)
    progress: Callable[[int, int], None] | None = None  # (profiles warmed, in all)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine ready to run, its cost model on this machine, and the bundle it came from, if any."""

    engine: Engine
    cost: CostModel
    model_name: str
    bundle: Bundle | GpuBundle | None = None


def load_engine(backend: str, options: EngineOptions) -> LoadedEngine:
    """Raises ValueError for an unknown backend or option, `engines.bundle.BundleMismatch`; for an executor
    that does not come up LinkLost or BackendUnavailable."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not known; choose from {', '.join(BACKENDS)}")
    return BACKENDS[backend](options)


def _openvino_cpu(options: EngineOptions) -> LoadedEngine:
    bundle = open_bundle(options.bundle)  # checked before the library is imported
    from engines.openvino_cpu import OpenVinoCpuEngine

    manifest = bundle.manifest
    engine = OpenVinoCpuEngine.load(
        bundle.path,
        manifest.profiles,
        threads=options.threads or manifest.backend.threads,
        precision=manifest.backend.precision,
        kv_capacity_tokens=options.kv_capacity_tokens,
        progress=options.progress,
    )
    return LoadedEngine(engine, manifest.cost.model, manifest.model.name, bundle)


def _simulated(options: EngineOptions) -> LoadedEngine:
    from engines import simulated_settings
    from engines.simulated import SimulatedEngine, SimulatedModel

    presets = {
        "h200_32b": simulated_settings.h200_32b_like,
        "small_cpu": simulated_settings.small_cpu_like,
        "padded_grid": simulated_settings.padded_grid_like,
        "trtllm_like": simulated_settings.trtllm_32b_like,
    }
    if options.simulated_preset not in presets:
        raise ValueError(
            f"simulated_preset {options.simulated_preset!r} is not known; choose from {', '.join(presets)}"
        )
    capabilities, profiles, cost = presets[options.simulated_preset]()
    scale = options.simulated_time_scale
    engine = SimulatedEngine(SimulatedModel(capabilities, profiles, cost), time_scale=scale)
    return LoadedEngine(engine, cost.scaled(scale), f"simulated-{options.simulated_preset}")


def _executor(backend: str) -> Callable[[EngineOptions], LoadedEngine]:
    def load(options: EngineOptions) -> LoadedEngine:
        engine, bundle = open_backend(backend, options.bundle, options.executor)
        return LoadedEngine(engine, cost_of(bundle), bundle.manifest.model.name, bundle)

    return load


BACKENDS: Mapping[str, Callable[[EngineOptions], LoadedEngine]] = {
    "openvino_cpu": _openvino_cpu,
    "simulated": _simulated,
    **{name: _executor(name) for name in ("trtllm", "trtllm_torch", "triton_server")},
}
